"""How do a request's updates get from the engine's thread to whoever writes them out?

They gather until they are read: what a slow reader has waiting for it is a few messages that grow,
not a queue, and never more than the request's own output, which the engine keeps until its end
anyway.
"""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from helios_jax.engine import RequestUpdate
from helios_jax.outputs import PositionLogprobs, RequestOutput


@dataclass
class News:
    """What is new of one output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)


class Mail(NamedTuple):
    """What came since the last reading.

    news: by output.
    outcome: with the last of it.
    """

    news: dict[int, News]
    outcome: RequestOutput | None


class Inbox:
    """The updates of one request, for one reader in the event loop that it is made in."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._news: dict[int, News] = {}
        self._outcome: RequestOutput | None = None
        self._error: Exception | None = None

    def put(self, update: RequestUpdate) -> None:
        """Takes an update in the engine's thread."""
        self._loop.call_soon_threadsafe(self._add, update)

    def fail(self, error: Exception) -> None:
        """Ends the reading with an error, in the event loop."""
        self._error = self._error or error
        self._arrived.set()

    async def read(self) -> Mail:
        """All that came since, once there is something.

        Raises:
          Exception: what ended the request early, at once.
        """
        await self._arrived.wait()
        self._arrived.clear()
        if self._error is not None:
            raise self._error
        news, self._news = self._news, {}
        return Mail(news, self._outcome)

    def _add(self, update: RequestUpdate) -> None:
        if update.error is not None:
            self.fail(update.error)
            return
        stream = update.stream
        if stream.text or stream.token_ids:
            news = self._news.setdefault(update.index, News())
            news.text += stream.text
            news.token_ids += stream.token_ids
            news.logprobs += stream.logprobs or ()
        self._outcome = self._outcome or stream.request_output
        if self._news or self._outcome is not None:
            self._arrived.set()
