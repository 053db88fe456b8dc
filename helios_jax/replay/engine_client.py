"""How are requests replayed on an engine in this process, and what did each of its steps take?"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from helios_jax.engine import Engine, EngineError, EngineFull, RequestUpdate
from helios_jax.replay.serving import ReplayRequest, Update
from helios_jax.sampling import SamplingParams


class StepRecord(NamedTuple):
    """One step: its seconds, and what it did.

    num_decode_rows counts a row once a round; num_kv_tokens: those in use after it.
    """

    seconds: float
    num_rounds: int
    num_decode_rows: int
    num_prefill_tokens: int
    num_kv_tokens: int


class EngineClient:
    """A `serving.Client` that steps an engine in a thread of its own, while there is work.

    Attributes:
      steps: what each step took, for `calibration`; reading the engine's counts after every step
        costs some ten microseconds.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._wake = threading.Condition()
        self._is_closing = False
        self._tokens_per_block = engine.scheduler_config.narrow_block_tokens
        self.steps: list[StepRecord] = []
        self._thread = threading.Thread(target=self._run, name="helios-replay", daemon=True)
        self._thread.start()

    def submit(self, request: ReplayRequest, on_update: Callable[[Update], Any]) -> bool:
        def convert(update: RequestUpdate) -> None:
            error = None if update.error is None else str(update.error)
            if update.stream.finish_reason == "error" and error is None:
                error = "the model gave a NaN or an infinity"
            on_update(
                Update(len(update.stream.token_ids), update.stream.finish_reason is not None, error)
            )

        params = SamplingParams(
            temperature=request.temperature, max_tokens=request.num_output, ignore_eos=True,
            seed=request.seed,
        )  # fmt: skip
        try:
            self._engine.submit(
                list(request.prompt_token_ids), params, priority=request.priority,
                ttft_target_seconds=request.ttft_target_seconds,
                tpot_target_seconds=request.tpot_target_seconds, on_update=convert,
            )  # fmt: skip
        except EngineFull:
            return False
        with self._wake:
            self._wake.notify_all()
        return True

    def counters(self) -> Mapping[str, float]:
        return self._engine.metrics()

    def close(self) -> None:
        """Ends the thread, and all requests that are left."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join()
        for number in self._engine.request_ids:
            self._engine.abort(number)
        while self._engine.has_work:
            self._engine.step()

    def _run(self) -> None:
        engine, before = self._engine, self._engine.metrics()
        started = time.perf_counter()
        while True:
            with self._wake:
                if not engine.has_work and not self._is_closing:
                    self._wake.wait_for(lambda: self._is_closing or engine.has_work)
                    started = time.perf_counter()
                if self._is_closing:
                    return
            try:
                engine.step()
            except EngineError:
                # Each request was told.
                pass
            after, ended = engine.metrics(), time.perf_counter()
            # A step is read in the call after the one that started it.
            if after.get("num_steps", 0) > before.get("num_steps", 0):
                self._note(ended - started, before, after)
                before, started = after, ended

    def _note(self, seconds: float, before: Mapping, after: Mapping) -> None:
        def added(name: str) -> int:
            return int(after.get(name, 0) - before.get(name, 0))

        used = int(after["num_used_blocks"])
        self.steps.append(
            StepRecord(
                seconds, added("num_rounds"), added("num_decode_rows"),
                added("num_prefill_tokens"), used * self._tokens_per_block,
            )
        )  # fmt: skip
