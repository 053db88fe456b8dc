"""Do content hashes tell apart what differs, and only that?"""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helios_jax.cache.hashing import chain_hash, initial_hash, prompt_hashes

hash_prompt = jax.jit(prompt_hashes, static_argnums=2)


def pairs(hashes) -> list[tuple]:
    return [tuple(map(int, pair)) for pair in np.asarray(hashes)]


def test_only_full_blocks_are_named():
    tokens = jnp.arange(32)
    assert pairs(hash_prompt(tokens, 15, 8, initial_hash(0)))[1:] == [(0, 0)] * 3
    assert (0, 0) not in pairs(hash_prompt(tokens, 32, 8, initial_hash(0)))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=32, max_size=32), st.integers(0, 31))
def test_a_changed_token_changes_its_block_and_all_that_follow(tokens, place):
    first = initial_hash(0)
    before = pairs(hash_prompt(jnp.asarray(tokens), 32, 8, first))
    changed = jnp.asarray(tokens).at[place].add(1)
    after = pairs(hash_prompt(changed, 32, 8, first))
    block = place // 8
    assert before[:block] == after[:block]
    assert all(a != b for a, b in zip(before[block:], after[block:], strict=True))


def test_order_precision_and_salt_count():
    tokens = jnp.arange(16)
    variants = [
        hash_prompt(tokens, 16, 8, initial_hash(0)),
        hash_prompt(tokens, 16, 8, initial_hash(1)),
        hash_prompt(tokens, 16, 8, initial_hash(0, (1, 0))),
        hash_prompt(tokens, 16, 8, initial_hash(0, (0, 1))),
        hash_prompt(tokens[::-1], 16, 8, initial_hash(0)),
        hash_prompt(jnp.concatenate([tokens[8:], tokens[:8]]), 16, 8, initial_hash(0)),
    ]
    last = [pairs(variant)[-1] for variant in variants]
    assert len(set(last)) == len(last)
    # The two lanes differ too, so that together they are 64 bits and not 32 twice.
    assert all(low != high for low, high in last)


def test_blocks_chain_one_by_one_as_all_at_once():
    tokens = jax.random.randint(jax.random.key(0), (4, 8), 0, 50_000)
    hash_2 = initial_hash(3, (5, 6))
    whole = hash_prompt(tokens.reshape(-1), 32, 8, hash_2)
    for block in range(4):
        # With room for longer blocks: what is past the length does not count.
        padded = jnp.concatenate([tokens[block], jnp.full(8, 77 + block)])
        hash_2 = chain_hash(hash_2, padded, jnp.int32(8))
        assert pairs([hash_2]) == pairs(whole[block : block + 1])


def test_short_prompts_do_not_collide():
    tokens = jnp.stack(jnp.meshgrid(*[jnp.arange(24)] * 3), -1).reshape(-1, 3)
    tokens = jnp.concatenate([tokens, jnp.zeros_like(tokens[:, :1])], 1)
    named = np.asarray(chain_hash(initial_hash(0), tokens)).astype(np.uint64)
    assert len(np.unique(named[:, 0] << np.uint64(32) | named[:, 1])) == 24**3
    for lane in range(2):  # each lane alone is close to uniform: 13,824 draws of 2**32
        assert len(np.unique(named[:, lane])) >= 24**3 - 2
