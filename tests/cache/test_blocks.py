"""Does the block pool follow its rules, operation by operation and over long histories?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.cache import blocks, prefix
from tests.cache.pool_model import ModelPool, assert_equal, queue_of

WIDTH = 8
allocate = jax.jit(blocks.allocate, static_argnums=2)
release = jax.jit(blocks.release)
share = jax.jit(blocks.share)
refill = jax.jit(blocks.refill)
publish = jax.jit(prefix.publish)
copy_on_write = jax.jit(blocks.copy_on_write)
lookup_prefix = jax.jit(prefix.lookup_prefix)
is_consistent = jax.jit(blocks.check_invariants)


def ids(values, width=WIDTH):
    return jnp.asarray(list(values) + [-1] * (width - len(values)), jnp.int32)


def hash_pairs(numbers):
    return [(n, n * 7 + 1) for n in numbers]


def hashes(numbers, width=WIDTH):
    return jnp.asarray(hash_pairs(numbers) + [(0, 0)] * (width - len(numbers)), jnp.uint32)


def test_allocate_gives_each_row_all_or_nothing_in_order():
    pool = blocks.init_block_pool(5)
    pool, taken = allocate(pool, jnp.asarray([2, 0, 4, 1, 0]), 8)
    # 4 do not fit into the remaining 3, and the row behind does not overtake.
    assert taken.granted_B.tolist() == [True, True, False, False, True]
    assert taken.blocks_A.tolist() == [0, 1] + [-1] * 6
    assert taken.rows_A.tolist() == [0, 0] + [-1] * 6
    assert taken.places_A.tolist() == [0, 1] + [-1] * 6
    assert int(pool.num_free) == 3


def test_allocate_takes_at_most_its_width():
    pool = blocks.init_block_pool(8)
    pool, taken = allocate(pool, jnp.asarray([3, 2]), 4)
    assert taken.granted_B.tolist() == [True, False]
    assert int(pool.num_free) == 5


def test_allocate_can_be_disabled():
    pool, taken = allocate(blocks.init_block_pool(8), jnp.asarray([3, 0]), 4, enabled=False)
    assert taken.granted_B.tolist() == [False, True]
    assert int(pool.num_free) == 8


def test_freed_findable_blocks_are_reused_least_recently_freed_first():
    pool = blocks.init_block_pool(6)
    pool, taken = allocate(pool, jnp.asarray([6]), 6)
    pool = publish(pool, ids(range(6)), hashes([11, 12, 13, 14, 15, 16]))
    pool = release(pool, ids([2, 3]))  # a row's tail goes first: 3, then 2
    pool = release(pool, ids([0, 1]))
    assert queue_of(pool) == [3, 2, 1, 0]
    pool = share(pool, ids([2]))  # found again while free
    pool = release(pool, ids([2]))
    pool = refill(pool, 3)
    assert int(pool.num_ready) == 3 and queue_of(pool) == [2]
    pool, taken = allocate(pool, jnp.asarray([3]), 8)
    assert sorted(taken.blocks_A.tolist()[:3]) == [0, 1, 3]
    assert lookup_prefix(pool, hashes([13])).tolist()[0] == 2
    assert lookup_prefix(pool, hashes([12])).tolist()[0] == -1


def test_a_block_is_free_when_its_last_holder_releases_it():
    pool, _ = allocate(blocks.init_block_pool(3), jnp.asarray([1]), 1)
    pool = share(pool, ids([0]))
    pool = release(pool, ids([0]))
    assert int(pool.num_free) == 2
    pool = release(pool, ids([0]))
    assert int(pool.num_free) == 3


def test_one_call_may_release_a_block_for_all_its_holders():
    for findable in ([], [0]):
        pool, _ = allocate(blocks.init_block_pool(3), jnp.asarray([1]), 1)
        pool = publish(pool, ids(findable), hashes([9] * len(findable)))
        pool = release(share(share(pool, ids([0])), ids([0])), ids([0, 0, 0]))
        assert int(pool.num_free) == 3 and bool(is_consistent(pool))


def test_the_first_block_with_a_content_keeps_it():
    pool, _ = allocate(blocks.init_block_pool(4), jnp.asarray([4]), 4)
    pool = publish(pool, ids([1, 2]), hashes([5, 5]))  # equal in one call: one of them
    first = int(lookup_prefix(pool, hashes([5]))[0])
    assert first in (1, 2)
    pool = publish(pool, ids([3]), hashes([5]))
    assert int(lookup_prefix(pool, hashes([5]))[0]) == first
    assert int(jnp.sum(pool.index_slot_P >= 0)) == 1 and bool(is_consistent(pool))


def test_hash_zero_is_never_found():
    pool, _ = allocate(blocks.init_block_pool(4), jnp.asarray([1]), 1)
    pool = publish(pool, ids([0]), hashes([]))
    assert lookup_prefix(pool, hashes([])).tolist() == [-1] * WIDTH


def test_a_full_window_of_probes_leaves_a_block_unpublished():
    capacity = prefix.NUM_PROBES + 1
    pool, _ = allocate(blocks.init_block_pool(capacity), jnp.asarray([capacity]), capacity)
    # The table has 64 slots, so that first words equal modulo 64 all start at one slot.
    collisions = jnp.asarray([(64 * n, n) for n in range(1, capacity + 1)], jnp.uint32)
    pool = publish(pool, jnp.arange(capacity), collisions)
    found = prefix.lookup(pool, collisions)
    assert pool.index_T.shape == (64,)
    assert int(jnp.sum(found >= 0)) == prefix.NUM_PROBES and bool(is_consistent(pool))


def test_a_prefix_ends_at_the_first_missing_block():
    pool, _ = allocate(blocks.init_block_pool(4), jnp.asarray([4]), 4)
    pool = publish(pool, ids([0, 1, 3]), hashes([5, 6, 8]))
    assert lookup_prefix(pool, hashes([5, 6, 7, 8])).tolist()[:4] == [0, 1, -1, -1]


@pytest.mark.parametrize("missing", [None, 0, 63, 64, 130])
def test_a_prefix_may_be_longer_than_a_window(missing):
    pool, _ = allocate(blocks.init_block_pool(150), jnp.asarray([150]), 150)
    numbers = list(range(1, 151))
    pool = publish(pool, ids(range(150), 150), hashes(numbers, 150))
    if missing is not None:
        numbers[missing] = 999
    found = lookup_prefix(pool, hashes(numbers, 150)).tolist()
    number = 150 if missing is None else missing
    assert found == [*range(number), *[-1] * (150 - number)]


def test_copy_on_write_copies_what_others_hold():
    pool, _ = allocate(blocks.init_block_pool(6), jnp.asarray([3]), 3)
    pool = publish(share(pool, ids([1])), ids([1, 2]), hashes([5, 6]))
    pool, new, copies = copy_on_write(pool, jnp.asarray([0, -1, 1, 2]))
    # 0 is exclusive; 1 is shared, so block 3 gets a copy; 2 is merely findable, and no longer is.
    assert new.tolist() == [0, -1, 3, 2]
    assert int(copies.num_copies) == 1
    assert copies.sources_B.tolist() == [1, -1, -1, -1]
    assert copies.destinations_B.tolist() == [3, -1, -1, -1]
    assert lookup_prefix(pool, hashes([5])).tolist()[0] == 1
    assert lookup_prefix(pool, hashes([6])).tolist()[0] == -1
    assert pool.refcount_P.tolist() == [1, 1, 1, 1, 0, 0]


def test_copy_on_write_without_a_ready_block_changes_nothing():
    pool, _ = allocate(blocks.init_block_pool(1), jnp.asarray([1]), 1)
    pool, new, copies = copy_on_write(share(pool, ids([0])), jnp.asarray([0]))
    assert new.tolist() == [-1] and int(copies.num_copies) == 0
    assert int(pool.refcount_P[0]) == 2


def test_blocks_past_num_blocks_are_never_handed_out():
    pool = blocks.init_block_pool(3, capacity=8)
    pool, taken = allocate(pool, jnp.asarray([4, 0]), 8)
    assert not taken.granted_B[0]
    pool, taken = allocate(pool, jnp.asarray([3, 0]), 8)
    assert sorted(taken.blocks_A.tolist()[:3]) == [0, 1, 2] and bool(is_consistent(pool))


@pytest.mark.parametrize("arguments", [(0,), (9, 8)])
def test_impossible_pools_are_refused(arguments):
    with pytest.raises(ValueError, match=f"num_blocks={arguments[0]}"):
        blocks.init_block_pool(*arguments)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_blocks=st.integers(1, 13))
def test_random_histories_agree_with_the_model(seed, num_blocks):
    rng = np.random.default_rng(seed)
    pool, model = blocks.init_block_pool(num_blocks, capacity=13), ModelPool(num_blocks)
    next_hash = 1
    for _ in range(60):
        used, cached = model.used, model.cached
        match rng.integers(7):
            case 0 | 1:
                counts = [int(n) for n in rng.integers(0, 4, 4)]
                enabled = bool(rng.random() < 0.9)
                pool, taken = allocate(pool, jnp.asarray(counts), 6, enabled=enabled)
                granted, taken_blocks = model.allocate(counts, 6, enabled)
                flat = sum(taken_blocks, [])
                assert taken.granted_B.tolist() == granted
                assert taken.blocks_A.tolist() == flat + [-1] * (6 - len(flat))
                rows = [i for i, row in enumerate(taken_blocks) for _ in row]
                assert taken.rows_A.tolist() == rows + [-1] * (6 - len(flat))
            case 2:
                held = [b for b in used for _ in range(model.references[b])]
                count = int(rng.integers(0, min(len(held), WIDTH) + 1))
                chosen = [int(b) for b in rng.permutation(held)[:count]]
                pool = release(pool, ids(chosen))
                model.release(chosen)
            case 3:
                chosen = [int(b) for b in rng.permutation(used + cached)[: rng.integers(0, 5)]]
                pool = share(pool, ids(chosen))
                model.share(chosen)
            case 4:
                count = int(rng.integers(0, num_blocks + 1))
                pool = refill(pool, count)
                model.refill(count)
            case 5:
                chosen = [int(b) for b in rng.permutation(used)[: rng.integers(0, 5)]]
                # Old hashes and new ones, distinct within the call.
                numbers = rng.permutation(np.arange(max(next_hash - 3, 1), next_hash + 5))
                numbers = [int(n) for n in numbers[: len(chosen)]]
                next_hash = max([next_hash, *numbers])
                pool = publish(pool, ids(chosen), hashes(numbers))
                model.publish(chosen, hash_pairs(numbers))
            case 6:
                numbers = [int(n) for n in rng.integers(1, next_hash + 1, 5)]
                found = model.lookup_prefix(hash_pairs(numbers))
                assert lookup_prefix(pool, hashes(numbers)).tolist() == found + [-1] * (
                    WIDTH - len(found)
                )
        assert bool(is_consistent(pool))
        assert_equal(pool, model)


def test_the_queue_never_fills_while_nothing_is_evicted():
    """One old block at the head, the others found and freed again for ever: all holes."""
    num_blocks = 8
    pool, _ = allocate(blocks.init_block_pool(num_blocks), jnp.asarray([num_blocks]), num_blocks)
    pool = publish(pool, ids(range(8)), hashes(range(1, 9)))
    pool = release(pool, ids(range(8)))

    def cycle(pool, key):
        chosen = jax.random.permutation(key, num_blocks - 1)
        chosen = jnp.where(jnp.arange(num_blocks - 1) < 3, chosen, -1)
        pool = blocks.release(blocks.share(pool, chosen), chosen)
        return pool, (pool.ring_length, blocks.check_invariants(pool))

    keys = jax.random.split(jax.random.key(0), 3000)
    pool, (lengths, consistent) = jax.jit(lambda pool: jax.lax.scan(cycle, pool, keys))(pool)
    assert bool(jnp.all(consistent))
    assert queue_of(pool)[0] == 7 and len(queue_of(pool)) == num_blocks
    assert int(jnp.max(lengths)) < pool.ring_C.shape[0] // 2
