"""What does the host know of one output: its text, its tokens so far, and why it ended?"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from helios_jax.outputs import Acceptance, CompletionOutput, Logprob, PositionLogprobs
from helios_jax.sampling import Logprobs, SamplingParams
from helios_jax.tokenizer import IncrementalDecoder, StopStringMatcher, Tokenizer

# Buckets of how many logprobs are computed; the surplus is dropped on the host.
_LOGPROBS_BUCKETS = (0, 5, 20)


class Row(NamedTuple):
    """One output of one request: a prompt and parameters with n = 1."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams


@dataclass
class RowProgress:
    """What the host knows of a row, updated in place.

    Attributes:
      new_text, new_token_ids: what was added since `begin_step`, trimmed likewise.
      text, token_ids, logprobs: all so far, trimmed at a stop.
      finish_reason: None while running.
      num_unmatched_chars: of text before `min_tokens`, where stop strings do not count.
      first_token_seconds, last_token_seconds: on `time.perf_counter`'s clock.
      acceptance: of its drafts; None where the engine does not speculate.
    """

    row: Row
    decoder: IncrementalDecoder
    matcher: StopStringMatcher
    eos_token_ids: tuple[int, ...]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    new_text: str = ""
    new_token_ids: list[int] = field(default_factory=list)
    num_unmatched_chars: int = 0
    first_token_seconds: float = 0.0
    last_token_seconds: float = 0.0
    acceptance: Acceptance | None = None

    def completion(self, index: int) -> CompletionOutput:
        """The finished row as the output `index` of its request."""
        assert self.finish_reason is not None, "the row is still running"
        wants_logprobs = self.row.params.logprobs is not None
        chosen = [
            position[token].logprob
            for position, token in zip(self.logprobs, self.token_ids, strict=False)
        ]
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.token_ids,
            cumulative_logprob=sum(chosen) if wants_logprobs else None,
            logprobs=self.logprobs if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def begin_step(self) -> None:
        """What is added from here on is new."""
        self.new_text, self.new_token_ids = "", []

    @property
    def new_logprobs(self) -> list[PositionLogprobs] | None:
        """Those of `new_token_ids`; None unless asked for."""
        if self.row.params.logprobs is None:
            return None
        return self.logprobs[len(self.token_ids) - len(self.new_token_ids) :]

    def count_drafts(self, num_draft: int, num_accepted: int, num_verifications: int) -> None:
        """Takes in how the drafts of a step fared."""
        before = self.acceptance or Acceptance(0, 0, 0)
        self.acceptance = Acceptance(
            before.num_draft_tokens + num_draft,
            before.num_accepted_tokens + num_accepted,
            before.num_verifications + num_verifications,
        )

    def add(self, token: int, logprobs: PositionLogprobs | None) -> None:
        """Takes one more token; may finish the row at a stop string."""
        params = self.row.params
        self.token_ids.append(token)
        self.new_token_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if not params.detokenize:
            return
        text = self.decoder.push([token])
        if len(self.token_ids) <= params.min_tokens:
            self.num_unmatched_chars += len(text)
            self._add_text(text)
        else:
            self._match(text)

    def finish(self, reason: str) -> None:
        """The device ended the row; text still held back is let go, or turns out to be a stop."""
        if self.finish_reason is not None:
            return
        if self.row.params.detokenize:
            self._match(self.decoder.flush())
            if self.finish_reason is not None:
                return
            self._add_text(self.matcher.flush())
        self.finish_reason = reason
        last = self.token_ids[-1] if self.token_ids else None
        if reason == "stop" and last not in self.eos_token_ids:
            self.stop_reason = last

    def _match(self, text: str) -> None:
        found = self.matcher.push(text)
        self._add_text(found.text)
        if found.stop is not None:
            kept = self.decoder.num_tokens(self.num_unmatched_chars + found.num_chars)
            num_before = len(self.token_ids) - len(self.new_token_ids)
            del self.token_ids[kept:], self.logprobs[kept:]
            del self.new_token_ids[max(kept - num_before, 0) :]
            self.finish_reason, self.stop_reason = "stop", found.stop

    def _add_text(self, text: str) -> None:
        self.text += text
        self.new_text += text


def limit_params(row: Row, max_model_len: int) -> SamplingParams:
    """The row's parameters with max_tokens as far as the model's length allows."""
    room = max_model_len - len(row.prompt_token_ids)
    assert room >= 1, "the caller refuses longer prompts"
    max_tokens = min(room, row.params.max_tokens or room)
    min_tokens = min(row.params.min_tokens, max_tokens)
    return dataclasses.replace(row.params, max_tokens=max_tokens, min_tokens=min_tokens)


def logprobs_bucket(asked) -> int | None:
    """How many top logprobs are computed for rows that ask for these; the surplus is dropped."""
    asked = [number for number in asked if number is not None]
    if not asked:
        return None
    return next(bucket for bucket in _LOGPROBS_BUCKETS if bucket >= max(asked))


def power_of_two(number: int) -> int:
    """The lowest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def logprobs_at(
    tokenizer: Tokenizer, logprobs: Logprobs, i: int, j: int, token: int, num_top: int
) -> PositionLogprobs:
    """vLLM's dict of one position: the token that is there, then the `num_top` most probable."""
    chosen = Logprob(
        float(logprobs.chosen_BN[i, j]),
        int(logprobs.ranks_BN[i, j]),
        tokenizer.decode([token], False),
    )
    position = {token: chosen}
    for place in range(num_top):
        top = int(logprobs.top_ids_BNK[i, j, place])
        if top not in position:
            value = float(logprobs.top_BNK[i, j, place])
            position[top] = Logprob(value, place + 1, tokenizer.decode([top], False))
    return position
