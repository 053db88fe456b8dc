"""append_kv in plain jnp: a scatter, in place where the pool is donated or carried."""

import jax.numpy as jnp

from pallas_kernels.append_kv.problem import Problem
from pallas_kernels.kv_format import to_words


def append(k_pool, v_pool, k_TKH, v_TKH, slot_T, k_scale_K, v_scale_K, block_offset,
           problem: Problem):  # fmt: skip
    """See `api.append_kv`. Returns the two pools."""
    tokens = problem.format.tokens_per_block
    words = problem.format.words_per_token(problem.head_dim)
    # Tokens without a slot go past the end, where a scatter drops them.
    block_T = jnp.where(slot_T >= 0, slot_T // tokens + block_offset, problem.num_blocks)
    word_TW = (slot_T % tokens)[:, None] * words + jnp.arange(words)
    heads_K = jnp.arange(problem.num_kv_heads)

    def write(pool, values_TKH, scale_K):
        values = values_TKH.astype(jnp.float32)
        if scale_K is not None:
            values = values / scale_K.astype(jnp.float32)[:, None]
        where = (block_T[:, None, None], heads_K[None, :, None], word_TW[:, None, :])
        return pool.at[where].set(to_words(values, problem.kv_dtype), mode="drop")

    return write(k_pool, k_TKH, k_scale_K), write(v_pool, v_TKH, v_scale_K)
