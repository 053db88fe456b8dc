"""How do requests get into the compiled steps, and their tokens out? The thin shell on the host.

It turns requests into arrivals, starts step n + 1 before it reads step n, detokenises, streams and
calls off. It decides nothing about memory or order: that is the step's (`engine.step`).
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from helios_jax.cache.paged import KVScales
from helios_jax.config import ModelConfig, require
from helios_jax.engine.config import EngineConfig, resolve_config
from helios_jax.engine.device import DeviceSteps
from helios_jax.engine.metrics import Metrics
from helios_jax.engine.recording import Recorder, StepInputs
from helios_jax.engine.requests import (
    DeadlineExceeded,
    EngineError,
    EngineFull,
    EngineRequest,
    NeverFits,
    Prompt,
    RequestUpdate,
    Targets,
    check_prompt,
    check_sampling,
    start_rows,
)
from helios_jax.engine.row_progress import RowProgress, logprobs_at
from helios_jax.engine.saving import recording_header, restore_engine, save_engine
from helios_jax.engine.state import (
    RowOutputs,
    StepOutputs,
)
from helios_jax.engine.variants import LiveRow, StepVariants, choose_variants
from helios_jax.generation import FINISH_REASONS, RUNNING
from helios_jax.outputs import Acceptance, StreamOutput
from helios_jax.sampling import (
    MAX_LOGPROBS,
    Logprobs,
    SamplingParams,
    sampling_shapes,
    stack_sampling,
)
from helios_jax.scheduler import ACCEPTED, Urgency
from helios_jax.scheduler.urgency import deadline
from helios_jax.speculative import (
    AcceptanceReport,
    AdaptiveLength,
    Speculation,
    SpeculationParams,
    measure_costs,
)
from helios_jax.tokenizer import Tokenizer

_logger = logging.getLogger("helios_jax.engine")

# Rounds of a step while somebody streams.
STREAMED_ROUNDS = 4
# The device's clock starts anew after so long: float32 resolves milliseconds up to 1e4 s.
REBASE_SECONDS = 4096.0


class _InFlight(NamedTuple):
    """A step that was started and not read."""

    outputs: StepOutputs
    chunk_tokens: int


@dataclass
class _Live:
    """A row in the device's table."""

    request: EngineRequest
    index: int
    row: LiveRow = field(repr=False)

    @property
    def progress(self) -> RowProgress:
        return self.request.rows[self.index]


# What is to be told, and to whom.
_News = list[tuple[EngineRequest, RequestUpdate]]


