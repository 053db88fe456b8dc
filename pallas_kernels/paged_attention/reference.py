"""paged_attention in plain jnp: what every backend must compute, and the path a CPU serves.

Few queries a row (decode, verify): all rows at once, after gathering each row's blocks. Many
(prefill): tiles of queries one after the other, so that work follows the tokens there are and
scores never exist for a whole prompt.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_format import from_words
from pallas_kernels.paged_attention.problem import Problem

# Queries a tile of the prefill path holds, and the most for which rows are taken all at once.
QUERY_TILE = 64
FEW_QUERIES = 16


def attention(
    q_TNH, k_pool, v_pool, block_table_BM, context_len_B, query_start_B, query_len_B,
    k_scale_K, v_scale_K, block_offset, tree_mask_BJJ, problem: Problem,
):  # fmt: skip
    """See `api.paged_attention`. Returns [T, N, H]; tokens of no row are zeros."""

    def attend(first_query, num_queries, start, queries_len, context_len, table_M, tree_JJ):
        """One row's queries first_query .. + num_queries -> (outputs [Q, N, H], tokens [Q])."""
        index = first_query + jnp.arange(num_queries)
        token = jnp.where(index < queries_len, start + index, problem.num_tokens)
        q = q_TNH.at[token].get(mode="fill", fill_value=0)
        position = jnp.where(index < queries_len, context_len - queries_len + index, -1)
        keys, values, visible = _row(table_M, context_len, position, queries_len, tree_JJ, index)
        return _softmax(q, keys, values, visible, problem), token

    def _row(table_M, context_len, position, queries_len, tree_JJ, index):
        slots = problem.max_context
        s = jnp.arange(slots)
        written = s < context_len
        in_use = jnp.arange(problem.max_blocks) * problem.format.tokens_per_block < context_len
        blocks = jnp.where(in_use, table_M + block_offset, 0)
        keys = _gather(k_pool, blocks, problem, k_scale_K)
        values = jnp.where(written[None, :, None], _gather(v_pool, blocks, problem, v_scale_K), 0)
        visible = (s[None] <= position[:, None]) & written[None]
        if problem.sliding_window is not None:
            visible &= s[None] > position[:, None] - problem.sliding_window
        if tree_JJ is not None:
            J = tree_JJ.shape[-1]
            new = s - (context_len - queries_len)
            ancestors = tree_JJ[jnp.clip(index, 0, J - 1)][:, jnp.clip(new, 0, J - 1)]
            visible &= (new < 0)[None] | ancestors
        return keys, values, visible

    def write(out, outputs, tokens):
        return out.at[tokens].set(outputs, mode="drop")

    B = problem.num_rows
    out = jnp.zeros_like(q_TNH)
    if problem.max_query_len <= FEW_QUERIES:
        outputs, tokens = jax.vmap(
            lambda *row: attend(0, problem.max_query_len, *row),
            in_axes=(0, 0, 0, 0, None if tree_mask_BJJ is None else 0),
        )(query_start_B, query_len_B, context_len_B, block_table_BM, tree_mask_BJJ)
        return write(out, outputs.reshape(-1, *q_TNH.shape[1:]), tokens.reshape(-1))
    tiles_B = -(-query_len_B // QUERY_TILE)
    end_B = jnp.cumsum(tiles_B)

    # As many turns as there are tiles; a `cond` for those that are not would have the pools copied.
    def tile(t, out):
        b = jnp.searchsorted(end_B, t, side="right")
        first = (t - (end_B[b] - tiles_B[b])) * QUERY_TILE
        tree = None if tree_mask_BJJ is None else tree_mask_BJJ[b]
        row = (query_start_B[b], query_len_B[b], context_len_B[b], block_table_BM[b], tree)
        return write(out, *attend(first, QUERY_TILE, *row))

    return lax.fori_loop(0, end_B[B - 1], tile, out)


def _gather(pool, blocks_M, problem: Problem, scale_K):
    """The row's keys or values, [K, S, H]: float32, or the stored dtype where 16 bits unscaled."""
    fmt = problem.format
    words = pool[blocks_M].reshape(
        blocks_M.shape[0], problem.num_kv_heads, fmt.tokens_per_block, -1
    )
    words = jnp.moveaxis(words, 1, 0).reshape(
        problem.num_kv_heads, problem.max_context, words.shape[-1]
    )
    values = from_words(words, problem.kv_dtype)
    if scale_K is not None:
        values = values.astype(jnp.float32) * scale_K.astype(jnp.float32)[:, None, None]
    return values


def _softmax(q_QNH, keys_KSH, values_KSH, visible_QS, problem: Problem):
    """softmax(q k^T) v over the visible keys, [Q, N, H]; a query that sees none gets zeros."""
    Q, K, G, H = q_QNH.shape[0], problem.num_kv_heads, problem.group, problem.head_dim
    # One axis of queries (heads and tokens): with two, XLA:CPU refuses some bfloat16 products.
    q_KQH = jnp.moveaxis(q_QNH.reshape(Q, K, G, H), 1, 0).reshape(K, Q * G, H)
    # bfloat16 against bfloat16 is the fast product on a CPU; everything else is float32.
    native = q_KQH.dtype == keys_KSH.dtype == values_KSH.dtype == jnp.bfloat16
    dtype = jnp.bfloat16 if native else jnp.float32
    precision = None if native else lax.Precision.HIGHEST
    visible = jnp.repeat(visible_QS, G, axis=0)
    scores = jnp.einsum(
        "kqh,ksh->kqs", q_KQH.astype(dtype), keys_KSH.astype(dtype),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    scores = scores * problem.softmax_scale
    if problem.soft_cap is not None:
        scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0))
    weights = jnp.where(visible, weights, 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum(
        "kqs,ksh->kqh", weights.astype(dtype), values_KSH.astype(dtype),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    # A NaN stays one: whoever draws from it must notice.
    out = jnp.where(total == 0, 0, out / jnp.where(total == 0, 1, total))
    out = jnp.moveaxis(out.reshape(K, Q, G, H), 0, 1)
    return out.reshape(q_QNH.shape).astype(q_QNH.dtype)
