"""How does a caller get what it wants: at once, as it comes, in an event loop, with a thread?"""

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from helios_jax.config import require
from helios_jax.engine.core import EngineCore
from helios_jax.engine.requests import (
    EngineError,
    EngineFull,
    Prompt,
    RequestUpdate,
    Targets,
    check_prompt,
    check_sampling,
)
from helios_jax.outputs import RequestOutput, StreamOutput
from helios_jax.sampling import SamplingParams

_logger = logging.getLogger("helios_jax.engine")

# A thread whose steps fail so often without one that succeeds will not recover.
MAX_FAILURES_IN_A_ROW = 3


class Engine(EngineCore):
    """Serves requests together, as they come and go.

    `step` is the whole engine; `generate` and `stream` call it until they have what they want, or
    wait for the thread that `start` made. All methods may be called from any thread. Attributes,
    and what else there is, are `EngineCore`'s.
    """

    _thread: threading.Thread | None = None
    _is_stopping = False
    _on_failure: Callable[[BaseException], Any] | None = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        *,
        progress: Callable[[int], Any] | None = None,
        speculate: bool = True,
        **targets: Any,
    ) -> list[RequestOutput]:
        """Completes every prompt; the outputs are in the prompts' order.

        More prompts than the request table holds wait outside it.

        Args:
          sampling: one per prompt.
          progress: called with the number of outputs that finished.
          speculate, targets: as in `submit`, of each.

        Raises:
          ValueError: a prompt or parameters that break a rule; nothing has been generated then.
          EngineError: a step failed.
        """
        wanted, requests = Targets(**targets), []
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            text, ids = check_prompt(
                prompt, self.tokenizer, self.model_config, self.max_model_len, f"prompt {index}"
            )
            params = check_sampling(params, self.tokenizer)
            self._check(params)
            requests.append((text, ids, params))
        updates: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
        outputs: dict[int, RequestOutput] = {}
        numbers: dict[int, int] = {}
        waiting = deque(enumerate(requests))
        try:
            while waiting or numbers:
                while waiting:
                    index, (text, ids, params) = waiting[0]
                    try:
                        number = self._enqueue(
                            text, ids, params, wanted, updates.put, False, speculate
                        )
                    except EngineFull:
                        break
                    numbers[number] = index
                    waiting.popleft()
                update = self._wait(updates)
                if update is None:
                    continue
                if update.error is not None:
                    raise update.error
                if update.stream.finish_reason is not None and progress is not None:
                    progress(1)
                if update.stream.request_output is not None:
                    outputs[numbers.pop(update.request_id)] = update.stream.request_output
        finally:
            for number in numbers:
                self.abort(number)
        return [outputs[index] for index in range(len(requests))]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **targets: Any
    ) -> Iterator[StreamOutput]:
        """Completes one prompt (n = 1) and yields text as it comes.

        The request is submitted at the call. Closing the iterator ends the request.

        Raises:
          ValueError, EngineFull: as `submit`.
          EngineError, DeadlineExceeded: while iterating, a step failed, or the deadline passed that
            the request was to end at.
        """
        _require_one(sampling.n if sampling else 1)
        updates: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
        return self._outputs(
            self.submit(prompt, sampling, on_update=updates.put, **targets), updates
        )

    def follow(self, request_id: int) -> Iterator[StreamOutput]:
        """`stream` for a request in flight (n = 1): what there is so far, then text as it comes.

        It is taken up at the call, as by `attach`.

        Raises:
          ValueError: the request has ended or never was, or has several outputs.
          EngineError, DeadlineExceeded: while iterating, a step failed, or the deadline passed that
            the request was to end at.
        """
        with self._between_steps():
            request = self._requests.get(request_id)
            _require_one(len(request.rows) if request else 1)
            updates: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
            self.attach(request_id, updates.put)
        return self._outputs(request_id, updates)

    def _outputs(
        self, request_id: int, updates: "queue.SimpleQueue[RequestUpdate]"
    ) -> Iterator[StreamOutput]:
        try:
            while True:
                update = self._wait(updates)
                if update is None:
                    continue
                if update.error is not None:
                    raise update.error
                yield update.stream
                if update.stream.finish_reason is not None:
                    return
        finally:
            self.abort(request_id)

    async def async_stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **targets: Any
    ) -> AsyncIterator[StreamOutput]:
        """`stream` for an event loop; starts the stepping thread. Cancelling ends the request."""
        _require_one(sampling.n if sampling else 1)
        self.start()
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[RequestUpdate] = asyncio.Queue()

        def put(update: RequestUpdate) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, update)

        number = self.submit(prompt, sampling, on_update=put, **targets)
        try:
            while True:
                update = await updates.get()
                if update.error is not None:
                    raise update.error
                yield update.stream
                if update.stream.finish_reason is not None:
                    return
        finally:
            self.abort(number)

    async def async_generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **targets: Any
    ) -> RequestOutput:
        """Completes one prompt, its n outputs side by side; starts the stepping thread."""
        self.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[RequestOutput] = loop.create_future()

        def settle(update: RequestUpdate) -> None:
            if done.done():
                return
            if update.error is not None:
                done.set_exception(update.error)
            elif update.stream.request_output is not None:
                done.set_result(update.stream.request_output)

        number = self.submit(
            prompt, sampling, is_streamed=False,
            on_update=lambda update: loop.call_soon_threadsafe(settle, update), **targets,
        )  # fmt: skip
        try:
            return await done
        finally:
            self.abort(number)

    def _wait(self, updates: "queue.SimpleQueue[RequestUpdate]") -> RequestUpdate | None:
        """The next update, from the stepping thread or by stepping here; None if none came yet."""
        try:
            if self._thread is not None:
                return updates.get(timeout=0.05)
            return updates.get_nowait()
        except queue.Empty:
            pass
        if self._thread is None:
            with self._stepping:
                # Another caller's step may have brought it.
                if updates.empty():
                    try:
                        self.step()
                    except EngineError:
                        # It comes as an update too.
                        if updates.empty():
                            raise
        return None if updates.empty() else updates.get_nowait()

    # The stepping thread

    def start(self, on_failure: Callable[[BaseException], Any] | None = None) -> None:
        """Starts a thread that steps while there is work, unless one runs.

        A step that fails ends the requests there are, and the thread goes on.

        Args:
          on_failure: called by the thread where it ends by itself: several steps in a row have
            failed, or the device has no room to begin again. All requests until then have been
            told.
        """
        with self._inbox:
            ending = self._thread if self._is_stopping else None
        if ending is not None:
            ending.join()
        with self._inbox:
            if self._thread is not None:
                return
            self._is_stopping, self._on_failure = False, on_failure
            self._thread = threading.Thread(target=self._run, name="helios-engine", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its step; requests stay and go on with the next step."""
        with self._inbox:
            thread, self._is_stopping = self._thread, True
            self._inbox.notify_all()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._inbox:
                self._inbox.wait_for(
                    lambda: self._is_stopping or (self.has_work and not self._num_visitors)
                )
                if self._is_stopping:
                    self._thread = None
                    return
            try:
                self.step()
            except EngineError as error:
                # Every request was told; the next ones find an empty engine.
                _logger.exception("%s", error)
                if self._num_failures_in_a_row < MAX_FAILURES_IN_A_ROW:
                    continue
                self._end(error)
                return
            except BaseException as error:
                self._end(error)
                return

    def _end(self, error: BaseException) -> None:
        _logger.error("the stepping thread ends: %r", error)
        with self._inbox:
            self._thread = None
        if self._on_failure is not None:
            self._on_failure(error)


def _require_one(num_outputs: int) -> None:
    require(
        num_outputs == 1,
        f"n={num_outputs}: a stream has one output; use generate() for more",
    )
