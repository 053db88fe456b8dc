"""append_kv in plain jnp: a scatter, in place where the pools are donated or carried."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.append_kv.problem import Problem
from pallas_kernels.kv_format import to_words

# Of a pool [P, K, 8 * H] at (block, word).
_WINDOWS = lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 2)
)


def append(k_pool, v_pool, k_TKH, v_TKH, slot_T, k_scale_K, v_scale_K, block_offset,
           problem: Problem):  # fmt: skip
    """See `api.append_kv`. Returns the two pools."""
    if problem.num_tokens == 1:
        # XLA:CPU turns a scatter of one window into a slice update, and copies the pools for it in
        # a loop that also reads them. So there are two, the second without a slot.
        slot_T = jnp.concatenate([slot_T, jnp.full_like(slot_T, -1)])
        k_TKH, v_TKH = jnp.repeat(k_TKH, 2, axis=0), jnp.repeat(v_TKH, 2, axis=0)
    tokens = problem.format.tokens_per_block
    # Tokens without a slot go past the end, where a scatter drops them.
    block_T = jnp.where(slot_T >= 0, slot_T // tokens + block_offset, problem.num_blocks)
    place_T = slot_T % tokens

    def write(pool, values_TKH, scale_K):
        values = values_TKH.astype(jnp.float32)
        if scale_K is not None:
            values = values / scale_K.astype(jnp.float32)[:, None]
        words_TKW = to_words(values, problem.kv_dtype)
        # One window [K, W] a token: XLA:CPU takes a turn of a loop for each window of a scatter. In
        # the pool's own shape: XLA copies the pool to see it in another.
        start_T2 = jnp.stack([block_T, place_T * words_TKW.shape[-1]], axis=1)
        return lax.scatter(pool, start_T2, words_TKW, _WINDOWS, mode="drop")

    return write(k_pool, k_TKH, k_scale_K), write(v_pool, v_TKH, v_scale_K)
