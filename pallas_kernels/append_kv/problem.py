"""What is written where: the checked, hashable description of one append_kv call."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.kv_format import KVFormat, format_of
from pallas_kernels.paged_attention.problem import check_pools, check_scales

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Problem:
    """One call, without its values: T tokens of K heads of H, into pools of `num_blocks`."""

    num_tokens: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    kv_dtype: str
    dtype: str

    @property
    def format(self) -> KVFormat:
        return format_of(self.kv_dtype)


def describe(k_pool, v_pool, k_TKH, v_TKH, slot_T, *, kv_dtype, k_scale_K, v_scale_K) -> Problem:
    """The problem that `append_kv`'s arguments state; ValueError where they contradict."""
    format_of(kv_dtype)
    if k_TKH.ndim != 3 or jnp.dtype(k_TKH.dtype).name not in DTYPES:
        raise ValueError(
            f"k_TKH has shape {k_TKH.shape} and dtype {k_TKH.dtype}: must be [T, K, H] in one of "
            f"{DTYPES}"
        )
    if v_TKH.shape != k_TKH.shape or v_TKH.dtype != k_TKH.dtype:
        raise ValueError(
            f"v_TKH has shape {v_TKH.shape} and dtype {v_TKH.dtype}: must be those of k_TKH, "
            f"{k_TKH.shape} and {k_TKH.dtype}"
        )
    num_tokens, num_kv_heads, head_dim = k_TKH.shape
    if head_dim % 16:
        raise ValueError(f"k_TKH.shape[-1]={head_dim}: head_dim must be a multiple of 16")
    check_pools(k_pool, v_pool, head_dim)
    if k_pool.shape[1] != num_kv_heads:
        raise ValueError(f"k_TKH has {num_kv_heads} KV heads and k_pool {k_pool.shape[1]}")
    if slot_T.shape != (num_tokens,) or slot_T.dtype != jnp.int32:
        raise ValueError(
            f"slot_T has shape {slot_T.shape} and dtype {slot_T.dtype}: must be int32 "
            f"({num_tokens},), one per token"
        )
    check_scales(k_scale_K, v_scale_K, num_kv_heads)
    return Problem(
        num_tokens, num_kv_heads, head_dim, k_pool.shape[0], kv_dtype, jnp.dtype(k_TKH.dtype).name
    )
