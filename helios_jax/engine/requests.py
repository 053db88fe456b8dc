"""What is a request to the host: checked on the way in, put together on the way out."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from helios_jax.config import ModelConfig, require
from helios_jax.engine.row_progress import Row, RowProgress, limit_params
from helios_jax.outputs import Acceptance, RequestOutput, StreamOutput, Timings, Usage
from helios_jax.sampling import MAX_NUMBER, SamplingParams
from helios_jax.tokenizer import IncrementalDecoder, StopStringMatcher, Tokenizer

Prompt = str | Sequence[int]


class EngineFull(RuntimeError):
    """The request table has no room for now: try again when a request has finished."""


class NeverFits(ValueError):
    """The request is larger than the engine, however empty it is."""


class DeadlineExceeded(RuntimeError):
    """A request that was to end at its deadline has ended there; its blocks are free."""


class EngineError(RuntimeError):
    """A step failed; its cause is the `__cause__`. The engine starts afresh without the request."""


class RequestUpdate(NamedTuple):
    """What is new of one output of a request.

    request_id: `Engine.submit`'s; index: which of the n outputs.
    stream: new text and tokens; with the request's last output, the whole outcome.
    error: what ended the request, else None; there is nothing new then.
    """

    request_id: int
    index: int
    stream: StreamOutput
    error: Exception | None = None


@dataclass(frozen=True)
class Targets:
    """What a request asks for in time; see `Engine.submit`."""

    priority: float = 0
    deadline_seconds: float | None = None
    ttft_target_seconds: float | None = None
    tpot_target_seconds: float | None = None
    ends_at_deadline: bool = False

    def __post_init__(self):
        for name in ("priority", "deadline_seconds", "ttft_target_seconds", "tpot_target_seconds"):
            value = getattr(self, name)
            try:
                # Whatever kind of number it was, so that a recording can tell it.
                object.__setattr__(self, name, None if value is None else float(value))
            except (TypeError, ValueError):
                raise ValueError(f"{name}={value!r}: must be a number") from None
        require(
            self.priority is not None and abs(self.priority) <= MAX_NUMBER,
            f"priority={self.priority}: must be a finite number, at most {MAX_NUMBER:g} either "
            "way; lower is earlier",
        )
        for name in ("deadline_seconds", "ttft_target_seconds", "tpot_target_seconds"):
            value = getattr(self, name)
            require(
                value is None or value > 0,
                f"{name}={value}: must be above 0, or None for no target",
            )
        require(
            self.deadline_seconds is not None or not self.ends_at_deadline,
            "ends_at_deadline=True with deadline_seconds=None: there is no deadline to end at; "
            "give one",
        )


@dataclass
class EngineRequest:
    """A request on its way.

    Attributes:
      request_id: the caller's number for it.
      row_ids: what the device knows its outputs by, one each.
      rows: the outputs.
      arrival_seconds: on `time.monotonic`'s clock; submitted_seconds: on `time.perf_counter`'s.
      on_update: called in the stepping thread.
      is_streamed: False where only the outcome is wanted.
      speculates: False where it is decoded plainly.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    rows: list[RowProgress]
    row_ids: list[int]
    targets: Targets
    arrival_seconds: float
    submitted_seconds: float
    on_update: Callable[[RequestUpdate], Any] | None
    is_streamed: bool
    speculates: bool = True

    def is_expired(self, now: float) -> bool:
        """Whether it should have ended, at `now` on `time.monotonic`'s clock."""
        seconds = self.targets.deadline_seconds
        if seconds is None or not self.targets.ends_at_deadline:
            return False
        return now >= self.arrival_seconds + seconds

    def output(self) -> RequestOutput:
        """The outcome, once all rows have finished."""
        return request_output(self.prompt, self.prompt_token_ids, self.rows, self.submitted_seconds)


def request_output(
    prompt: str | None,
    prompt_token_ids: list[int],
    rows: Sequence[RowProgress],
    submitted_seconds: float,
) -> RequestOutput:
    """The outcome of a request whose n rows have finished.

    Args:
      submitted_seconds: on `time.perf_counter`'s clock, like the rows' times.
    """
    outputs = [row.completion(index) for index, row in enumerate(rows)]
    first = min(row.first_token_seconds for row in rows)
    last = max(row.last_token_seconds for row in rows)
    longest = max(len(output.token_ids) for output in outputs)
    accepted = [row.acceptance for row in rows if row.acceptance is not None]
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=rows[0].prompt_logprobs,
        outputs=outputs,
        usage=Usage(len(prompt_token_ids), sum(len(output.token_ids) for output in outputs)),
        timings=Timings(
            ttft_seconds=first - submitted_seconds,
            total_seconds=last - submitted_seconds,
            tpot_seconds=(last - first) / (longest - 1) if longest > 1 else 0.0,
        ),
        acceptance=None if not accepted else Acceptance.total(accepted),
    )


def check_prompt(
    prompt: Prompt, tokenizer: Tokenizer, config: ModelConfig, max_model_len: int, name: str
) -> tuple[str | None, list[int]]:
    """A prompt's text, if it is one, and its token ids.

    Raises:
      ValueError: it is empty, holds an id outside the vocabulary, or leaves no room for a token.
    """
    text = prompt if isinstance(prompt, str) else None
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
    require(len(ids) > 0, f"{name} is empty: must hold at least one token; pass some text")
    # Before the ids are looked at, of which there may be millions.
    require(
        len(ids) < max_model_len,
        f"{name} has {len(ids)} tokens: max_model_len={max_model_len} must leave room "
        f"for one more; shorten it to {max_model_len - 1} tokens",
    )
    for token in ids:
        require(
            0 <= token < config.vocab_size,
            f"{name} contains token id {token}: must be in 0..{config.vocab_size - 1} "
            "(vocab_size); was it encoded with another model's tokenizer?",
        )
    return text, ids


def check_sampling(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with the token ids of their bad words."""
    if params.bad_words and params.bad_words_token_ids is None:
        return params.tokenize_bad_words(
            lambda text: tokenizer.encode(text, add_special_tokens=False)
        )
    return params


def start_rows(
    prompt_token_ids: list[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
    rng: np.random.Generator,
) -> list[RowProgress]:
    """The n outputs of a request, each with a seed."""
    rows = []
    for index in range(params.n):
        row = Row(prompt_token_ids, params.output(index))
        limited = limit_params(row, max_model_len)
        if limited.seed is None:
            limited = dataclasses.replace(limited, seed=int(rng.integers(2**63)))
        rows.append(start_row(row._replace(params=limited), tokenizer, eos_token_ids))
        if limited.prompt_logprobs is not None:
            rows[-1].prompt_logprobs = [None] * len(prompt_token_ids)
    return rows


def start_row(row: Row, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> RowProgress:
    """An output of which nothing is known yet."""
    params = row.params
    return RowProgress(
        row,
        IncrementalDecoder(tokenizer, params.skip_special_tokens, at_start=False),
        StopStringMatcher(params.stop, params.include_stop_str_in_output),
        eos_token_ids,
    )
