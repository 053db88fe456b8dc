"""What attends to what: the checked, hashable description of one paged_attention call."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.kv_format import WORDS_PER_BLOCK, KVFormat, format_of

Q_DTYPES = ("bfloat16", "float16", "float32")
MAX_TREE_TOKENS = 32


@dataclass(frozen=True)
class Problem:
    """One call, without its values.

    Attributes:
      num_tokens: query tokens, all rows together (T).
      num_heads, num_kv_heads, head_dim: N, K, H.
      num_rows: rows of the block table (B).
      max_blocks: entries of a block table row (M).
      num_blocks: blocks in a pool, all layers together.
      kv_dtype: name of the KV format.
      max_query_len: the most query tokens a row can have in this call.
      sliding_window: keys a query sees, itself included; None for all.
      soft_cap: bound on |score|, or None.
      has_tree: whether a tree mask is given.
      q_dtype: name.
    """

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rows: int
    max_blocks: int
    num_blocks: int
    kv_dtype: str
    max_query_len: int
    sliding_window: int | None
    soft_cap: float | None
    softmax_scale: float
    has_tree: bool
    q_dtype: str

    @property
    def group(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def format(self) -> KVFormat:
        return format_of(self.kv_dtype)

    @property
    def max_context(self) -> int:
        """Keys a row's block table can name."""
        return self.max_blocks * self.format.tokens_per_block


def describe(
    q_TNH, k_pool, v_pool, block_table_BM, context_len_B, query_start_B, query_len_B, *,
    kv_dtype, max_query_len, k_scale_K, v_scale_K, softmax_scale, sliding_window, soft_cap,
    tree_mask_BJJ,
) -> Problem:  # fmt: skip
    """The problem that `paged_attention`'s arguments state; ValueError where they contradict."""
    fmt = format_of(kv_dtype)
    if q_TNH.ndim != 3 or jnp.dtype(q_TNH.dtype).name not in Q_DTYPES:
        raise ValueError(
            f"q_TNH has shape {q_TNH.shape} and dtype {q_TNH.dtype}: must be [T, N, H] in one of "
            f"{Q_DTYPES}"
        )
    num_tokens, num_heads, head_dim = q_TNH.shape
    if head_dim % 16:
        raise ValueError(f"q_TNH.shape[-1]={head_dim}: head_dim must be a multiple of 16")
    check_pools(k_pool, v_pool, head_dim)
    num_kv_heads = k_pool.shape[1]
    if num_heads % num_kv_heads:
        raise ValueError(
            f"q_TNH.shape[1]={num_heads}: must be a multiple of the {num_kv_heads} KV heads"
        )
    num_rows, max_blocks = block_table_BM.shape
    for name, array in (
        ("context_len_B", context_len_B),
        ("query_start_B", query_start_B),
        ("query_len_B", query_len_B),
    ):
        if array.shape != (num_rows,):
            raise ValueError(
                f"{name} has shape {array.shape}: one per block table row needs ({num_rows},)"
            )
    for name, array in (
        ("block_table_BM", block_table_BM),
        ("context_len_B", context_len_B),
        ("query_start_B", query_start_B),
        ("query_len_B", query_len_B),
    ):
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} has dtype {array.dtype}: must be int32")
    check_scales(k_scale_K, v_scale_K, num_kv_heads)
    if not 1 <= max_query_len:
        raise ValueError(f"max_query_len={max_query_len}: must be at least 1")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window={sliding_window}: must be >= 1, or None for full attention"
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap={soft_cap}: must be > 0, or None for no cap")
    if tree_mask_BJJ is not None:
        J = tree_mask_BJJ.shape[-1]
        if tree_mask_BJJ.shape != (num_rows, J, J) or J < max_query_len or J > MAX_TREE_TOKENS:
            raise ValueError(
                f"tree_mask_BJJ has shape {tree_mask_BJJ.shape}: must be ({num_rows}, J, J) with "
                f"max_query_len={max_query_len} <= J <= {MAX_TREE_TOKENS}"
            )
        if sliding_window is not None:
            raise ValueError(
                "tree_mask_BJJ and sliding_window are both given: in a tree a token's place in "
                "the cache is not its position, which the window counts"
            )
    return Problem(
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_rows=num_rows,
        max_blocks=max_blocks,
        num_blocks=k_pool.shape[0],
        kv_dtype=fmt.name,
        max_query_len=min(max_query_len, max(num_tokens, 1)),
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        softmax_scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        has_tree=tree_mask_BJJ is not None,
        q_dtype=jnp.dtype(q_TNH.dtype).name,
    )


def check_pools(k_pool, v_pool, head_dim: int) -> None:
    """ValueError unless both pools are uint16 [blocks, K, 8 * head_dim]."""
    words = WORDS_PER_BLOCK * head_dim
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if pool.ndim != 3 or pool.dtype != jnp.uint16 or pool.shape[2] != words:
            raise ValueError(
                f"{name} has shape {pool.shape} and dtype {pool.dtype}: must be uint16 "
                f"[L * P, K, {words}] for head_dim={head_dim}"
            )
    if k_pool.shape != v_pool.shape:
        raise ValueError(f"k_pool has shape {k_pool.shape} and v_pool {v_pool.shape}: must agree")


def check_scales(k_scale_K, v_scale_K, num_kv_heads: int) -> None:
    """ValueError unless scales are absent or one per KV head."""
    for name, scale in (("k_scale_K", k_scale_K), ("v_scale_K", v_scale_K)):
        if scale is not None and scale.shape != (num_kv_heads,):
            raise ValueError(
                f"{name} has shape {scale.shape}: one per KV head needs ({num_kv_heads},)"
            )
