"""How are prompts computed? The part of a step that runs a planned chunk of tokens of many rows."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache.masked import get_any
from helios_jax.cache.paged import KVPools, KVScales, PagedCache, RowBlocks
from helios_jax.engine.config import StepConfig
from helios_jax.engine.drafts import last_hidden, put_rows, rows_of
from helios_jax.engine.state import EngineState, PromptLogprobs, RowOutputs
from helios_jax.engine.work import (
    Served,
    Variant,
    Work,
    emit,
    fits_variant,
    history_of,
    logits_of_rows,
    put_work,
    row_outputs,
    row_tables,
    sampling_of,
    take_work,
)
from helios_jax.generation import score_hidden
from helios_jax.sampling import init_logprobs, sample_tokens, score_tokens
from helios_jax.scheduler import Plan, SchedulerState
from pallas_kernels.dispatch import preferring
from pallas_kernels.kv_format import format_of


class _Tokens(NamedTuple):
    """The tokens of a pass, T in all, packed.

    rows_B: int32, -1 padded; starts_B: position of each row's first token; firsts_B: its place
    among the T; counts_B: its tokens. index_T: which of the B rows; position_T; is_token_T: bool.
    """

    rows_B: Array
    starts_B: Array
    firsts_B: Array
    counts_B: Array
    index_T: Array
    position_T: Array
    is_token_T: Array


def run_chunk(
    params: Any,
    state: EngineState,
    plan: Plan,
    now: Array,
    *,
    model: Any,
    config: StepConfig,
    variant: Variant,
) -> tuple[EngineState, RowOutputs, PromptLogprobs | None]:
    """Computes the planned chunk, and draws the next token of rows whose last known is in it.

    Where the engine speculates, only a first token is drawn here: the rounds of a row that was
    preempted go on where they were, lest a seeded row's drafts depend on what preempted it.
    """
    served = Served(model, params, config, variant)
    work = take_work(state)
    B, C = variant.num_rows, variant.chunk_tokens
    scheduler = work.scheduler
    rows_B, starts_B = plan.chunk_rows_R[:B], plan.chunk_starts_R[:B]
    fits_B = fits_variant(served, scheduler, rows_B, starts_B + plan.chunk_counts_R[:B])
    rows_B = jnp.where(fits_B, rows_B, -1)
    counts_B = jnp.where(fits_B, plan.chunk_counts_R[:B], 0)
    ends_B = jnp.cumsum(counts_B)
    firsts_B, num_tokens = ends_B - counts_B, ends_B[-1]
    index_C = jnp.repeat(jnp.arange(B), counts_B, total_repeat_length=C)
    place_C = jnp.arange(C)
    tokens = _Tokens(
        rows_B, starts_B, firsts_B, counts_B, index_C,
        starts_B[index_C] + place_C - firsts_B[index_C], place_C < num_tokens,
    )  # fmt: skip
    through_B = fits_B & (counts_B == get_any(scheduler.num_pending_R, rows_B))
    resumes_B = jnp.zeros_like(through_B)
    if config.speculation is not None:
        resumes_B = through_B & (get_any(scheduler.num_output_R, rows_B) > 0)
    sampling_B = sampling_of(state.sampling, rows_B)
    # As many turns as the tokens there are need, so that room to spare costs little; and a loop,
    # since under `cond` XLA copies the pools.
    T = min(C, config.tile_tokens)

    def run_tile(i, carry: tuple[KVPools, Array]):
        pools, hidden_CD = carry
        tile = _tile(tokens, i * T, T)
        hidden_TD, pools = _hidden(
            served, state.scales, dataclasses.replace(work, pools=pools), tile
        )
        return pools, lax.dynamic_update_slice(hidden_CD, hidden_TD, (i * T, 0))

    # Of whole tiles: a slice that begins beyond the last one would be moved.
    room = -(-C // T) * T
    hidden_CD = jnp.zeros((room, model.config.hidden_size), model.dtype)
    pools, hidden_CD = lax.fori_loop(0, -(-num_tokens // T), run_tile, (work.pools, hidden_CD))
    work, hidden_CD = dataclasses.replace(work, pools=pools), hidden_CD[:C]

    def draw(work: Work):
        last_B = jnp.maximum(firsts_B + counts_B - 1, 0)
        logits_BV = logits_of_rows(served, hidden_CD[last_B])
        history = history_of(served, work, rows_B, sampling_B)
        num_output_B = get_any(scheduler.num_output_R, rows_B)
        drawn_B = sample_tokens(logits_BV, sampling_B, history, num_output_B)
        # Of each token, since 8-bit formats do not keep a NaN for the next token to see.
        is_bad_C = tokens.is_token_T & ~jnp.isfinite(jnp.sum(hidden_CD, -1, dtype=jnp.float32))
        is_bad_B = jnp.zeros(B, bool).at[index_C].max(is_bad_C)
        draws_B = fits_B & ((through_B & ~resumes_B) | is_bad_B)
        drawn_B1 = jnp.where(draws_B & ~is_bad_B, drawn_B, -1)[:, None]
        work, emitted_B1, _ = emit(
            work, sampling_B, rows_B, drawn_B1, draws_B.astype(jnp.int32), counts_B - resumes_B, now
        )
        if work.speculation is not None:
            drafting = rows_of(work.speculation, rows_B)
            hidden_BD = last_hidden(
                drafting.hidden_BD, hidden_CD[last_B][:, None], (emitted_B1[:, 0] >= 0).astype(int)
            )
            drafting = dataclasses.replace(drafting, hidden_BD=hidden_BD)
            speculation = put_rows(work.speculation, rows_B, drafting)
            work = dataclasses.replace(work, speculation=speculation)
        logprobs = prompt = None
        if variant.num_logprobs is not None:
            scored = score_tokens(logits_BV, emitted_B1[:, 0], variant.num_logprobs)
            logprobs = jax.tree.map(lambda x: x[:, None], scored)
        if variant.num_prompt_logprobs is not None:
            prompt = _score_prompt(served, work, tokens, hidden_CD)
        return work, emitted_B1, logprobs, prompt

    def skip(work: Work):
        logprobs = prompt = None
        if variant.num_logprobs is not None:
            logprobs = init_logprobs(B, 1, variant.num_logprobs)
        if variant.num_prompt_logprobs is not None:
            none_C = jnp.full(C, -1, jnp.int32)
            empty = jax.tree.map(lambda x: x[0], init_logprobs(1, C, variant.num_prompt_logprobs))
            prompt = PromptLogprobs(none_C, none_C, none_C, empty)
        return work, jnp.full((B, 1), -1, jnp.int32), logprobs, prompt

    turns = (num_tokens > 0).astype(jnp.int32)
    work, emitted_B1, logprobs, prompt = lax.fori_loop(
        0, turns, lambda _, x: draw(x[0]), skip(work)
    )
    outputs = row_outputs(work, rows_B, emitted_B1, logprobs)
    telemetry = dataclasses.replace(
        state.telemetry,
        num_prefill_tokens=state.telemetry.num_prefill_tokens + num_tokens,
        num_output_tokens=state.telemetry.num_output_tokens + jnp.sum(emitted_B1 >= 0),
    )
    return put_work(state, work, telemetry), outputs, prompt


def _tile(tokens: _Tokens, first: Array, size: int) -> _Tokens:
    """Those of the packed tokens that are in the `size` places from `first` on."""

    begin_B = jnp.clip(first - tokens.firsts_B, 0, tokens.counts_B)
    end_B = jnp.clip(first + size - tokens.firsts_B, 0, tokens.counts_B)
    place_T = first + jnp.arange(size)
    index_T = tokens.index_T.at[place_T].get(mode="clip")
    return _Tokens(
        rows_B=tokens.rows_B,
        starts_B=tokens.starts_B + begin_B,
        firsts_B=jnp.clip(tokens.firsts_B - first, 0, size),
        counts_B=end_B - begin_B,
        index_T=index_T,
        position_T=tokens.position_T.at[place_T].get(mode="clip"),
        is_token_T=tokens.is_token_T.at[place_T].get(mode="fill", fill_value=False),
    )


def _hidden(served: Served, scales, work: Work, tokens: _Tokens) -> tuple[Array, KVPools]:
    """Runs the model on `tokens`: hidden states [T, D], and the pools with their KV entries."""
    model, config = served.model, served.config
    row_T = jnp.maximum(tokens.rows_B, 0)[tokens.index_T]
    ids_T = work.tokens_RS.at[row_T, tokens.position_T].get(mode="clip")
    positions_T = jnp.where(tokens.is_token_T, tokens.position_T, -1)
    cache = PagedCache(
        pools=work.pools,
        rows=tuple(_row_blocks(served, work.scheduler, scales, tokens)),
        num_blocks=config.num_blocks,
        max_query_len=len(tokens.index_T),
        backend=config.backend,
    )
    with preferring(config.backend):
        hidden, cache = model.apply(
            served.params, ids_T[None], positions_T[None], cache, method="hidden"
        )
    return hidden[0], cache.pools


def _row_blocks(
    served: Served, scheduler: SchedulerState, scales: KVScales | None, tokens: _Tokens
) -> Iterator[RowBlocks]:
    """`RowBlocks` of each precision that the variant has."""
    for table in row_tables(served, scheduler, tokens.rows_B):
        block_tokens = format_of(table.kv_dtype).tokens_per_block
        table_BM, mine_B = table.block_table_BM, table.is_mine_B
        block_T = table_BM.at[tokens.index_T, tokens.position_T // block_tokens].get(mode="clip")
        slot_T = block_T * block_tokens + tokens.position_T % block_tokens
        writes_T = tokens.is_token_T & mine_B[tokens.index_T]
        yield RowBlocks(
            block_table_BM=table_BM,
            context_len_B=jnp.where(mine_B, tokens.starts_B + tokens.counts_B, 0),
            query_start_B=tokens.firsts_B.astype(jnp.int32),
            query_len_B=jnp.where(mine_B, tokens.counts_B, 0),
            slot_T=jnp.where(writes_T, slot_T, -1),
            scales=scales if format_of(table.kv_dtype).bits == 8 else None,
            kv_dtype=table.kv_dtype,
        )


def _score_prompt(served: Served, work: Work, tokens: _Tokens, hidden_CD: Array) -> PromptLogprobs:
    scheduler, row_C = work.scheduler, tokens.rows_B[tokens.index_T]
    position_C = tokens.position_T + 1
    token_C = work.tokens_RS.at[jnp.maximum(row_C, 0), position_C].get(mode="clip")
    is_scored_C = tokens.is_token_T & (position_C < get_any(scheduler.num_prompt_R, row_C))
    num_top = served.variant.num_prompt_logprobs
    assert num_top is not None
    with preferring(served.config.backend):
        scored = score_hidden(served.model, served.params, hidden_CD, token_C, num_top)
    return PromptLogprobs(
        request_id_C=jnp.where(is_scored_C, get_any(scheduler.request_id_R, row_C), -1),
        position_C=jnp.where(is_scored_C, position_C, -1),
        token_C=token_C,
        logprobs=scored,
    )
