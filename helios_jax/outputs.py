"""What generation returns to people: vLLM's shapes, filled in on the host."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """One token's log-probability under the model, before any filter.

    rank: 1 for the most probable token of the vocabulary; of the listed alternatives, their place.
    decoded_token: its text.
    """

    logprob: float
    rank: int
    decoded_token: str


# Token id -> Logprob; of a position's actual token and of the most probable ones.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One of a request's n outputs.

    Attributes:
      index: 0..n-1.
      text: without a stop string that ended it, unless asked for.
      token_ids: those of the text; an end-of-sequence or stop token that ended it is the last one.
      cumulative_logprob: sum over token_ids; None unless logprobs were asked for.
      logprobs: one dict per token id; None unless asked for.
      finish_reason: "stop", "length", or "error" (the model gave a NaN or an infinity).
      stop_reason: the stop string or stop token id that ended it; None for an end-of-sequence token
        and for other reasons.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True)
class Usage:
    """Tokens of a request; `completion_tokens` counts what is in `token_ids`, over all outputs."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Seconds since the call: `ttft_seconds` to the first token, `total_seconds` to the last.

    tpot_seconds: time per output token after the first, of the longest output; 0 if it has one.
    """

    ttft_seconds: float
    total_seconds: float
    tpot_seconds: float


@dataclass(frozen=True)
class Acceptance:
    """How a request's drafts fared, over all its outputs.

    num_verifications: rounds of an output that had at least one draft token.
    """

    num_draft_tokens: int
    num_accepted_tokens: int
    num_verifications: int

    @classmethod
    def total(cls, parts: "Iterable[Acceptance]") -> "Acceptance":
        """Of several outputs together."""
        return cls(*map(sum, zip(*map(dataclasses.astuple, parts), strict=True)))

    @property
    def acceptance_rate(self) -> float:
        """accepted / proposed; 0 where nothing was drafted."""
        drafted = self.num_draft_tokens
        return self.num_accepted_tokens / drafted if drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / verifications; 0 where nothing was drafted."""
        verified = self.num_verifications
        return 1 + self.num_accepted_tokens / verified if verified else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """The outcome of one prompt.

    Attributes:
      prompt: its text (a chat's rendered template); None where token ids were given.
      prompt_token_ids: what the model read.
      prompt_logprobs: None for the first token, then one dict per token; None unless asked for.
      outputs: n of them.
      usage, timings: counted and measured.
      acceptance: of its drafts; None where the engine does not speculate.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    usage: Usage
    timings: Timings
    acceptance: Acceptance | None = None


@dataclass(frozen=True)
class StreamOutput:
    """What is new since the last one.

    Attributes:
      text: further text, possibly empty; all of them joined are the output's text.
      token_ids: further tokens. A stop string may take back tokens already reported; the final
        `request_output` has the exact ones.
      finish_reason: None until the last one.
      request_output: the whole outcome, with the last one.
      logprobs: one dict for each of `token_ids`; None unless asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    request_output: RequestOutput | None = None
    logprobs: list[PositionLogprobs] | None = None