class EngineCore:
    """Serves requests together, as they come and go; `step` is the whole of it.

    `Engine` adds how callers wait. All methods may be called from any thread.

    Attributes:
      config: as given.
      scheduler_config, step_config: what followed from it.
      speculation_params: what goes with `step_config.speculation`, measured costs included.
      max_model_len: longest sequence.
      snapshot_sha256: of the manifest that it was restored from; None if it started empty.
    """

    def __init__(
        self,
        form: Any,
        tokenizer: Tokenizer,
        *,
        model_config: ModelConfig,
        config: EngineConfig | None = None,
        urgency: Urgency = deadline,
        kv_scales: KVScales | None = None,
        seed: int | None = None,
        record: str | os.PathLike | None = None,
        speculation: Speculation | None = None,
        speculation_params: SpeculationParams | None = None,
    ):
        """
        Args:
          form: model, parameters and the KV cache's dtype, a `ServingForm`.
          tokenizer: text to token ids and back.
          model_config: the checkpoint's.
          config: None for the defaults.
          urgency: who goes first, see `scheduler.urgency`.
          kv_scales: of an 8-bit KV cache, float32 [L, K] each; None for 1.
          seed: makes the seeds of requests without one reproducible.
          record: a new file for what `replay` needs to compute the run again; see `recording`.
          speculation: who drafts, and how much; None decodes plainly. See `helios_jax.speculative`.
          speculation_params: the proposer's parameters, and the controller's costs; those of
            `AdaptiveLength` are measured if they are not given, which takes as long as compiling
            two passes.

        Raises:
          ValueError: options that contradict each other or the model, a proposer that cannot draft
            for it, or too small a KV pool.
          MemoryError: the device has no room for the KV pool; says what to lower.
        """
        self.config = config or EngineConfig()
        self.form = form
        self.tokenizer = tokenizer
        self.model_config = model_config
        self._urgency = urgency
        self._rng = np.random.default_rng(seed)
        if speculation is not None and speculation.max_num_draft_tokens == 0:
            speculation = None
        if speculation is not None:
            speculation.proposer.check(form.model)
        self.scheduler_config, self.step_config = resolve_config(
            self.config, form.model.config, cache_dtype=form.cache_dtype, speculation=speculation
        )
        self.speculation_params = self._with_costs(speculation_params or SpeculationParams())
        self.max_model_len = self.scheduler_config.max_model_len
        self._device = DeviceSteps(
            form,
            model_config=model_config,
            scheduler_config=self.scheduler_config,
            step_config=self.step_config,
            urgency=urgency,
            kv_scales=kv_scales,
            speculation_params=self.speculation_params,
        )
        # `_inbox` guards what `submit` and `abort` touch, `_stepping` all the rest.
        self._inbox = threading.Condition()
        self._stepping = threading.RLock()
        self._arrived: deque[EngineRequest] = deque()
        self._called_off: list[int] = []
        self._requests: dict[int, EngineRequest] = {}
        self._num_rows = 0
        self._next_id = 0
        self._metrics = Metrics()
        self._num_visitors = 0
        self._num_failures_in_a_row = 0
        # Only ever larger; the device has them from the step on that needs them.
        self._wanted_shapes = self._device.shapes
        self._recorder: Recorder | None = None
        self.snapshot_sha256: str | None = None
        self._begin()
        if record is not None:
            self._recorder = Recorder(record, recording_header(self))

    def _with_costs(self, extra: SpeculationParams) -> SpeculationParams:
        speculation = self.step_config.speculation
        if speculation is None:
            return SpeculationParams()
        if extra.costs is None and isinstance(speculation.controller, AdaptiveLength):
            costs = measure_costs(
                (self.form.model, self.form.params), speculation, extra.proposer,
                kv_dtype=self.step_config.narrow_dtype, backend=self.config.backend,
            )  # fmt: skip
            extra = extra._replace(costs=costs)
        speculation.controller.check(extra.costs, speculation.max_num_draft_tokens)
        return extra

    # Requests in

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        priority: float = 0,
        deadline_seconds: float | None = None,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
        on_update: Callable[[RequestUpdate], Any] | None = None,
        is_streamed: bool = True,
        speculate: bool = True,
        ends_at_deadline: bool = False,
    ) -> int:
        """Puts a request in line and returns its number.

        Args:
          prompt: text or token ids.
          sampling: None for the defaults; its n outputs run side by side.
          priority: lower is earlier, for the `priority` policy.
          deadline_seconds: from now, for the whole answer.
          ttft_target_seconds, tpot_target_seconds: to the first token, and for each later one.
          on_update: called by the stepping thread with whatever is new; must be quick.
          is_streamed: whether tokens are wanted as they come; False lets steps be longer.
          speculate: False decodes this request plainly, whatever the engine's `speculation`.
          ends_at_deadline: abort the request at `deadline_seconds` if it has not ended; `on_update`
            gets `DeadlineExceeded`, and the blocks are free after the step that begins then.

        Raises:
          ValueError: an argument that breaks its rule; nothing was submitted. `NeverFits`, a kind
            of it: more outputs than the request table has rows.
          NotImplementedError: what no engine can do, such as logprobs of the whole vocabulary.
          EngineFull: no room in the request table for now.
        """
        params = check_sampling(sampling or SamplingParams(), self.tokenizer)
        checked = check_prompt(
            prompt, self.tokenizer, self.model_config, self.max_model_len, "prompt"
        )
        targets = Targets(
            priority, deadline_seconds, ttft_target_seconds, tpot_target_seconds, ends_at_deadline
        )
        self._check(params)
        return self._enqueue(*checked, params, targets, on_update, is_streamed, speculate)

    def _check(self, params: SamplingParams) -> None:
        """ValueError where parameters do not fit the vocabulary or the table."""
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) == -1:
                raise NotImplementedError(
                    f"{name}=-1: a batch reports the most probable tokens, not the whole "
                    f"vocabulary; ask for at most {MAX_LOGPROBS}"
                )
        stack_sampling(
            [params.output(0)],
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.model_config.eos_token_ids,
        )
        capacity = self.scheduler_config.max_num_rows
        if params.n > capacity:
            raise NeverFits(
                f"n={params.n}: more outputs than max_num_rows={capacity}, the request table's size"
            )

    def _enqueue(
        self,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        targets: Targets,
        on_update: Callable[[RequestUpdate], Any] | None,
        is_streamed: bool,
        speculates: bool,
    ) -> int:
        """Puts a checked request in line; EngineFull if the table has no room."""
        needed = sampling_shapes([params.output(0)], eos_token_ids=self.model_config.eos_token_ids)
        capacity = self.scheduler_config.max_num_rows
        with self._inbox:
            if self._num_rows + params.n > capacity:
                raise EngineFull(
                    f"the request table holds {self._num_rows} of max_num_rows={capacity} outputs "
                    f"and this request wants {params.n}: try again when some have finished, or "
                    "raise max_num_rows"
                )
            rows = start_rows(
                ids, params, self.tokenizer, self.model_config.eos_token_ids,
                self.max_model_len, self._rng,
            )  # fmt: skip
            if self.step_config.speculation is not None:
                for row in rows:
                    row.acceptance = Acceptance(0, 0, 0)
            request_id = self._next_id
            row_ids = [self._next_id + index for index in range(params.n)]
            self._next_id += params.n
            request = EngineRequest(
                request_id=request_id,
                prompt=text,
                prompt_token_ids=ids,
                rows=rows,
                row_ids=row_ids,
                targets=targets,
                arrival_seconds=time.monotonic(),
                submitted_seconds=time.perf_counter(),
                on_update=on_update,
                is_streamed=is_streamed,
                speculates=speculates,
            )
            self._wanted_shapes |= needed
            self._requests[request_id] = request
            self._num_rows += params.n
            self._arrived.append(request)
            self._inbox.notify_all()
        return request_id

    def abort(self, request_id: int) -> None:
        """Ends a request: nothing more of it comes, and its blocks are free after the next step.

        One that has ended, or never was, is passed over.
        """
        with self._inbox:
            request = self._requests.get(request_id)
            if request is None:
                return
            self._forget(request)
            if request in self._arrived:
                self._arrived.remove(request)
            else:
                self._called_off += [
                    row_id
                    for row_id, row in zip(request.row_ids, request.rows, strict=True)
                    if row.finish_reason is None
                ]
            self._inbox.notify_all()

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        with self._inbox:
            return bool(self._requests or self._called_off or self._in_flight)

    @property
    def request_ids(self) -> list[int]:
        """Requests in flight, in order of submission."""
        with self._inbox:
            return list(self._requests)

    @property
    def num_programs(self) -> int:
        """Programs asked for so far; constant once the engine is warm."""
        return self._device.programs.num_programs

    # Steps

    def step(self) -> list[RequestUpdate]:
        """Starts a step if there is something to do, and reads the one before it.

        Returns:
          What is new, also given to each request's `on_update`.

        Raises:
          EngineError: the step failed. All requests have ended with that error; the engine is empty
            and may be used again.
        """
        return self._turn(launches=True)

    def _turn(self, launches: bool) -> list[RequestUpdate]:
        """Starts a step, or none, and reads those before it."""
        news: _News = []
        with self._stepping:
            try:
                if launches:
                    self._expire(news)
                started = launches and self._launch()
                while len(self._in_flight) > (1 if started else 0):
                    self._read(self._in_flight.popleft(), news)
            except BaseException as cause:
                # Those who have ended are forgotten already: they are told now or never.
                self._deliver_all(news)
                error = self._fail(cause)
                if not isinstance(cause, Exception):
                    # Ctrl-C, at any place: what the host and the device know may differ by a step.
                    raise
                raise error from cause
            if self._recorder is not None and not self._in_flight:
                self._recorder.flush()
            self._deliver_all(news)
            return [update for _, update in news]

    def _expire(self, news: _News) -> None:
        """Calls off the requests whose deadline has passed, where they asked for that."""
        now = time.monotonic()
        with self._inbox:
            expired = [request for request in self._requests.values() if request.is_expired(now)]
            for request in expired:
                self.abort(request.request_id)
        for request in expired:
            error = DeadlineExceeded(
                f"deadline_seconds={request.targets.deadline_seconds}: passed before the request "
                "was done"
            )
            stream = StreamOutput("", [], "abort")
            news.append((request, RequestUpdate(request.request_id, 0, stream, error)))

    def _launch(self) -> bool:
        """Admits what is in the inbox and starts a step; False if no row is in the table."""
        now, rebase_seconds = time.monotonic() - self._origin, None
        if now > REBASE_SECONDS:
            self._origin += now
            now, rebase_seconds = 0.0, now
        with self._inbox:
            arrived, self._arrived = list(self._arrived), deque()
            called_off, self._called_off = self._called_off, []
            wanted = self._wanted_shapes
        shapes = wanted if wanted != self._device.shapes else None
        for row_id in called_off:
            self._live.pop(row_id, None)
        for request in arrived:
            for index in range(len(request.rows)):
                self._put_in_table(request, index)
        inputs = StepInputs(now, rebase_seconds, shapes, arrived, called_off)
        if self._live:
            variants, rounds = self._choose()
            inputs = inputs._replace(variants=variants, max_rounds=rounds)
        outputs = self._device.compute(inputs, self._origin)
        if self._recorder is not None:
            self._recorder.step(inputs, self._origin)
        if outputs is not None:
            chunk = inputs.variants and inputs.variants.chunk
            self._in_flight.append(_InFlight(outputs, chunk.chunk_tokens if chunk else 0))
        return inputs.variants is not None

    def _choose(self) -> tuple[StepVariants, int]:
        """The variants of the next step, and its most rounds."""
        is_streamed = any(live.request.is_streamed for live in self._live.values())
        rounds = self.config.max_rounds
        if is_streamed:
            rounds = min(rounds, STREAMED_ROUNDS)
        variants = choose_variants(
            [live.row for live in self._live.values()],
            self.scheduler_config,
            tokens_per_step=self.step_config.max_step_tokens,
            num_in_flight=len(self._in_flight),
            chunk_tokens_in_flight=sum(step.chunk_tokens for step in self._in_flight),
            num_pending_tokens=self._num_pending_tokens,
        )
        for live in self._live.values():
            live.row.is_new = False
        return variants, rounds

    def _put_in_table(self, request: EngineRequest, index: int) -> None:
        params = request.rows[index].row.params
        assert params.max_tokens is not None, "limited when it was submitted"
        row = LiveRow(
            len(request.prompt_token_ids), params.max_tokens, params.logprobs,
            params.prompt_logprobs, num_seen=len(request.rows[index].token_ids),
        )  # fmt: skip
        self._live[request.row_ids[index]] = _Live(request, index, row)

    # Tokens out

    def _read(self, step: _InFlight, news: _News) -> None:
        outputs: StepOutputs = jax.device_get(step.outputs)
        now = time.perf_counter()
        while self._device.answers:
            answer_N, number = self._device.answers.popleft()
            answers = np.asarray(answer_N)[:number]
            assert (answers == ACCEPTED).all(), f"the device refused a checked request: {answers}"
        self._num_failures_in_a_row = 0
        self._num_pending_tokens = int(outputs.summary.num_pending_tokens)
        running = set(outputs.summary.running_id_R.tolist())
        for row_id, live in self._live.items():
            live.row.is_running = row_id in running
        self._metrics.add(outputs.summary)
        if outputs.prompt_logprobs is not None:
            self._read_prompt_logprobs(outputs.prompt_logprobs)
        for rows in (outputs.chunk, outputs.rounds):
            if rows is not None:
                self._read_rows(rows, now, news)

    def _read_rows(self, rows: RowOutputs, now: float, news: _News) -> None:
        for i, row_id in enumerate(rows.request_id_B):
            live = self._live.get(int(row_id))
            # A request that was called off since is in `_live` until the next step.
            if live is None or live.request.request_id not in self._requests:
                continue
            progress = live.progress
            progress.begin_step()
            if rows.drafts is not None:
                progress.count_drafts(*(int(count_B[i]) for count_B in rows.drafts))
            wanted = progress.row.params.logprobs
            for j, token in enumerate(rows.tokens_BN[i].tolist()):
                if token < 0 or progress.finish_reason is not None:
                    break
                live.row.num_seen += 1
                logprobs = None
                if wanted is not None and rows.logprobs is not None:
                    logprobs = logprobs_at(self.tokenizer, rows.logprobs, i, j, token, wanted)
                progress.add(token, logprobs)
            is_stopped_here = progress.finish_reason is not None
            # A stop string may leave nothing of the step's tokens.
            if progress.new_token_ids or is_stopped_here:
                progress.first_token_seconds = progress.first_token_seconds or now
                progress.last_token_seconds = now
            reason = int(rows.finish_reason_B[i])
            if reason != RUNNING:
                progress.first_token_seconds = progress.first_token_seconds or now
                progress.last_token_seconds = progress.last_token_seconds or now
                progress.finish(FINISH_REASONS[reason] or "")
            elif is_stopped_here:
                # A stop string: the device does not know of it.
                with self._inbox:
                    self._called_off.append(int(row_id))
            if progress.finish_reason is not None:
                del self._live[int(row_id)]
                if self._recorder is not None:
                    self._recorder.ended(int(row_id), len(progress.token_ids))
            if progress.new_token_ids or progress.finish_reason is not None:
                news.append((live.request, self._update(live)))

    def _update(self, live: _Live) -> RequestUpdate:
        request, progress = live.request, live.progress
        output = None
        if all(row.finish_reason is not None for row in request.rows):
            output = request.output()
            with self._inbox:
                self._forget(request)
        stream = StreamOutput(
            progress.new_text, progress.new_token_ids, progress.finish_reason, output,
            progress.new_logprobs,
        )  # fmt: skip
        return RequestUpdate(request.request_id, live.index, stream)

    def _read_prompt_logprobs(self, scored) -> None:
        logprobs = Logprobs(*(array[None] for array in scored.logprobs))
        for c in np.flatnonzero(scored.request_id_C >= 0):
            live = self._live.get(int(scored.request_id_C[c]))
            wanted = None if live is None else live.progress.row.params.prompt_logprobs
            if live is None or wanted is None:
                continue
            found = live.progress.prompt_logprobs
            assert found is not None, "room was made when it was submitted"
            token = int(scored.token_C[c])
            found[int(scored.position_C[c])] = logprobs_at(
                self.tokenizer, logprobs, 0, int(c), token, wanted
            )

    def _deliver_all(self, news: _News) -> None:
        for request, update in news:
            self._deliver(request, update)

    def _deliver(self, request: EngineRequest, update: RequestUpdate) -> None:
        """Tells whoever waits; one who cannot be told (a closed event loop) loses the request."""
        if request.on_update is None:
            return
        try:
            request.on_update(update)
        except Exception:
            _logger.exception("request %d: on_update failed, aborted", request.request_id)
            request.on_update = None
            self.abort(request.request_id)

    def _forget(self, request: EngineRequest) -> None:
        """Its rows in the table count as empty, once; call with the inbox locked."""
        if self._requests.pop(request.request_id, None) is not None:
            self._num_rows -= len(request.rows)

    # Beginning, and faults

    def _begin(self) -> None:
        """Nothing in flight, of an empty device."""
        self._origin = time.monotonic()
        self._in_flight: deque[_InFlight] = deque()
        self._live: dict[int, _Live] = {}
        self._num_pending_tokens = 0
        self._metrics.start_over()

    def _start_over(self) -> None:
        # All of it is the engine's own, and there may be no room for a second KV pool.
        self._device.let_go()
        self._device.start_over()
        self._begin()

    def _fail(self, cause: BaseException) -> EngineError:
        """Ends all requests with the cause; the engine is empty afterwards."""
        self._num_failures_in_a_row += 1
        what = str(cause) or type(cause).__name__
        error = EngineError(f"a step failed, and with it every request: {what}")
        self._end_all(error)
        # After they were told: it may fail, too, and end those who have come meanwhile.
        try:
            self._start_over()
        except BaseException:
            self._end_all(error)
            raise
        if self._recorder is not None:
            inputs = StepInputs(shapes=self._device.shapes, starts_over=True)
            self._recorder.step(inputs, self._origin)
        return error

    def _end_all(self, error: EngineError) -> None:
        """Tells every request that there is, and forgets it."""
        with self._inbox:
            requests = list(self._requests.values())
            self._requests.clear()
            self._arrived.clear()
            self._called_off.clear()
            self._num_rows = 0
        for request in requests:
            for index, row in enumerate(request.rows):
                if row.finish_reason is None:
                    stream = StreamOutput("", [], "error")
                    self._deliver(request, RequestUpdate(request.request_id, index, stream, error))

    @property
    def pool_bytes(self) -> int:
        """Size of the KV pool, a proposer's included."""
        return self._device.pool_bytes

    # Saved engines and recorded runs

    def save(self, folder: str | os.PathLike) -> list[RequestUpdate]:
        """Writes the engine with all requests in flight into a new folder, and goes on.

        `restore` makes an engine of it in which they go on with the same tokens. No step runs
        meanwhile; the one in flight is read first. Not for an `on_update`.

        Returns:
          What was new in it, also given to each request's `on_update`, as of `step`.

        Raises:
          ValueError: something lies at `folder` already.
          OSError: it cannot be written; there is no folder then.
          EngineError: the step in flight failed, as in `step`.
        """
        with self._between_steps():
            updates = self._turn(launches=False)
            save_engine(self, folder)
        return updates

    @classmethod
    def restore(
        cls,
        folder: str | os.PathLike,
        form: Any,
        tokenizer: Tokenizer,
        *,
        model_config: ModelConfig,
        urgency: Urgency = deadline,
        record: str | os.PathLike | None = None,
        speculation: Speculation | None = None,
        speculation_params: SpeculationParams | None = None,
    ) -> Self:
        """An engine as `save` found it; its clock goes on from there.

        Configuration, KV scales and costs are the saved ones. Callbacks cannot be saved: what comes
        of the requests in flight is what `step` returns, until `attach` or `follow` takes them up.

        Args:
          form, tokenizer, model_config: the model that the saved engine served.
          urgency, record: as of a new engine.
          speculation, speculation_params: what it had.

        Raises:
          ValueError: the folder is not whole, or of another model or configuration; it names the
            file or field, both values and the remedy.
        """
        engine = restore_engine(
            cls, folder, form, tokenizer, model_config, urgency,
            speculation, speculation_params or SpeculationParams(),
        )  # fmt: skip
        if record is not None:
            engine._recorder = Recorder(record, recording_header(engine))
        return engine

    def _take_back(self, request: EngineRequest, is_admitted: bool) -> None:
        """Goes on with a saved request."""
        with self._inbox:
            self._requests[request.request_id] = request
            self._num_rows += len(request.rows)
            if not is_admitted:
                self._wanted_shapes |= sampling_shapes(
                    [request.rows[0].row.params], eos_token_ids=self.model_config.eos_token_ids
                )
                self._arrived.append(request)
        for index, row in enumerate(request.rows if is_admitted else ()):
            if row.finish_reason is None:
                self._put_in_table(request, index)

    def attach(self, request_id: int, on_update: Callable[[RequestUpdate], Any]) -> None:
        """Takes up a request in flight, such as one of a restored engine.

        Of each of its outputs `on_update` first gets all that there is so far in one update, then
        what is new, as of `submit`; who got it before gets no more.

        Raises:
          ValueError: the request has ended, or never was.
        """
        with self._between_steps():
            request = self._requests.get(request_id)
            if request is None:
                raise ValueError(
                    f"request_id={request_id}: is not in flight; those are {self.request_ids}"
                )
            for index, row in enumerate(request.rows):
                if row.token_ids or row.finish_reason is not None:
                    stream = StreamOutput(
                        row.text, list(row.token_ids), row.finish_reason,
                        logprobs=None if row.row.params.logprobs is None else list(row.logprobs),
                    )  # fmt: skip
                    on_update(RequestUpdate(request_id, index, stream))
            request.on_update = on_update

    def start_recording(self, path: str | os.PathLike) -> None:
        """Records from here on what `record` records from the first request on.

        The engine starts from empty: it forgets the prefixes that it has computed (and goes on
        counting), so that what ran before is no part of the run.

        Raises:
          ValueError: a request is in flight, it is being recorded already, or something lies at
            `path`.
          OSError: the file cannot be written.
        """
        with self._between_steps():
            self._turn(launches=False)
            require(
                not self.has_work and self._recorder is None,
                f"start_recording({os.fspath(path)!r}): {len(self._requests)} requests are in "
                f"flight, {'a' if self._recorder else 'no'} recording goes on: wait for them, or "
                "stop it first",
            )
            self._start_over()
            self.snapshot_sha256 = None
            self._recorder = Recorder(path, recording_header(self))

    def stop_recording(self) -> None:
        """Ends what `record` began, if it did, and closes the file."""
        with self._between_steps():
            recorder, self._recorder = self._recorder, None
            if recorder is not None:
                recorder.close()

    def repeat_step(self, inputs: StepInputs) -> StepOutputs | None:
        """Computes a recorded step, for `replay`: its outputs on the host, and nobody is told."""
        # What was recorded counts from the origin of the device's clock.
        self._origin = 0.0
        if inputs.starts_over:
            assert inputs.shapes is not None, "recorded with them"
            self._device.shapes = inputs.shapes
            self._start_over()
            return None
        outputs = self._device.compute(inputs, self._origin)
        self._device.answers.clear()
        return jax.device_get(outputs)

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Nobody steps inside; the stepping thread lets it in after its step."""
        with self._inbox:
            self._num_visitors += 1
        try:
            with self._stepping:
                yield
        finally:
            with self._inbox:
                self._num_visitors -= 1
                self._inbox.notify_all()

    # Telemetry

    def metrics(self) -> dict[str, float]:
        """Sums since the start and the state after the last step that was read.

        Sums: num_steps, num_rounds, num_decode_rows (over rounds), num_prefill_tokens,
        num_output_tokens, num_failed, and the scheduler's num_admissions, num_preemptions,
        num_migrations, num_recomputed_tokens, num_prefix_hit_tokens, num_refused, num_table_full,
        queue_seconds. State: num_waiting, num_running, num_used_blocks, num_blocks. Means:
        rounds_per_step, rows_per_round.

        With speculation also the sums num_draft_tokens, num_accepted_tokens, num_verifications
        (rows' rounds with drafts), num_drifts (falls of the acceptance, see `acceptance`), and, by
        position in the draft, num_draft_tokens_at_0, num_accepted_tokens_at_0, …; the means
        acceptance_rate, acceptance_length and acceptance_rate_at_0, …, 0 while nothing was drafted.
        """
        return self._metrics.read(self.step_config)

    def acceptance(self) -> AcceptanceReport | None:
        """How drafts were accepted, by position, temperature and context, as of the last step that
        was read; None without speculation, or before a step was read."""
        return self._metrics.acceptance()
