"""Which variants of chunk and rounds run next? The host chooses by what it has been told so far.

Sizes are few, so that few programs are compiled. A wrong guess costs time, never a result: a row
for which the variant has no room waits for the next step (`engine.step`).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from helios_jax.engine.row_progress import logprobs_bucket, power_of_two
from helios_jax.engine.work import Variant
from helios_jax.scheduler import SchedulerConfig

MIN_CONTEXT_TOKENS = 256
MIN_CHUNK_TOKENS = 32


@dataclass
class LiveRow:
    """What the host knows of a row in the table.

    Attributes:
      num_prompt, max_tokens: as submitted.
      num_seen: output tokens that were read.
      is_running: whether it had a seat after the last step that was read.
      is_new: whether no step has been started since it entered the table.
      logprobs, prompt_logprobs: most probable tokens that the request wants reported, or None.
    """

    num_prompt: int
    max_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    num_seen: int = 0
    is_running: bool = False
    is_new: bool = True


class StepVariants(NamedTuple):
    """What a step runs.

    chunk: None for none; rounds: those of this step if `decodes`, else those of the next.
    """

    chunk: Variant | None
    rounds: Variant
    decodes: bool


def choose_variants(
    rows: Sequence[LiveRow],
    config: SchedulerConfig,
    *,
    tokens_per_step: int,
    num_in_flight: int,
    chunk_tokens_in_flight: int,
    num_pending_tokens: int,
) -> StepVariants:
    """The variants for the rows that may run.

    Who waits is seated in an order that is the policy's. The host guesses that of submission and
    learns of another when it has read the step; no guess decides what is reported of a row.

    Args:
      rows: of the table, in order of submission; at least one.
      tokens_per_step: most output tokens of a row in a step.
      num_in_flight: steps that were started and not read.
      chunk_tokens_in_flight: their chunks together.
      num_pending_tokens: that running rows had to prefill after the last step that was read.
    """
    num_logprobs = logprobs_bucket(row.logprobs for row in rows)
    num_prompt_logprobs = logprobs_bucket(row.prompt_logprobs for row in rows if not row.num_seen)
    started = [row for row in rows if row.num_seen]
    seated = [row for row in rows if not row.num_seen and row.is_running]
    waiting = [row for row in rows if not row.num_seen and not row.is_running]
    num_seats = max(config.max_num_seqs - len(started) - len(seated), 0)
    new = [*seated, *waiting[:num_seats]]
    rows = [*started, *new]
    assert rows, "a step needs a row that may run"

    ends = [
        row.num_prompt
        + min(row.max_tokens, row.num_seen + (num_in_flight + 1) * tokens_per_step + 1)
        for row in rows
    ]
    num_rows = min(len(rows), config.max_num_seqs)
    rounds = Variant(
        num_rows=min(power_of_two(num_rows), config.max_num_rows),
        context_tokens=size_bucket(max(ends), MIN_CONTEXT_TOKENS, 4, config.max_model_len),
        has_narrow=any(row.num_prompt <= config.kv_watermark for row in rows),
        has_wide=any(end > config.kv_watermark for end in ends),
        num_logprobs=num_logprobs,
    )
    # Chunks in flight are others' than those of rows that have entered since.
    arrived = sum(row.num_prompt for row in new if row.is_new)
    begun = sum(row.num_prompt for row in new if not row.is_new)
    # Preempted rows prefill again.
    begun = max(begun, num_pending_tokens) - chunk_tokens_in_flight
    pending = arrived + max(begun, 0)
    chunk = None
    if pending:
        pending += len(started)
        chunk = dataclasses.replace(
            rounds,
            num_rows=size_bucket(
                num_rows, 1, 8, min(power_of_two(config.max_num_seqs), config.max_num_rows)
            ),
            chunk_tokens=size_bucket(pending, MIN_CHUNK_TOKENS, 4, config.max_num_batched_tokens),
            num_prompt_logprobs=num_prompt_logprobs,
        )
    # Rows that are all new get their first tokens before anybody waits for further ones.
    decodes = chunk is None or bool(started) or not all(row.is_new for row in new)
    return StepVariants(chunk, rounds, decodes)


def size_bucket(number: int, smallest: int, factor: int, largest: int) -> int:
    """The lowest of smallest * factor^n that is not below `number`, but `largest` at most."""
    size = smallest
    while size < number:
        size *= factor
    return min(size, largest)
