"""The typed entry to paged attention: checks, takes a backend and a configuration, calls it."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.paged_attention import config as configs
from pallas_kernels.paged_attention import reference, triton
from pallas_kernels.paged_attention.bytes import cost as cost_of
from pallas_kernels.paged_attention.problem import describe


def paged_attention(
    q_TNH: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    block_table_BM: jax.Array,
    context_len_B: jax.Array,
    query_start_B: jax.Array,
    query_len_B: jax.Array,
    *,
    kv_dtype: str,
    max_query_len: int,
    k_scale_K: jax.Array | None = None,
    v_scale_K: jax.Array | None = None,
    block_offset: jax.Array | int = 0,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    tree_mask_BJJ: jax.Array | None = None,
    backend: str | None = None,
    config: triton.Config | None = None,
) -> jax.Array:
    """Causal attention of packed query tokens to the blocks of their rows.

    Row b's queries are tokens query_start_B[b] .. + query_len_B[b] - 1 of q_TNH, and they are the
    last query_len_B[b] of its context_len_B[b] keys, which have been written already (`append_kv`):
    query i stands at position context_len - query_len + i and sees the keys up to its own. Decoding
    has one query a row, verification 1 + num_draft_tokens, a prefill chunk any number.

    Args:
      q_TNH: [T, N, H] bfloat16, float16 or float32, H a multiple of 16.
      k_pool, v_pool: uint16 [L * P, K, 8 * H], see `kv_format`; N a multiple of K.
      block_table_BM: int32 [B, M], block ids within a layer; entries beyond a row's context are not
        read, whatever they hold.
      context_len_B: int32, keys of each row, this call's included; 0 gives zeros.
      query_start_B, query_len_B: int32; a row with query_len 0 takes no part.
      kv_dtype: how the pools' words are read: "fp8_e4m3", "fp8_e5m2", "int8", "bfloat16",
        "float16", or "float32" (the XLA backend only).
      max_query_len: static upper bound of query_len_B.
      k_scale_K, v_scale_K: float32 [K], what stored keys and values are multiplied with; None for
      1.
        Device arrays, so that changing them compiles nothing.
      block_offset: added to block ids: layer * P. A scalar that may be traced.
      softmax_scale: of q k^T; None for 1 / sqrt(H).
      sliding_window: keys a query sees, itself included.
      soft_cap: c, scores become c tanh(score / c).
      tree_mask_BJJ: bool [B, J, J], J <= 32: query i of row b sees the row's new token j only where
        [b, i, j] (and j <= i); older keys it sees as ever. Not with sliding_window.
      backend: see `dispatch`.
      config: the kernel's tiling, for tuning; None looks it up.

    Returns:
      [T, N, H] in q's dtype; tokens of no row are zeros. A key no query of its row may see can hold
      anything where it lies outside the row's context or window; inside it must be finite.

    Raises:
      ValueError: arguments contradict each other.
      NotImplementedError: an explicit backend cannot serve.
    """
    options: dict[str, Any] = dict(
        kv_dtype=kv_dtype, max_query_len=max_query_len, k_scale_K=k_scale_K, v_scale_K=v_scale_K,
        softmax_scale=softmax_scale, sliding_window=sliding_window, soft_cap=soft_cap,
        tree_mask_BJJ=tree_mask_BJJ,
    )  # fmt: skip
    arrays: tuple[Any, ...] = (
        q_TNH, k_pool, v_pool, block_table_BM, context_len_B, query_start_B, query_len_B,
    )  # fmt: skip
    problem = describe(*arrays, **options)
    choice = dispatch.choose("paged_attention", backend, triton.unsupported(problem))
    if 0 in q_TNH.shape or problem.num_rows == 0 or problem.max_blocks == 0:
        return jnp.zeros_like(q_TNH)
    arguments: Any = (*arrays, k_scale_K, v_scale_K, block_offset, tree_mask_BJJ)
    arguments = (*jax.tree.map(jnp.asarray, arguments), problem)
    if choice.backend == "xla":
        return reference.attention(*arguments)
    config = config or configs.config_for(problem, dispatch.target().device)
    return triton.attention(
        *arguments,
        config=config,
        cost=cost_of(*arrays, **options),
        interpret=choice.backend == "interpret",
    )
