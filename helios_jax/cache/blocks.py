"""Which blocks of the KV pool are free, who holds the others, and which block is reused next?

A block is in exactly one of three places:

- *used*: its reference count is above zero;
- *ready*: free and empty-handed, on a stack from which `allocate` pops;
- *cached*: free, but still findable by its content hash (`cache.prefix`), in a queue ordered by
  when it was freed. `refill` turns the least recently freed ones into ready blocks.

The split keeps `allocate` free of loops, so that it can be called in every decode round: the
scheduler calls `refill` once a step for what the step may need. Every operation costs O(blocks
named in the call), none looks at the whole pool; blocks past `num_blocks` are never handed out, so
that the pool's size is a value and not a shape.

The queue is a ring with holes: `share` takes a cached block out of the middle by punching a hole.
Each `release` moves a window of entries over the holes before it (a sweep), which keeps the ring
from filling up: with K the width of a release, a sweep that starts with E entries ends after at
most E/3K + 2 releases, hence E/3 + 2K new entries, so E stays below 1.5 P + 3K and the ring below
2P + 6K <= 8P.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from helios_jax.cache.masked import get_any, masked_add, masked_max, masked_set, ranks
from helios_jax.config import require

# Ring entries a block, see above; and how many times the width of a release its sweep looks at.
_RING_ENTRIES = 8
_SWEEP_FACTOR = 4
# Slots of the prefix table a block: a quarter full at most, so that a window of probes rarely is.
_INDEX_SLOTS = 4
_REFILL_WINDOW = 128


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockPool:
    """Who holds each of up to P blocks. All int32 but `hash_P2`; -1 means none.

    Attributes:
      num_blocks: how many of the P blocks exist.
      refcount_P: block tables that hold the block.
      num_ready, ready_P: the stack of ready blocks is `ready_P[:num_ready]`.
      num_cached: cached blocks.
      ring_C: the queue of cached blocks, C = 8P; -1 is a hole.
      ring_slot_P: where in `ring_C` a cached block stands.
      ring_head, ring_length: entries (with holes) are `ring_C[(ring_head + i) % C]`,
        i < ring_length; the head was freed first.
      sweep_read, sweep_write: entries before `sweep_write` are compacted, those from there to
        `sweep_read` are holes (offsets from the head).
      hash_P2: uint32, content hash of a findable block; (0, 0) where there is none.
      index_T: the prefix table, a block per slot.
      index_slot_P: the slot that makes the block findable.
    """

    num_blocks: Array
    refcount_P: Array
    num_ready: Array
    ready_P: Array
    num_cached: Array
    ring_C: Array
    ring_slot_P: Array
    ring_head: Array
    ring_length: Array
    sweep_read: Array
    sweep_write: Array
    hash_P2: Array
    index_T: Array
    index_slot_P: Array

    @property
    def num_free(self) -> Array:
        """Blocks that nobody holds: ready and cached."""
        return self.num_ready + self.num_cached


class Allocation(NamedTuple):
    """Blocks taken in one call, listed row after row.

    granted_B: bool, rows that got all they asked for (none of them counts); the others got nothing.
    blocks_A, rows_A, places_A: int32; block, index of its row in the call, and its place among the
      row's new blocks; -1 padded.
    """

    granted_B: Array
    blocks_A: Array
    rows_A: Array
    places_A: Array


class Copies(NamedTuple):
    """Blocks to copy in the pool's arrays before anything is written in this step.

    num_copies: int32; sources_B, destinations_B: int32, those copied first, then -1.
    """

    num_copies: Array
    sources_B: Array
    destinations_B: Array


def init_block_pool(num_blocks: int, capacity: int | None = None) -> BlockPool:
    """A pool whose blocks are all ready; block 0 is handed out first.

    Args:
      num_blocks: how many exist.
      capacity: P, how many the arrays have room for; None means `num_blocks`.

    Raises:
      ValueError: no blocks, or more than the capacity.
    """
    capacity = num_blocks if capacity is None else capacity
    require(num_blocks >= 1, f"num_blocks={num_blocks}: a KV pool needs at least 1 block")
    require(
        num_blocks <= capacity,
        f"num_blocks={num_blocks}: exceeds capacity={capacity}; raise the capacity",
    )
    num_slots = 1 << (_INDEX_SLOTS * capacity - 1).bit_length()
    order = np.arange(capacity, dtype=np.int32)

    def scalar(value: int) -> Array:
        return jnp.asarray(value, jnp.int32)

    def nowhere(size: int) -> Array:
        return jnp.full(size, -1, jnp.int32)

    return BlockPool(
        num_blocks=scalar(num_blocks),
        refcount_P=jnp.zeros(capacity, jnp.int32),
        num_ready=scalar(num_blocks),
        ready_P=jnp.asarray(np.where(order < num_blocks, num_blocks - 1 - order, -1)),
        num_cached=scalar(0),
        ring_C=nowhere(_RING_ENTRIES * capacity),
        ring_slot_P=nowhere(capacity),
        ring_head=scalar(0),
        ring_length=scalar(0),
        sweep_read=scalar(0),
        sweep_write=scalar(0),
        hash_P2=jnp.zeros((capacity, 2), jnp.uint32),
        index_T=nowhere(num_slots),
        index_slot_P=nowhere(capacity),
    )


def allocate(
    pool: BlockPool, counts_B: Array, max_blocks: int, *, enabled: Array | bool = True
) -> tuple[BlockPool, Allocation]:
    """Takes blocks from the ready ones, for several rows at once, all or nothing for each.

    Rows are served in order and none overtakes: after the first that cannot be served only those
    that ask for nothing are granted.

    Args:
      counts_B: int32, blocks that each row wants, >= 0.
      max_blocks: width A of the lists, a bound on the blocks taken in the call.
      enabled: False takes nothing.
    """
    ends_B = jnp.cumsum(counts_B)
    room = jnp.where(enabled, jnp.minimum(pool.num_ready, max_blocks), 0)
    granted_B = (counts_B == 0) | (ends_B <= room)
    taken_B = jnp.where(granted_B, counts_B, 0)
    num_taken = jnp.sum(taken_B)
    place = jnp.arange(max_blocks, dtype=jnp.int32)
    is_taken = place < num_taken
    rows_A = jnp.repeat(
        jnp.arange(counts_B.shape[0], dtype=jnp.int32), taken_B, total_repeat_length=max_blocks
    )
    blocks_A = pool.ready_P.at[pool.num_ready - 1 - place].get(mode="clip")
    pool = dataclasses.replace(
        pool,
        refcount_P=masked_set(pool.refcount_P, blocks_A, 1, is_taken),
        num_ready=pool.num_ready - num_taken,
    )

    def listed(values: Array) -> Array:
        return jnp.where(is_taken, values, -1)

    places_A = place - (ends_B - counts_B)[rows_A]
    return pool, Allocation(granted_B, listed(blocks_A), listed(rows_A), listed(places_A))


def release(pool: BlockPool, blocks_K: Array) -> BlockPool:
    """Gives back one reference to each block named (-1 padded; a block may be named repeatedly).

    Blocks that nobody holds any more become cached if findable, ready otherwise. Those later in
    the list count as freed earlier: given a row's blocks in order, its tail is reused first and
    the start of its prompt, which others are likeliest to share, last.
    """
    width = blocks_K.shape[0]
    blocks_K = blocks_K[::-1]
    named_K = blocks_K >= 0
    refcount_P = masked_add(pool.refcount_P, blocks_K, -1, named_K)
    freed_K = named_K & (get_any(refcount_P, blocks_K) == 0)
    # Of equal blocks the first named is pushed; a maximum, so that every backend agrees which.
    mark_K = jnp.arange(width, dtype=jnp.int32)
    marks_P = masked_max(pool.ring_slot_P, blocks_K, mark_K, freed_K)
    freed_K &= get_any(marks_P, blocks_K) == mark_K
    cached_K = freed_K & (get_any(pool.index_slot_P, blocks_K) >= 0)
    ready_K = freed_K & ~cached_K

    ready_at_K = pool.num_ready + ranks(ready_K)
    entry_K = pool.ring_length + ranks(cached_K)
    slot_K = (pool.ring_head + entry_K) % pool.ring_C.shape[0]
    num_cached = jnp.sum(cached_K, dtype=jnp.int32)
    pool = dataclasses.replace(
        pool,
        refcount_P=refcount_P,
        num_ready=pool.num_ready + jnp.sum(ready_K, dtype=jnp.int32),
        ready_P=masked_set(pool.ready_P, ready_at_K, blocks_K, ready_K),
        num_cached=pool.num_cached + num_cached,
        ring_C=masked_set(pool.ring_C, slot_K, blocks_K, cached_K),
        ring_slot_P=masked_set(marks_P, blocks_K, jnp.where(cached_K, slot_K, -1), freed_K),
        ring_length=pool.ring_length + num_cached,
    )
    return _sweep(pool, _SWEEP_FACTOR * width)


def share(pool: BlockPool, blocks_K: Array) -> BlockPool:
    """Adds a reference to each used or cached block named (-1 padded, each at most once)."""
    named_K = blocks_K >= 0
    slot_K = get_any(pool.ring_slot_P, blocks_K)
    cached_K = named_K & (slot_K >= 0)
    return dataclasses.replace(
        pool,
        refcount_P=masked_add(pool.refcount_P, blocks_K, 1, named_K),
        num_cached=pool.num_cached - jnp.sum(cached_K, dtype=jnp.int32),
        ring_C=masked_set(pool.ring_C, slot_K, -1, cached_K),
        ring_slot_P=masked_set(pool.ring_slot_P, blocks_K, -1, cached_K),
    )


def refill(pool: BlockPool, num_ready: Array | int) -> BlockPool:
    """Makes blocks ready, the least recently freed first, until `num_ready` are or none is cached.

    They are no longer findable.
    """
    window = min(_REFILL_WINDOW, pool.ring_C.shape[0])

    def step(pool: BlockPool) -> BlockPool:
        offset = jnp.arange(window, dtype=jnp.int32)
        slot_W = (pool.ring_head + offset) % pool.ring_C.shape[0]
        blocks_W = jnp.where(offset < pool.ring_length, pool.ring_C[slot_W], -1)
        present_W = blocks_W >= 0
        wanted = num_ready - pool.num_ready
        taken_W = present_W & (ranks(present_W) < wanted)
        num_taken = jnp.sum(taken_W, dtype=jnp.int32)
        # Up to the last one taken, or past the whole window where that was not enough.
        last = jnp.max(jnp.where(taken_W, offset, -1)) + 1
        passed = jnp.where(num_taken < wanted, jnp.minimum(window, pool.ring_length), last)
        ready_at_W = pool.num_ready + ranks(taken_W)
        pool = dataclasses.replace(
            unpublish(pool, jnp.where(taken_W, blocks_W, -1)),
            num_ready=pool.num_ready + num_taken,
            ready_P=masked_set(pool.ready_P, ready_at_W, blocks_W, taken_W),
            num_cached=pool.num_cached - num_taken,
            ring_C=masked_set(pool.ring_C, slot_W, -1, taken_W),
            ring_slot_P=masked_set(pool.ring_slot_P, blocks_W, -1, taken_W),
            ring_head=(pool.ring_head + passed) % pool.ring_C.shape[0],
            ring_length=pool.ring_length - passed,
            sweep_read=jnp.maximum(pool.sweep_read - passed, 0),
            sweep_write=jnp.maximum(pool.sweep_write - passed, 0),
        )
        return pool

    return lax.while_loop(
        lambda pool: (pool.num_ready < num_ready) & (pool.num_cached > 0), step, pool
    )


def unpublish(pool: BlockPool, blocks_K: Array) -> BlockPool:
    """Makes the blocks named (-1 padded) unfindable; whoever holds them keeps them.

    A cached block must leave the queue in the same breath (`refill`).
    """
    slot_K = get_any(pool.index_slot_P, blocks_K)
    findable_K = (blocks_K >= 0) & (slot_K >= 0)
    return dataclasses.replace(
        pool,
        hash_P2=masked_set(pool.hash_P2, blocks_K, jnp.uint32(0), findable_K),
        index_T=masked_set(pool.index_T, slot_K, -1, findable_K),
        index_slot_P=masked_set(pool.index_slot_P, blocks_K, -1, findable_K),
    )


def copy_on_write(pool: BlockPool, blocks_B: Array) -> tuple[BlockPool, Array, Copies]:
    """Makes the blocks named (-1 padded) writable by the row that names each.

    A block that others hold too is replaced with a ready one and copied; one that is merely
    findable is made unfindable, since its content is about to change.

    Returns:
      The pool, the blocks to write to [B] (-1 where none was named, or none is ready to copy to),
      and the copies.
    """
    width = blocks_B.shape[0]
    named_B = blocks_B >= 0
    shared_B = named_B & (get_any(pool.refcount_P, blocks_B) > 1)
    pool = unpublish(pool, jnp.where(named_B & ~shared_B, blocks_B, -1))
    pool, taken = allocate(pool, shared_B.astype(jnp.int32), width)
    copied_B = shared_B & taken.granted_B
    num_copies = jnp.sum(copied_B, dtype=jnp.int32)
    sources_B = jnp.where(taken.rows_A >= 0, get_any(blocks_B, taken.rows_A), -1)
    new_B = masked_set(
        jnp.where(shared_B, -1, blocks_B), taken.rows_A, taken.blocks_A, sources_B >= 0
    )
    pool = release(pool, jnp.where(copied_B, blocks_B, -1))
    return pool, new_B, Copies(num_copies, sources_B, taken.blocks_A)


def check_invariants(pool: BlockPool) -> Array:
    """Whether the pool is consistent, as a bool; looks at every block, so it is for tests.

    Every block that exists is used, ready or cached, and exactly one of them; those that do not
    are none; the queue, its slots, the prefix table and its slots agree.
    """
    capacity, ring_size = pool.refcount_P.shape[0], pool.ring_C.shape[0]
    block = jnp.arange(capacity)
    exists_P = block < pool.num_blocks
    on_stack_P = block < pool.num_ready
    nowhere_P = jnp.zeros(capacity, jnp.int32)
    stacked = masked_add(nowhere_P, pool.ready_P, 1, on_stack_P)
    offset = (jnp.arange(ring_size) - pool.ring_head) % ring_size
    in_queue_C = (offset < pool.ring_length) & (pool.ring_C >= 0)
    queued = masked_add(nowhere_P, pool.ring_C, 1, in_queue_C)
    used = (pool.refcount_P > 0).astype(jnp.int32)
    hole_C = (offset >= pool.sweep_write) & (offset < pool.sweep_read)
    findable_P = pool.index_slot_P >= 0
    filled_T = pool.index_T >= 0
    checks = [
        jnp.all(used + stacked + queued == exists_P),
        jnp.all(pool.refcount_P >= 0),
        jnp.sum(queued) == pool.num_cached,
        jnp.all((queued == 1) == (pool.ring_slot_P >= 0)),
        jnp.all((queued == 0) | (get_any(pool.ring_C, pool.ring_slot_P) == block)),
        jnp.all(~hole_C | (pool.ring_C == -1)),
        (0 <= pool.sweep_write) & (pool.sweep_write <= pool.sweep_read),
        (pool.sweep_read <= pool.ring_length) & (pool.ring_length <= ring_size),
        jnp.all((queued == 0) | findable_P),
        jnp.all((stacked == 0) | ~findable_P),
        jnp.all(findable_P == jnp.any(pool.hash_P2 != 0, axis=1)),
        jnp.all(~findable_P | (get_any(pool.index_T, pool.index_slot_P) == block)),
        jnp.sum(findable_P) == jnp.sum(filled_T),
    ]
    return jnp.all(jnp.stack(checks))


def _sweep(pool: BlockPool, window: int) -> BlockPool:
    """Moves the next `window` entries of the queue over the holes before them."""
    ring_size = pool.ring_C.shape[0]
    offset = pool.sweep_read + jnp.arange(min(window, ring_size), dtype=jnp.int32)
    slot_W = (pool.ring_head + offset) % ring_size
    blocks_W = jnp.where(offset < pool.ring_length, pool.ring_C[slot_W], -1)
    # On a GPU XLA would read the queue again for the last writing, and keep a copy of it for that.
    blocks_W = lax.optimization_barrier(blocks_W)
    present_W = blocks_W >= 0
    target_W = (pool.ring_head + pool.sweep_write + ranks(present_W)) % ring_size
    ring_C = masked_set(pool.ring_C, slot_W, -1, present_W)
    read = jnp.minimum(pool.sweep_read + window, pool.ring_length)
    write = pool.sweep_write + jnp.sum(present_W, dtype=jnp.int32)
    is_done = read == pool.ring_length
    return dataclasses.replace(
        pool,
        ring_C=masked_set(ring_C, target_W, blocks_W, present_W),
        ring_slot_P=masked_set(pool.ring_slot_P, blocks_W, target_W, present_W),
        ring_length=jnp.where(is_done, write, pool.ring_length),
        sweep_read=jnp.where(is_done, 0, read),
        sweep_write=jnp.where(is_done, 0, write),
    )
