"""How does a row give its blocks back, whether it finished, was aborted or is preempted?"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache import blocks
from helios_jax.cache.blocks import BlockPool
from helios_jax.cache.masked import after, masked_set
from helios_jax.scheduler.state import FINISHED, WAITING, SchedulerState

# Blocks that are read or released at a time.
_WINDOW = 128


def release_row(state: SchedulerState, row: Array) -> SchedulerState:
    """Row `row` holds no blocks any more. O(blocks held)."""
    blocks_M = read_row(state, row)
    return dataclasses.replace(
        state,
        pool=_release_prefix(state.pool, blocks_M, state.num_blocks_R[row]),
        num_blocks_R=state.num_blocks_R.at[row].set(0),
        num_published_R=state.num_published_R.at[row].set(0),
        block_table_RM=state.block_table_RM.at[row].set(after(blocks_M, -1)),
    )


def read_row(state: SchedulerState, row: Array) -> Array:
    """The blocks of a row whose place in the table is about to be written, int32 [M].

    In a loop, which XLA cannot fuse into what uses the blocks: it would read them again there, also
    after the writing, and copy the whole table for that. (A barrier helps on jax 0.12 alone.)
    """
    M = state.block_table_RM.shape[1]
    num_windows = (state.num_blocks_R[row] + _WINDOW - 1) // _WINDOW

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        blocks_M, done = carry
        place_W = done * _WINDOW + jnp.arange(_WINDOW)
        blocks_W = state.block_table_RM.at[row, place_W].get(mode="fill", fill_value=-1)
        return blocks_M.at[place_W].set(blocks_W, mode="drop"), done + 1

    start = (jnp.full(M, -1, jnp.int32), jnp.int32(0))
    return lax.while_loop(lambda carry: carry[1] < num_windows, step, start)[0]


def _release_prefix(pool: BlockPool, blocks_M: Array, num_blocks: Array) -> BlockPool:
    """`blocks.release` of the first `num_blocks`, a window at a time from the last to the first."""

    def step(carry: tuple[BlockPool, Array]) -> tuple[BlockPool, Array]:
        pool, left = carry
        place_W = (left - 1) * _WINDOW + jnp.arange(_WINDOW)
        blocks_W = blocks_M.at[place_W].get(mode="fill", fill_value=-1)
        return blocks.release(pool, blocks_W), left - 1

    num_windows = (num_blocks + _WINDOW - 1) // _WINDOW
    return lax.while_loop(lambda carry: carry[1] > 0, step, (pool, num_windows))[0]


def release_rows(state: SchedulerState) -> SchedulerState:
    """All finished rows hold no blocks any more."""

    def is_holding(state: SchedulerState) -> Array:
        return (state.status_R == FINISHED) & (state.num_blocks_R > 0)

    return lax.while_loop(
        lambda state: jnp.any(is_holding(state)),
        lambda state: release_row(state, jnp.argmax(is_holding(state))),
        state,
    )


def preempt_row(state: SchedulerState, row: Array, now: Array) -> SchedulerState:
    """Row `row` waits again and its KV entries are lost, but for what stays findable.

    A row past the watermark starts again in the wide precision, without hashes: they named
    narrow blocks.
    """
    counters = state.counters
    becomes_wide = state.num_known_R[row] > state.limits.kv_watermark
    becomes_wide &= ~state.is_wide_R[row]
    lost = counters.num_recomputed_tokens + state.num_computed_R[row]
    return dataclasses.replace(
        release_row(state, row),
        status_R=state.status_R.at[row].set(WAITING),
        num_computed_R=state.num_computed_R.at[row].set(0),
        waiting_since_R=state.waiting_since_R.at[row].set(now),
        num_preemptions_R=state.num_preemptions_R.at[row].add(1),
        is_wide_R=masked_set(state.is_wide_R, row, True, becomes_wide),
        num_hashed_R=masked_set(state.num_hashed_R, row, 0, becomes_wide),
        counters=dataclasses.replace(
            counters, num_preemptions=counters.num_preemptions + 1, num_recomputed_tokens=lost
        ),
    )
