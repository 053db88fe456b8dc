"""Which text may be shown now, while tokens are still arriving?

Two things hold text back: a character whose bytes are not all there (`IncrementalDecoder`) and the
beginning of what may become a stop string (`StopStringMatcher`). Chained, in that order, they serve
a stream; at a stop string `StopOutput.num_chars` and `IncrementalDecoder.num_tokens` say how many
tokens the text that stays was made of, so that ids, logprobs and usage are cut with it:

    shown = matcher.push(decoder.push(new_ids))
    if shown.stop is not None:
        ids = ids[: decoder.num_tokens(shown.num_chars)]
    ...
    last = matcher.push(decoder.flush())  # at the end, unless a stop string was found
    rest = "" if last.stop is not None else matcher.flush()
"""

from __future__ import annotations

import bisect
import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from helios_jax.config import require

if TYPE_CHECKING:
    from helios_jax.tokenizer.tokenizer import Tokenizer


class IncrementalDecoder:
    """Decodes one sequence's tokens as they arrive, in constant time per token.

    All that `push` returned, followed by `flush`, equals `Tokenizer.decode` of all the ids. Only
    the bytes of an incomplete UTF-8 character are held back; bytes that can no longer become a
    character are U+FFFD at once, by the rule of Unicode 3.9 (one for each maximal part), as in
    `bytes.decode(errors="replace")`.

    Attributes:
      text_lengths: for each token pushed, the characters of text complete after it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, at_start: bool = True
    ):
        """Args:
        tokenizer: spells the tokens.
        skip_special_tokens: leave special tokens out of the text.
        at_start: the ids begin a text. False where they continue one, such as a prompt: the space
          that SentencePiece writes before the first word then belongs to the text and stays.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._prefix_spaces = tokenizer.spelling.prefix_spaces if at_start else 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_chars = 0
        self.text_lengths: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        pieces = []
        for token_id in token_ids:
            piece = self._utf8.decode(self._new_bytes(token_id))
            self._num_chars += len(piece)
            self.text_lengths.append(self._num_chars)
            pieces.append(piece)
        return "".join(pieces)

    def flush(self) -> str:
        """The text still held back: U+FFFD for an incomplete character, else "". Ends the text."""
        piece = self._utf8.decode(b"", final=True)
        self._num_chars += len(piece)
        return piece

    def num_tokens(self, num_chars: int) -> int:
        """The fewest leading tokens whose text covers the first `num_chars` characters.

        A token that is needed in part counts. Characters that only `flush` returned need all.
        """
        require(
            0 <= num_chars <= self._num_chars,
            f"num_chars={num_chars}: must be in 0..{self._num_chars}, the characters so far",
        )
        if num_chars == 0:
            return 0
        return min(bisect.bisect_left(self.text_lengths, num_chars) + 1, len(self.text_lengths))

    def _new_bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        new = self._tokenizer.token_bytes(token_id)
        while self._prefix_spaces and new:
            if not new.startswith(b" "):
                self._prefix_spaces = 0
                break
            new = new[1:]
            self._prefix_spaces -= 1
        return new


class StopOutput(NamedTuple):
    """What `StopStringMatcher.push` found.

    Attributes:
      text: the text to show now.
      stop: the stop string that was found, None if none.
      num_chars: characters shown in all, `text` included; once stopped, the final length.
    """

    text: str
    stop: str | None
    num_chars: int


class StopStringMatcher:
    """Finds the first stop string in a stream of text and lets nothing of it through.

    The first is the one that is complete first; of those complete at the same character, the
    longest. So the result is the same however the text was cut into tokens, and generation ends at
    the earliest moment it can. Text that may begin a stop string is held back until it is decided.
    """

    def __init__(self, stop: Sequence[str] = (), include_stop_str_in_output: bool = False):
        """Args:
        stop: the stop strings; none is allowed to be empty.
        include_stop_str_in_output: show the stop string found, too.
        """
        require(
            not isinstance(stop, str),
            f"stop={stop!r}: must be a sequence of strings; for one stop string give [{stop!r}]",
        )
        for i, string in enumerate(stop):
            require(
                isinstance(string, str) and string != "",
                f"stop[{i}]={string!r}: must be a string of at least one character; leave it out",
            )
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._held = ""
        self._num_chars = 0
        self._stopped = False

    def push(self, text: str) -> StopOutput:
        """What to show after `text` arrived. Not to be called again once it reported a stop."""
        assert not self._stopped, "push() after a stop string was found"
        text = self._held + text
        # A match needs a held beginning or lies in the new text; the held text itself has none.
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            self._stopped = True
            return self._show(text[: end if self._include else start], stop)
        keep = len(text) - self._num_undecided(text)
        self._held = text[keep:]
        return self._show(text[:keep], None)

    def flush(self) -> str:
        """The text still held back, now that nothing follows it. "" after a stop."""
        text, self._held = self._held, ""
        self._num_chars += len(text)
        return text

    def _show(self, text: str, stop: str | None) -> StopOutput:
        self._num_chars += len(text)
        return StopOutput(text, stop, self._num_chars)

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return len(text) - start
        return 0
