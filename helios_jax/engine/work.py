"""What do a chunk and the rounds share: what they are compiled for, their rows, their tokens?"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.cache.masked import get_any, masked_set
from helios_jax.cache.paged import KVPools
from helios_jax.engine.config import StepConfig
from helios_jax.engine.state import (
    DraftCounts,
    EngineState,
    RowOutputs,
    SpeculationState,
    Telemetry,
)
from helios_jax.generation import NON_FINITE, RUNNING, STOP
from helios_jax.sampling import Logprobs, SamplingArrays, TokenHistory, end_rows, init_history
from helios_jax.scheduler import SchedulerState, advance
from helios_jax.speculative import RowTable
from pallas_kernels.dispatch import preferring
from pallas_kernels.kv_format import format_of


@dataclass(frozen=True)
class Variant:
    """Sizes that a chunk or decode rounds are compiled for; static.

    Attributes:
      num_rows: rows that take part, B.
      context_tokens: longest of them, with what is added.
      chunk_tokens: room for prefill, C; 0 for rounds.
      has_narrow, has_wide: precisions of rows that take part.
      num_logprobs, num_prompt_logprobs: most probable tokens reported beside the one that is there;
        None compiles no logprobs.
    """

    num_rows: int
    context_tokens: int
    chunk_tokens: int = 0
    has_narrow: bool = True
    has_wide: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


class Served(NamedTuple):
    """The static half of a forward pass, and the parameters."""

    model: Any
    params: Any
    config: StepConfig
    variant: Variant


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """What the chunk and the rounds change."""

    scheduler: SchedulerState
    pools: KVPools
    tokens_RS: Array
    finish_reason_R: Array
    speculation: SpeculationState | None


def take_work(state: EngineState) -> Work:
    """The part of the state that is worked on."""
    changed = (field.name for field in dataclasses.fields(Work))
    return Work(**{name: getattr(state, name) for name in changed})


def put_work(state: EngineState, work: Work, telemetry: Telemetry) -> EngineState:
    """The inverse, with what was counted meanwhile."""
    changed = {f.name: getattr(work, f.name) for f in dataclasses.fields(work)}
    return dataclasses.replace(state, telemetry=telemetry, **changed)


def fits_variant(served: Served, scheduler: SchedulerState, rows_B: Array, end_B: Array) -> Array:
    """Which rows the variant has room for, up to `end_B` tokens."""
    variant = served.variant
    is_wide_B = get_any(scheduler.is_wide_R, rows_B)
    present_B = jnp.where(is_wide_B, variant.has_wide, variant.has_narrow)
    if not served.config.has_two_precisions:
        present_B = jnp.ones_like(is_wide_B)
    return (rows_B >= 0) & present_B & (end_B <= variant.context_tokens)


def row_tables(served: Served, scheduler: SchedulerState, rows_B: Array) -> Iterator[RowTable]:
    """`RowTable` of each precision that the variant has."""
    config, variant = served.config, served.variant
    named_B = rows_B >= 0
    rows_B = jnp.maximum(rows_B, 0)
    is_wide_B = scheduler.is_wide_R[rows_B]
    precisions = [(False, config.narrow_dtype)]
    if config.has_two_precisions:
        present = (variant.has_narrow, variant.has_wide)
        precisions = [(False, config.narrow_dtype), (True, config.wide_dtype)]
        precisions = [pair for pair, there in zip(precisions, present, strict=True) if there]
    for is_wide, kv_dtype in precisions:
        mine_B = named_B & (is_wide_B == is_wide) if config.has_two_precisions else named_B
        width = math.ceil(variant.context_tokens / format_of(kv_dtype).tokens_per_block)
        yield RowTable(scheduler.block_table_RM[rows_B, :width], mine_B, kv_dtype)


def logits_of_rows(served: Served, hidden_BD: Array) -> Array:
    """float32 logits [B, V] of final hidden states."""
    with preferring(served.config.backend):
        return served.model.apply(served.params, hidden_BD, method="logits")


def sampling_of(sampling: SamplingArrays, rows_B: Array) -> SamplingArrays:
    """The parameters of some rows; anything where the row is -1."""
    return jax.tree.map(lambda table: get_any(table, rows_B), sampling)


def history_of(served: Served, work: Work, rows_B: Array, sampling_B) -> TokenHistory | None:
    """What filters need of the rows' tokens, from the table: rows come and go between steps."""
    scheduler = work.scheduler
    return init_history(
        known_tokens(served, work, rows_B),
        get_any(scheduler.num_prompt_R, rows_B),
        sampling_B,
        vocab_size=served.model.config.vocab_size,
        lengths_B=get_any(scheduler.num_known_R, rows_B),
    )


