"""When does each token come if requests arrive as they were recorded? An open loop.

Requests are sent at their times whether earlier ones are done or not, so that a server that falls
behind is seen to. Where they go is a `Client`.
"""

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

_LOOK_SECONDS = 0.25
_RETRY_SECONDS = 0.01


@dataclass(frozen=True)
class ReplayRequest:
    """What is sent.

    Attributes:
      arrival_seconds: from the start.
      prompt_token_ids: the prompt.
      num_output: tokens wanted, whatever they are (greedy, past the end of sequence).
      priority, ttft_target_seconds, tpot_target_seconds: see `Engine.submit`.
      seed: of its sampling; temperature: 0 is greedy.
    """

    arrival_seconds: float
    prompt_token_ids: Sequence[int]
    num_output: int
    priority: float = 0
    ttft_target_seconds: float | None = None
    tpot_target_seconds: float | None = None
    seed: int = 0
    temperature: float = 0.0


class Update(NamedTuple):
    """What came: so many tokens more; whether that was all; what went wrong, or None."""

    num_tokens: int
    is_last: bool = False
    error: str | None = None


class Client(Protocol):
    """Where requests are sent: an engine in this process, or a server elsewhere."""

    def submit(self, request: ReplayRequest, on_update: Callable[[Update], Any]) -> bool:
        """Sends it without waiting; False where there is no room for now, and it is tried again.

        `on_update` may be called from any thread, until an update that is the last.
        """
        ...


@dataclass
class Served:
    """What became of a request, in seconds from the start on one clock.

    Attributes:
      request: as it was sent.
      sent_seconds: when it was taken; None if it never was.
      token_seconds: (when, how many) of each update with tokens.
      end_seconds: of the last update; None if it did not come.
      error: what went wrong, or None.
    """

    request: ReplayRequest
    sent_seconds: float | None = None
    token_seconds: list[tuple[float, int]] = field(default_factory=list)
    end_seconds: float | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(number for _, number in self.token_seconds)

    @property
    def is_complete(self) -> bool:
        return self.end_seconds is not None and self.error is None


class State(NamedTuple):
    """For whoever watches: seconds since the start, requests sent, ended and in all, tokens."""

    seconds: float
    num_sent: int
    num_ended: int
    num_requests: int
    num_tokens: int


class Run(NamedTuple):
    """The requests in order of arrival; seconds until the last end, or until it was cut short;
    whether it was."""

    served: list[Served]
    seconds: float
    is_interrupted: bool


def serve(
    requests: Sequence[ReplayRequest],
    client: Client,
    progress: Callable[[State], Any] = lambda state: None,
    timeout_seconds: float | None = None,
) -> Run:
    """Sends all requests at their times and waits until each has ended.

    Ctrl-C, or `timeout_seconds` after the last arrival, ends the wait: what came until then counts.

    Args:
      requests: in order of arrival.
      progress: called a few times a second.
    """
    served = [Served(request) for request in requests]
    updates: queue.SimpleQueue[tuple[int, float, Update]] = queue.SimpleQueue()
    upcoming = deque(range(len(served)))
    counts = {"sent": 0, "ended": 0, "tokens": 0}
    start = time.perf_counter()

    def now() -> float:
        return time.perf_counter() - start

    def send(index: int) -> bool:
        each = served[index]
        sent = now()
        try:
            taken = client.submit(each.request, lambda update: updates.put((index, now(), update)))
        except ValueError as error:
            updates.put((index, sent, Update(0, True, str(error))))
            taken = True
        if taken:
            each.sent_seconds = sent
            counts["sent"] += 1
        return taken

    def note(index: int, seconds: float, update: Update) -> None:
        each = served[index]
        if update.num_tokens:
            each.token_seconds.append((seconds, update.num_tokens))
            counts["tokens"] += update.num_tokens
        if update.is_last or update.error is not None:
            each.end_seconds, each.error = seconds, update.error
            counts["ended"] += 1

    is_interrupted = False
    shown = -_LOOK_SECONDS
    last_arrival = served[-1].request.arrival_seconds if served else 0.0
    try:
        while counts["ended"] < len(served):
            wait = _LOOK_SECONDS
            while upcoming:
                due = served[upcoming[0]].request.arrival_seconds
                if due > now():
                    wait = min(wait, due - now())
                    break
                if not send(upcoming[0]):
                    wait = _RETRY_SECONDS
                    break
                upcoming.popleft()
            try:
                note(*updates.get(timeout=max(wait, 1e-4)))
                while True:
                    note(*updates.get_nowait())
            except queue.Empty:
                pass
            if now() - shown >= _LOOK_SECONDS:
                shown = now()
                progress(
                    State(shown, counts["sent"], counts["ended"], len(served), counts["tokens"])
                )
            if timeout_seconds is not None and now() > last_arrival + timeout_seconds:
                is_interrupted = True
                break
    except KeyboardInterrupt:
        is_interrupted = True
    ends = [each.end_seconds for each in served if each.end_seconds is not None]
    return Run(served, now() if is_interrupted else max(ends, default=0.0), is_interrupted)
