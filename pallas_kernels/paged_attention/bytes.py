"""What a paged_attention call must move and compute: bytes read, bytes written, flops."""

import numpy as np

from pallas_kernels.cost import Cost, nbytes
from pallas_kernels.paged_attention.problem import describe


def cost(
    q_TNH, k_pool, v_pool, block_table_BM, context_len_B, query_start_B, query_len_B, *,
    kv_dtype, max_query_len, k_scale_K=None, v_scale_K=None, block_offset=0, softmax_scale=None,
    sliding_window=None, soft_cap=None, tree_mask_BJJ=None,
) -> Cost:  # fmt: skip
    """The floor of a call with these arguments, each byte moved once.

    Where lengths are known (numpy or concrete arrays), keys and values count up to the context each
    row's queries see, whole tokens; where they are not (ShapeDtypeStructs, tracers) every row
    counts as full. Flops are those of the scores and of the weighted sum, causality included.
    """
    problem = describe(
        q_TNH, k_pool, v_pool, block_table_BM, context_len_B, query_start_B, query_len_B,
        kv_dtype=kv_dtype, max_query_len=max_query_len, k_scale_K=k_scale_K,
        v_scale_K=v_scale_K, softmax_scale=softmax_scale, sliding_window=sliding_window,
        soft_cap=soft_cap, tree_mask_BJJ=tree_mask_BJJ,
    )  # fmt: skip
    context, queries = _lengths(context_len_B, query_len_B, problem)
    window = problem.sliding_window or np.inf
    first = context - queries  # position of the first query
    held = np.where(queries > 0, context - np.maximum(first - (window - 1), 0), 0)
    bytes_per_token = 2 * problem.num_kv_heads * problem.head_dim * problem.format.bits // 8
    # Query i of a row sees min(first + i + 1, window) keys.
    pairs = 0
    for f, n in zip(first, queries, strict=True):
        pairs += int(np.minimum(f + 1 + np.arange(int(n)), window).sum())
    small = (block_table_BM, context_len_B, query_start_B, query_len_B, k_scale_K, v_scale_K)
    out = nbytes(q_TNH)
    return Cost(
        bytes_read=int(held.sum()) * bytes_per_token
        + nbytes(q_TNH)
        + sum(nbytes(array) for array in (*small, tree_mask_BJJ)),
        bytes_written=out,
        flops=4 * problem.num_heads * problem.head_dim * pairs,
    )


def _lengths(context_len_B, query_len_B, problem):
    try:
        return (
            np.asarray(context_len_B, dtype=np.int64),
            np.asarray(query_len_B, dtype=np.int64),
        )
    except Exception:  # abstract: a struct or a tracer has no values
        full = np.full(problem.num_rows, problem.max_context, np.int64)
        return full, np.full(problem.num_rows, problem.max_query_len, np.int64)
