"""How is one step computed? The device's state, and the programs that change it one after another.

Requests, locks and callers are the shell's (`engine.core`); to compute a recorded run again, this
is all that is needed.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.cache.paged import KVScales
from helios_jax.config import ModelConfig
from helios_jax.engine.arrivals import MAX_ABORTS, make_arrivals
from helios_jax.engine.config import StepConfig, pool_block_bytes
from helios_jax.engine.programs import Programs
from helios_jax.engine.recording import StepInputs
from helios_jax.engine.requests import EngineRequest
from helios_jax.engine.state import EngineState, StepOutputs, init_state, widen_sampling
from helios_jax.engine.step import plan_sizes, plan_step
from helios_jax.engine.variants import StepVariants
from helios_jax.sampling import SamplingParams, SamplingShapes, sampling_shapes
from helios_jax.scheduler import SchedulerConfig, Urgency, rebase
from helios_jax.speculative import SpeculationParams

# Room for a few stop ids in every program, so that one more of them compiles nothing.
_COMMON_SHAPES = SamplingShapes(num_stop_ids=4)
# Arrivals of one admission where it is more than one; more take several.
_ARRIVALS = 8


@partial(jax.jit, donate_argnames="state")
def _rebase(state: EngineState, seconds: jax.Array) -> EngineState:
    return dataclasses.replace(state, scheduler=rebase(state.scheduler, seconds))


class DeviceSteps:
    """What an engine has on the device. One thread at a time.

    Attributes:
      state: donated to every program and replaced by what it gives: its arrays are this object's
        alone, so that there is room for one KV pool.
      shapes: of the sampling parameters in it.
      programs: those that this engine asked for.
      answers: of admissions that nobody has looked at: (int32 on the device, how many count).
      scales: of an 8-bit KV cache, numpy's.
    """

    def __init__(
        self,
        form: Any,
        *,
        model_config: ModelConfig,
        scheduler_config: SchedulerConfig,
        step_config: StepConfig,
        urgency: Urgency,
        kv_scales: KVScales | None,
        speculation_params: SpeculationParams,
    ):
        """
        Raises:
          MemoryError: the device has no room for the KV pool; says what to lower.
        """
        self.form = form
        self._model_config = model_config
        self._scheduler_config = scheduler_config
        self._step_config = step_config
        # Of the stages that run no kernel, which engines of any backend share.
        self._bare_config = dataclasses.replace(step_config, backend=None)
        self._urgency = urgency
        self._speculation_params = speculation_params
        # Copies: the state, and so what is in it, is donated.
        self.scales = jax.tree.map(np.array, kv_scales)
        self.shapes = _COMMON_SHAPES | sampling_shapes(
            [SamplingParams()], eos_token_ids=model_config.eos_token_ids
        )
        self.start_over()

    def start_over(self) -> None:
        """An empty state. Let go of the old one first: there may be no room for both."""
        self.programs = Programs()
        self.answers: deque[tuple[jax.Array, int]] = deque()
        self.state = self._empty_state()
        # What `plan_step` gives, for programs that are compiled before it has run.
        zero = jnp.int32(0)
        _, self.plan_shape = jax.eval_shape(
            partial(plan_step, config=self._step_config, urgency=self._urgency),
            self.state, jnp.float32(0), zero, zero,
        )  # fmt: skip

    def let_go(self) -> None:
        """Frees the state, whoever else still refers to it (a failed step's frames do)."""
        for array in jax.tree.leaves(self.state):
            array.delete()

    @property
    def pool_bytes(self) -> int:
        """Size of the KV pool, a proposer's included."""
        config = self._step_config
        return config.num_blocks * pool_block_bytes(self.form.model.config, config.speculation)

    def _empty_state(self) -> EngineState:
        try:
            return init_state(
                self.form.model.config, self._scheduler_config, self._step_config,
                shapes=self.shapes, scales=jax.tree.map(jnp.array, self.scales),
                hidden_dtype=self.form.model.dtype,
            )  # fmt: skip
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(
                f"the device has no {self.pool_bytes / 2**30:.1f} GiB left for the KV pool beside "
                "the weights; lower kv_cache_memory_bytes, gpu_memory_utilization, max_model_len "
                f"or max_num_rows, or serve fewer bytes of weights (dtype='int4'): {error}"
            ) from error

    def compute(self, inputs: StepInputs, origin: float) -> StepOutputs | None:
        """Starts a step, or what ends requests that were called off; None for neither.

        Args:
          origin: of the device's clock, on `time.monotonic`'s.
        """
        if inputs.rebase_seconds is not None:
            self.state = _rebase(self.state, jnp.float32(inputs.rebase_seconds))
        if inputs.shapes is not None:
            self.widen(inputs.shapes)
        self._admit(inputs.arrived, inputs.called_off, origin)
        if inputs.variants is not None:
            return self._step(inputs.variants, inputs.now, inputs.max_rounds)
        return self._end(None, None, None) if inputs.called_off else None

    def widen(self, shapes: SamplingShapes) -> None:
        """Makes room for sampling parameters of larger shapes."""
        sampling = widen_sampling(self._model_config, self.state.sampling, shapes)
        self.state = _with_sampling(self.state, sampling)
        self.shapes = shapes

    def _admit(
        self, arrived: Sequence[EngineRequest], called_off: Sequence[int], origin: float
    ) -> None:
        rows = [(request, index) for request in arrived for index in range(len(request.rows))]
        called_off = list(called_off)
        while rows or called_off:
            aborted, called_off = called_off[:MAX_ABORTS], called_off[MAX_ABORTS:]
            # Arrivals may need the rows of those called off.
            number = 1 if called_off or len(rows) <= 1 else _ARRIVALS
            taken, rows = ([], rows) if called_off else (rows[:number], rows[number:])
            arrivals = make_arrivals(
                self.state, taken, aborted, number,
                shapes=self.shapes, model_config=self._model_config, origin=origin,
            )  # fmt: skip
            self.state, answer_N = self.programs.run(
                "admit", (self.shapes, arrivals.tokens_NS.shape), (self.state, arrivals),
                config=self._bare_config,
            )  # fmt: skip
            self.answers.append((answer_N, len(taken)))

    def _step(self, variants: StepVariants, now: float, max_rounds: int) -> StepOutputs:
        """`engine_step`, a program after the other, none of which is waited for."""
        params, shapes, programs = self.form.params, self.shapes, self.programs
        # numpy's: jax's own scalars are made by programs of their own, 0.1 ms each.
        clock = np.float32(now)
        model = dict(model=self.form.model, config=self._step_config)
        policy = dict(config=self._bare_config, urgency=self._urgency)
        chunk_tokens, num_rows = plan_sizes(
            variants.chunk, variants.rounds if variants.decodes else None
        )
        sizes = (clock, np.int32(chunk_tokens), np.int32(num_rows))
        # Neither looks at sampling parameters, whose shapes change with the requests.
        sampling = self.state.sampling
        bare = _with_sampling(self.state, None)
        programs.request("plan", None, (bare, *sizes), **policy)
        programs.request("end", None, (bare,), config=self._bare_config)
        rest = (self.plan_shape, clock)
        if variants.chunk is not None:
            key = (shapes, variants.chunk)
            programs.request(
                "chunk", key, (params, self.state, *rest), variant=variants.chunk, **model
            )
        # Where none are decoded yet they will be next.
        key = (shapes, variants.rounds)
        programs.request(
            "rounds", key, (params, self.state, *rest, np.int32(0), self._speculation_params),
            variant=variants.rounds, **model,
        )  # fmt: skip

        state, plan = programs.run("plan", None, (bare, *sizes), **policy)
        self.state = _with_sampling(state, sampling)
        chunk = prompt_logprobs = rounds = None
        if variants.chunk is not None:
            self.state, chunk, prompt_logprobs = programs.run(
                "chunk", (shapes, variants.chunk), (params, self.state, plan, clock),
                variant=variants.chunk, **model,
            )  # fmt: skip
        if variants.decodes:
            self.state, rounds = programs.run(
                "rounds", (shapes, variants.rounds),
                (params, self.state, plan, clock, np.int32(max_rounds), self._speculation_params),
                variant=variants.rounds, **model,
            )  # fmt: skip
        return self._end(chunk, rounds, prompt_logprobs)

    def _end(self, chunk, rounds, prompt_logprobs) -> StepOutputs:
        sampling, state = self.state.sampling, _with_sampling(self.state, None)
        state, summary = self.programs.run("end", None, (state,), config=self._bare_config)
        self.state = _with_sampling(state, sampling)
        no_answers: Any = np.zeros(0, np.int32)
        return StepOutputs(no_answers, chunk, rounds, prompt_logprobs, summary)


def _with_sampling(state: EngineState, sampling: Any) -> EngineState:
    return dataclasses.replace(state, sampling=sampling)
