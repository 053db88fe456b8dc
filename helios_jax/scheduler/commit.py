"""What does the scheduler learn from a step: tokens computed, tokens sampled, rows finished?"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache import blocks, prefix
from helios_jax.cache.hashing import chain_hash
from helios_jax.cache.masked import after, get_any, masked_add, masked_set
from helios_jax.scheduler.release import release_rows
from helios_jax.scheduler.state import FINISHED, SchedulerState


def grow(
    state: SchedulerState, rows_B: Array, num_tokens_B: Array, max_blocks_per_row: int
) -> tuple[SchedulerState, Array]:
    """Takes the blocks that rows need to hold `num_tokens_B` KV entries; for use in every round.

    No loops, O(B * max_blocks_per_row): blocks come from those that `schedule` made ready.

    Args:
      rows_B: int32, distinct running rows, the most urgent first; -1 padded.
      num_tokens_B: int32, clipped to what the row can ever need.
      max_blocks_per_row: blocks that a row may need in a call: 1 + num_draft_tokens // tokens per
        block, rounded up.

    Returns:
      The state, and which rows can go on, bool [B]. One that cannot waits for the next `schedule`:
      no block is left, or it passed the watermark and must migrate.
    """
    named_B = rows_B >= 0
    held_B = get_any(state.num_blocks_R, rows_B)
    num_tokens_B = jnp.minimum(num_tokens_B, get_any(state.max_known_R, rows_B) - 1)
    is_wide_B = get_any(state.is_wide_R, rows_B)
    crossed_B = ~is_wide_B & (get_any(state.num_known_R, rows_B) > state.limits.kv_watermark)
    wanted_B = jnp.maximum(state.num_blocks_for(num_tokens_B, is_wide_B) - held_B, 0)
    wanted_B = jnp.where(named_B & ~crossed_B, wanted_B, 0)
    pool, taken = blocks.allocate(state.pool, wanted_B, rows_B.shape[0] * max_blocks_per_row)
    state = add_blocks(dataclasses.replace(state, pool=pool), rows_B, taken)
    return state, named_B & ~crossed_B & taken.granted_B


def add_blocks(state: SchedulerState, rows_B: Array, taken: blocks.Allocation) -> SchedulerState:
    """Appends the blocks taken for `rows_B` to their rows of the block table."""
    is_taken_A = taken.blocks_A >= 0
    row_A = get_any(rows_B, taken.rows_A)
    place_A = state.num_blocks_R[row_A] + taken.places_A
    R, M = state.block_table_RM.shape
    flat = masked_set(
        state.block_table_RM.reshape(R * M), row_A * M + place_A, taken.blocks_A, is_taken_A
    )
    return dataclasses.replace(
        state,
        block_table_RM=flat.reshape(R, M),
        num_blocks_R=masked_add(state.num_blocks_R, row_A, 1, is_taken_A),
    )


def advance(
    state: SchedulerState,
    rows_B: Array,
    num_computed_B: Array,
    num_sampled_B: Array,
    is_stopped_B: Array,
    now: Array,
) -> SchedulerState:
    """Counts what a chunk or a round did. A row at its maximum length finishes by itself.

    Args:
      rows_B: int32, distinct running rows; -1 padded.
      num_computed_B: int32, KV entries written for known tokens and accepted drafts.
      num_sampled_B: int32, output tokens added: 0 while a prompt is not through.
      is_stopped_B: bool, the row ends here.
      now: time of the new tokens.
    """
    named_B = rows_B >= 0
    known_R = masked_add(state.num_known_R, rows_B, num_sampled_B, named_B)
    stopped_B = is_stopped_B | (get_any(known_R, rows_B) >= get_any(state.max_known_R, rows_B))
    first_B = (get_any(state.num_output_R, rows_B) == 0) & (num_sampled_B > 0)
    return dataclasses.replace(
        state,
        num_known_R=known_R,
        num_computed_R=masked_add(state.num_computed_R, rows_B, num_computed_B, named_B),
        first_token_time_R=masked_set(state.first_token_time_R, rows_B, now, named_B & first_B),
        status_R=masked_set(state.status_R, rows_B, FINISHED, named_B & stopped_B),
    )


def commit(state: SchedulerState) -> SchedulerState:
    """Ends a step: full blocks become findable, finished rows give theirs back.

    Blocks beyond the width of the call (max_chunk_tokens / tokens per block + R) are published in
    later steps.
    """
    R, M = state.block_table_RM.shape
    width = state.max_chunk_tokens // state.block_tokens[1] + R
    narrow, wide = state.block_tokens
    num_full_R = state.num_computed_R // jnp.where(state.is_wide_R, wide, narrow)
    num_full_R = jnp.minimum(jnp.minimum(num_full_R, state.num_hashed_R), state.num_blocks_R)
    new_R = jnp.maximum(num_full_R - state.num_published_R, 0)
    ends_R = jnp.minimum(jnp.cumsum(new_R), width)
    new_R = jnp.diff(ends_R, prepend=0)
    item_K = jnp.arange(width)
    row_K = jnp.repeat(jnp.arange(R), new_R, total_repeat_length=width)
    place_K = state.num_published_R[row_K] + item_K - (ends_R - new_R)[row_K]
    is_new_K = item_K < ends_R[-1]
    block_K = jnp.where(is_new_K, state.block_table_RM[row_K, jnp.where(is_new_K, place_K, 0)], -1)
    hash_K2 = state.hash_RM2[row_K, jnp.where(is_new_K, place_K, 0)]
    state = dataclasses.replace(
        state,
        pool=prefix.publish(state.pool, block_K, hash_K2),
        num_blocks_R=after(jnp.max(block_K), state.num_blocks_R),
        num_published_R=state.num_published_R + new_R,
    )
    return release_rows(state)


def hash_outputs(state: SchedulerState, tokens_RS: Array) -> SchedulerState:
    """Hashes the blocks that output tokens filled, so that `commit` can publish them.

    Rows whose prompt's blocks are not all hashed (they share nothing, or changed precision), or
    whose prompt fills no block, are passed over. As many iterations as the row with the most new
    blocks has, O(R) each.

    Args:
      tokens_RS: int32, the known tokens of each row.
    """
    narrow, wide = state.block_tokens
    length_R = jnp.where(state.is_wide_R, wide, narrow)
    num_full_R = jnp.minimum(state.num_computed_R // length_R, state.hash_RM2.shape[1])
    chains_R = (state.num_hashed_R > 0) & (state.num_hashed_R >= state.num_prompt_R // length_R)

    def is_behind(carry):
        num_hashed_R, _ = carry
        return chains_R & (num_hashed_R < num_full_R)

    def step(carry):
        num_hashed_R, hash_RM2 = carry
        behind_R = is_behind(carry)
        row_R = jnp.arange(num_hashed_R.shape[0])
        index_RT = (num_hashed_R * length_R)[:, None] + jnp.arange(narrow)
        tokens_RT = tokens_RS.at[row_R[:, None], index_RT].get(mode="clip")
        previous_R2 = hash_RM2[row_R, jnp.maximum(num_hashed_R - 1, 0)]
        hash_R2 = chain_hash(previous_R2, tokens_RT, length_R)
        place_R = jnp.where(behind_R, num_hashed_R, hash_RM2.shape[1])
        return num_hashed_R + behind_R, hash_RM2.at[row_R, place_R].set(hash_R2, mode="drop")

    num_hashed_R, hash_RM2 = lax.while_loop(
        lambda carry: jnp.any(is_behind(carry)), step, (state.num_hashed_R, state.hash_RM2)
    )
    return dataclasses.replace(state, num_hashed_R=num_hashed_R, hash_RM2=hash_RM2)
