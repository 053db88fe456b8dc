"""Which block already holds these tokens? A hash table from content hashes to blocks.

Open addressing with a window of NUM_PROBES slots: a lookup reads them all, so that removing is
clearing a slot. A block that finds its window full is not published, and that is all: a later
request computes its tokens again.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache.blocks import BlockPool
from helios_jax.cache.masked import get_any, masked_max, masked_set

NUM_PROBES = 8
_LOOKUP_WINDOW = 64


def lookup(pool: BlockPool, hashes_K2: Array) -> Array:
    """The blocks with these content hashes, int32 [K]; -1 where none is findable.

    Blocks found may be used or cached; `blocks.share` keeps them.
    """
    slots_KN = _slots(pool, hashes_K2)
    blocks_KN = pool.index_T[slots_KN]
    equal_KN = jnp.all(get_any(pool.hash_P2, blocks_KN) == hashes_K2[:, None], axis=-1)
    found_KN = (blocks_KN >= 0) & equal_KN & jnp.any(hashes_K2 != 0, axis=-1)[:, None]
    return jnp.max(jnp.where(found_KN, blocks_KN, -1), axis=-1)


def lookup_prefix(pool: BlockPool, hashes_M2: Array) -> Array:
    """The blocks of the longest findable prefix, int32 [M], -1 from the first that is missing.

    A window of hashes at a time, and none after the one where a block is missing: O(blocks found).
    """
    length = hashes_M2.shape[0]
    window = min(_LOOKUP_WINDOW, length)
    num_windows = -(-length // window)
    hashes_X2 = jnp.pad(hashes_M2, ((0, num_windows * window - length), (0, 0)))

    def step(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        start, _, blocks_X = carry
        blocks_W = lookup(pool, lax.dynamic_slice_in_dim(hashes_X2, start, window))
        missing_W = jnp.cumsum((blocks_W < 0).astype(jnp.int32)) > 0
        blocks_W = jnp.where(missing_W, -1, blocks_W)
        blocks_X = lax.dynamic_update_slice_in_dim(blocks_X, blocks_W, start, axis=0)
        goes_on = ~missing_W[-1] & (start + window < num_windows * window)
        return start + window, goes_on, blocks_X

    nowhere_X = jnp.full(num_windows * window, -1, jnp.int32)
    start = (jnp.int32(0), jnp.bool_(True), nowhere_X)
    return lax.while_loop(lambda carry: carry[1], step, start)[2][:length]


def publish(pool: BlockPool, blocks_K: Array, hashes_K2: Array) -> BlockPool:
    """Makes used blocks findable by their content (-1 padded; hash (0, 0) is not published).

    The first block with a content keeps it: a block whose hash is findable already, or that is
    findable itself, is left as it is. Of equal hashes in one call one is published.
    """
    wanted_K = (blocks_K >= 0) & jnp.any(hashes_K2 != 0, axis=-1)
    wanted_K &= (get_any(pool.index_slot_P, blocks_K) < 0) & (lookup(pool, hashes_K2) < 0)
    slots_KN = _slots(pool, hashes_K2)
    hash_P2 = masked_set(pool.hash_P2, blocks_K, hashes_K2, wanted_K)

    def probe(i, carry):
        index_T, open_K, slot_K = carry
        tried_K = slots_KN[:, i]
        empty_K = index_T[tried_K] < 0
        # Of those that want one slot, the highest block gets it, on every backend.
        index_T = masked_max(index_T, tried_K, blocks_K, open_K & empty_K)
        holder_K = index_T[tried_K]
        won_K = open_K & (holder_K == blocks_K)
        same_K = jnp.all(get_any(hash_P2, holder_K) == hashes_K2, axis=-1)
        return index_T, open_K & ~won_K & ~same_K, jnp.where(won_K, tried_K, slot_K)

    slot_K = jnp.full_like(blocks_K, -1)
    index_T, _, slot_K = lax.fori_loop(0, NUM_PROBES, probe, (pool.index_T, wanted_K, slot_K))
    return dataclasses.replace(
        pool,
        hash_P2=masked_set(hash_P2, blocks_K, jnp.uint32(0), wanted_K & (slot_K < 0)),
        index_T=index_T,
        index_slot_P=masked_set(pool.index_slot_P, blocks_K, slot_K, slot_K >= 0),
    )


def _slots(pool: BlockPool, hashes_K2: Array) -> Array:
    """Where a hash may stand, int32 [K, NUM_PROBES]."""
    start_K = hashes_K2[:, 0] ^ (hashes_K2[:, 1] >> 7)
    slots_KN = start_K[:, None] + jnp.arange(NUM_PROBES, dtype=jnp.uint32)
    return (slots_KN & jnp.uint32(pool.index_T.shape[0] - 1)).astype(jnp.int32)
