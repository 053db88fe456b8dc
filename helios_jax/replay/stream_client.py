"""How are requests replayed on anything that streams: a server's client, another library?"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from helios_jax.outputs import StreamOutput
from helios_jax.replay.serving import ReplayRequest, Update


class StreamClient:
    """A `serving.Client` with a thread for each request in flight.

        client = StreamClient(helios_jax.server.Client("127.0.0.1:50051").stream)

    Attributes:
      stream: stream(prompt_token_ids, temperature=, max_tokens=, ignore_eos=, seed=, priority=,
        ttft_target_seconds=, tpot_target_seconds=) -> iterator of `StreamOutput`.
      max_in_flight: requests sent at a time, as many as a server takes of one client by default;
        further ones wait here, and their time counts.
    """

    def __init__(self, stream: Callable[..., Iterator[StreamOutput]], *, max_in_flight: int = 128):
        self._stream = stream
        self._room = threading.Semaphore(max_in_flight)

    def submit(self, request: ReplayRequest, on_update: Callable[[Update], Any]) -> bool:
        if not self._room.acquire(blocking=False):
            return False
        threading.Thread(target=self._follow, args=(request, on_update), daemon=True).start()
        return True

    def _follow(self, request: ReplayRequest, on_update: Callable[[Update], Any]) -> None:
        try:
            for part in self._stream(
                list(request.prompt_token_ids), temperature=request.temperature,
                max_tokens=request.num_output, ignore_eos=True, seed=request.seed,
                priority=request.priority, ttft_target_seconds=request.ttft_target_seconds,
                tpot_target_seconds=request.tpot_target_seconds,
            ):  # fmt: skip
                is_last = part.finish_reason is not None
                error = "the model failed" if part.finish_reason == "error" else None
                on_update(Update(len(part.token_ids), is_last, error))
                if is_last:
                    return
            on_update(Update(0, True, "the stream ended before its last part"))
        except Exception as error:
            # Whatever a client raises is this request's outcome, not the replay's.
            on_update(Update(0, True, f"{type(error).__name__}: {error}"))
        finally:
            self._room.release()
