"""What an append_kv call must move and compute: bytes read, bytes written, flops."""

from pallas_kernels.append_kv.problem import describe
from pallas_kernels.cost import Cost, nbytes


def cost(
    k_pool, v_pool, k_TKH, v_TKH, slot_T, *, kv_dtype, k_scale_K=None, v_scale_K=None,
    block_offset=0,
) -> Cost:  # fmt: skip
    """The floor of a call with these arguments, every token counted as written."""
    problem = describe(
        k_pool, v_pool, k_TKH, v_TKH, slot_T, kv_dtype=kv_dtype, k_scale_K=k_scale_K,
        v_scale_K=v_scale_K,
    )  # fmt: skip
    values = 2 * problem.num_tokens * problem.num_kv_heads * problem.head_dim
    return Cost(
        bytes_read=sum(nbytes(a) for a in (k_TKH, v_TKH, slot_T, k_scale_K, v_scale_K)),
        bytes_written=values * problem.format.bits // 8,
        flops=values if k_scale_K is not None else 0,
    )