def known_tokens(served: Served, work: Work, rows_B: Array) -> Array:
    """Prompt and output of the rows, int32 [B, S], as far as the variant has room."""
    width = min(served.variant.context_tokens, work.tokens_RS.shape[1])
    return work.tokens_RS[jnp.maximum(rows_B, 0), :width]


def emit(
    work: Work, sampling_B: SamplingArrays, rows_B: Array, drawn_BT: Array, num_drawn_B: Array,
    num_computed_B: Array, now: Array,
) -> tuple[Work, Array, Array]:  # fmt: skip
    """Adds drawn tokens to their rows and ends rows where they end.

    Which of them count is `sampling.end_rows`' decision. A row that fails was drawn nothing else: a
    round in which a draft met a NaN is asked again without drafts. It ends without the KV entries
    of this pass.

    Args:
      rows_B: int32, -1 for none.
      drawn_BT: int32; the first `num_drawn_B` count.
      num_computed_B: KV entries written for known tokens and kept drafts, were nothing dropped.

    Returns:
      The work, the tokens that were added [B, T] (-1 elsewhere), and their number.
    """
    scheduler = work.scheduler
    named_B = rows_B >= 0
    num_drawn_B = jnp.where(named_B, num_drawn_B, 0)
    known_B = get_any(scheduler.num_known_R, rows_B)
    room_B = get_any(scheduler.max_known_R, rows_B) - known_B
    ended = end_rows(drawn_BT, num_drawn_B, sampling_B, room_B)
    num_kept_B, reason_B = ended.num_tokens_B, ended.finish_reason_B
    R, S = work.tokens_RS.shape
    row_B1 = jnp.where(named_B, rows_B, R)[:, None]
    place_T = jnp.arange(drawn_BT.shape[1])
    column_BT = jnp.where(place_T < num_kept_B[:, None], known_B[:, None] + place_T, S)
    scheduler = advance(
        scheduler,
        jnp.where(reason_B == NON_FINITE, -1, rows_B),
        num_computed_B - (num_drawn_B - num_kept_B),
        num_kept_B,
        reason_B == STOP,
        now,
    )
    work = dataclasses.replace(
        work,
        scheduler=scheduler,
        tokens_RS=work.tokens_RS.at[row_B1, column_BT].set(ended.tokens_BT, mode="drop"),
        finish_reason_R=masked_set(work.finish_reason_R, rows_B, reason_B, named_B),
    )
    return work, ended.tokens_BT, num_kept_B


def row_outputs(
    work: Work,
    rows_B: Array,
    tokens_BN: Array,
    logprobs: Logprobs | None,
    drafts: DraftCounts | None = None,
) -> RowOutputs:
    """What the host is told of some rows."""
    named_B = rows_B >= 0
    return RowOutputs(
        request_id_B=jnp.where(named_B, get_any(work.scheduler.request_id_R, rows_B), -1),
        tokens_BN=tokens_BN,
        finish_reason_B=jnp.where(named_B, get_any(work.finish_reason_R, rows_B), RUNNING),
        logprobs=logprobs,
        drafts=drafts,
    )
