"""What passes from step to step, into it, and out of it? Pytrees of fixed shapes."""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from helios_jax.cache.paged import KVPools, KVScales, init_pools
from helios_jax.config import ModelConfig
from helios_jax.engine.config import StepConfig
from helios_jax.sampling import (
    Logprobs,
    SamplingArrays,
    SamplingParams,
    SamplingShapes,
    stack_sampling,
)
from helios_jax.scheduler import (
    Counters,
    Requests,
    SchedulerConfig,
    SchedulerState,
    init_requests,
    init_scheduler,
)
from helios_jax.speculative import AcceptanceTelemetry, ProposerState, init_telemetry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Telemetry:
    """Sums since the start; int32 that wraps, so read differences.

    Attributes:
      num_steps, num_rounds: steps, and the decode rounds in them.
      num_decode_rows: rows that took part, summed over rounds.
      num_prefill_tokens: tokens computed in chunks, recomputed ones included.
      num_output_tokens: tokens drawn.
      num_failed: requests ended by a NaN or an infinity.
    """

    num_steps: Array
    num_rounds: Array
    num_decode_rows: Array
    num_prefill_tokens: Array
    num_output_tokens: Array
    num_failed: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpeculationState:
    """What speculation remembers between steps.

    Attributes:
      proposer: `shared` is used by all rows (a draft model's KV pools, under the block ids of the
        target's), `rows` has tables of R rows. A row that left its blocks is a row just begun.
      controller: of R rows; outlives preemption.
      hidden_RD: see `speculative.RoundRows`.
      is_spoilt_R: bool, the row drafts nothing in its next round, see `SpeculativeState`.
      speculates_R: bool, whether the request wants drafts at all.
      telemetry: how drafts were accepted.
    """

    proposer: ProposerState
    controller: Any
    hidden_RD: Array
    is_spoilt_R: Array
    speculates_R: Array
    telemetry: AcceptanceTelemetry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EngineState:
    """Everything that a step reads and writes; donated to it.

    Attributes:
      scheduler: request table and block pool.
      pools: the keys and values.
      scales: of the 8-bit formats; None for 1.
      tokens_RS: int32, prompt and output of each row, S = max_model_len.
      sampling: the rows' sampling parameters.
      finish_reason_R: int32, as in `generation.GenerationState`.
      telemetry: see there.
      speculation: None where the engine does not speculate.
    """

    scheduler: SchedulerState
    pools: KVPools
    scales: KVScales | None
    tokens_RS: Array
    sampling: SamplingArrays
    finish_reason_R: Array
    telemetry: Telemetry
    speculation: SpeculationState | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arrivals:
    """What the host hands in: N new requests and A to call off.

    Attributes:
      requests: their hashes are filled in by `admit`.
      tokens_NS: int32, prompts, padded at will.
      sampling: of N rows, with the parts and widths of the state's.
      shares_prefix_N: bool, whether the request may use and leave cached prefixes.
      speculates_N: bool, whether the request wants drafts.
      abort_ids_A: int32, request ids, -1 padded; they are called off before the new ones enter.
    """

    requests: Requests
    tokens_NS: Array
    sampling: SamplingArrays
    shares_prefix_N: Array
    speculates_N: Array
    abort_ids_A: Array


class DraftCounts(NamedTuple):
    """How the drafts of some rows fared in one step, int32 [B] each.

    num_verifications_B: rounds with at least one draft token.
    """

    num_draft_B: Array
    num_accepted_B: Array
    num_verifications_B: Array


class RowOutputs(NamedTuple):
    """Tokens of some rows in one step.

    request_id_B: int32, -1 where there is no row.
    tokens_BN: int32, -1 beyond a row's tokens.
    finish_reason_B: int32.
    logprobs: of the tokens; None unless the variant has them.
    drafts: None where nothing drafts.
    """

    request_id_B: Array
    tokens_BN: Array
    finish_reason_B: Array
    logprobs: Logprobs | None
    drafts: DraftCounts | None = None


class PromptLogprobs(NamedTuple):
    """What the model found of the tokens that follow those of the chunk.

    request_id_C, position_C: int32, request and position of the *scored* token; -1 where none.
    token_C: int32; logprobs: without the B axis, N = C.
    """

    request_id_C: Array
    position_C: Array
    token_C: Array
    logprobs: Logprobs


class StepSummary(NamedTuple):
    """The state after a step, in numbers.

    Attributes:
      num_waiting, num_running: rows.
      num_pending_tokens: tokens that running rows have yet to prefill.
      num_used_blocks: of the pool.
      running_id_R: int32 [R]; request ids of running rows, -1 elsewhere.
      counters, telemetry: the scheduler's and the engine's.
      acceptance: of drafts; None where the engine does not speculate.
    """

    num_waiting: Array
    num_running: Array
    num_pending_tokens: Array
    num_used_blocks: Array
    running_id_R: Array
    counters: Counters
    telemetry: Telemetry
    acceptance: AcceptanceTelemetry | None


class StepOutputs(NamedTuple):
    """What the host reads of a step; nothing in it is shared with the state.

    Attributes:
      answer_N: `scheduler.submit`'s, for each arrival.
      chunk: rows of the prefill chunk: N = 1, the token drawn after their last known one; None
        without a chunk.
      rounds: rows of the decode rounds; None without.
      prompt_logprobs: None unless the chunk's variant has them.
      summary: the state afterwards.
    """

    answer_N: Array
    chunk: RowOutputs | None
    rounds: RowOutputs | None
    prompt_logprobs: PromptLogprobs | None
    summary: StepSummary


def init_state(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    config: StepConfig,
    *,
    shapes: SamplingShapes,
    scales: KVScales | None = None,
    hidden_dtype: Any = jnp.float32,
) -> EngineState:
    """An engine with nothing in it.

    Args:
      hidden_dtype: of the model's activations; matters where `config` speculates.
    """
    state = init_scheduler(scheduler)
    R = scheduler.max_num_rows
    zeros = {field.name: jnp.int32(0) for field in dataclasses.fields(Telemetry)}
    return EngineState(
        scheduler=state,
        pools=init_pools(model, config.num_blocks),
        scales=scales,
        tokens_RS=jnp.zeros((R, scheduler.max_model_len), jnp.int32),
        sampling=init_sampling(model, R, shapes),
        finish_reason_R=jnp.zeros(R, jnp.int32),
        telemetry=Telemetry(**zeros),
        speculation=_init_speculation(model, R, config, hidden_dtype),
    )


def _init_speculation(
    model: ModelConfig, num_rows: int, config: StepConfig, hidden_dtype: Any
) -> SpeculationState | None:
    speculation = config.speculation
    if speculation is None:
        return None
    state = SpeculationState(
        proposer=speculation.proposer.init_state(num_rows, config.num_blocks),
        controller=speculation.controller.init_state(num_rows),
        hidden_RD=jnp.zeros((num_rows, model.hidden_size), hidden_dtype),
        is_spoilt_R=jnp.zeros(num_rows, bool),
        speculates_R=jnp.zeros(num_rows, bool),
        telemetry=init_telemetry(speculation.max_num_draft_tokens),
    )
    # An array that is in the state twice cannot be donated.
    seen: set[int] = set()

    def unshared(leaf: Array) -> Array:
        if id(leaf) in seen:
            return jnp.array(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(unshared, state)


def init_sampling(model: ModelConfig, num_rows: int, shapes: SamplingShapes) -> SamplingArrays:
    """Room for the parameters of `num_rows` rows."""
    params = [SamplingParams(temperature=0.0, seed=0)] * num_rows
    return stack_sampling(params, vocab_size=model.vocab_size, shapes=shapes)


def widen_sampling(
    model: ModelConfig, sampling: SamplingArrays, shapes: SamplingShapes
) -> SamplingArrays:
    """The same parameters with room for `shapes`, at least what they had."""
    wider = init_sampling(model, len(sampling.temperature_B), shapes)

    def place(new: Array, old: Array | None, at_end: bool = False) -> Array:
        if old is None:
            return new
        # Bad words stand flush right.
        last = slice(new.shape[-1] - old.shape[-1], None) if at_end else slice(old.shape[-1])
        index = (*(slice(size) for size in old.shape[:-1]), last)
        return new.at[index if old.ndim > 1 else slice(None)].set(old)

    def part(name: str) -> Any:
        new, old = getattr(wider, name), getattr(sampling, name)
        if isinstance(new, tuple):
            olds: Any = old if old is not None else (None,) * len(new)
            make: Any = type(new)
            return make(*map(place, new, olds))
        return None if new is None else place(new, old, at_end=name == "bad_words_BWX")

    return SamplingArrays(**{f.name: part(f.name) for f in dataclasses.fields(SamplingArrays)})


def init_arrivals(
    state: EngineState, num_requests: int, num_tokens: int, num_aborts: int, sampling
) -> Arrivals:
    """N absent requests on the host, to be filled in; `sampling` is that of N rows."""
    max_blocks = state.scheduler.block_table_RM.shape[1]
    return Arrivals(
        requests=init_requests(num_requests, max_blocks),
        tokens_NS=np.zeros((num_requests, num_tokens), np.int32),  # pyright: ignore[reportArgumentType]
        sampling=sampling,
        shares_prefix_N=np.ones(num_requests, bool),  # pyright: ignore[reportArgumentType]
        speculates_N=np.ones(num_requests, bool),  # pyright: ignore[reportArgumentType]
        abort_ids_A=np.full(num_aborts, -1, np.int32),  # pyright: ignore[reportArgumentType]
    )
