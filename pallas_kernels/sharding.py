"""How do the kernels run on several devices? Behind `shard_map`: output columns, KV heads.

GSPMD does not partition a Pallas call: left to it, every device would gather the whole weight or
pool. Each helper splits one axis of the operands it is documented to split and calls the op on the
local part; none of them communicates.
"""

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.append_kv import append_kv
from pallas_kernels.int4_matmul import int4_matmul
from pallas_kernels.paged_attention import paged_attention


def sharded_int4_matmul(mesh: Mesh, axis: str, x, packed, scale, **options) -> jax.Array:
    """`int4_matmul` with the weight's output channels split over mesh axis `axis`.

    Args:
      x: replicated.
      packed, scale (and zero, offset, bias in options): split along N, the axis before the last
        (bias: the last). A gated weight is given with its halves apart, `[..., 2, N // 2, K]` codes
        and so on, and split along N // 2, so that a device has the gate rows of its up rows.
      options: as of `int4_matmul`.

    Returns:
      [..., N] (or [..., N // 2] gated), split along its last axis.
    """
    gated = options.get("gate_activation") is not None
    stacked = options.get("layer") is not None
    matrix = P(*[None] * (stacked + gated), axis, None)
    vector = P(*[None] * (stacked + gated), axis)
    specs = dict(zero=matrix, offset=matrix, bias=vector, layer=P())
    named = {k: options.pop(k) for k in specs if options.get(k) is not None}

    def join(array, trailing: int):
        """Gate and up rows of this device, one after the other again: a free reshape."""
        if not gated:
            return array
        at = array.ndim - trailing - 2
        return array.reshape(*array.shape[:at], -1, *array.shape[at + 2 :])

    def local(x, packed, scale, named):
        trailing = dict(zero=1, offset=1, bias=0)
        joined = {k: join(v, trailing[k]) if k in trailing else v for k, v in named.items()}
        return int4_matmul(x, join(packed, 1), join(scale, 1), **joined, **options)

    replicated = P(*[None] * x.ndim)
    return _shard_map(
        local,
        mesh,
        (replicated, matrix, matrix, {k: specs[k] for k in named}),
        P(*[None] * (x.ndim - 1), axis),
    )(x, packed, scale, named)


def sharded_paged_attention(
    mesh: Mesh, axis: str, q_TNH, k_pool, v_pool, block_table_BM, context_len_B, query_start_B,
    query_len_B, **options,
) -> jax.Array:  # fmt: skip
    """`paged_attention` with KV heads, and the query heads that read them, split over `axis`.

    q_TNH, the pools, k_scale_K and v_scale_K are split along their head axes, the rest is
    replicated; the result is split like q_TNH.
    """
    specs = dict(k_scale_K=P(axis), v_scale_K=P(axis), block_offset=P(), tree_mask_BJJ=P())
    named = {k: options.pop(k) for k in specs if options.get(k) is not None}
    heads = P(None, axis, None)

    def local(*arrays_and_named):
        *arrays, named = arrays_and_named
        return paged_attention(*arrays, **named, **options)

    return _shard_map(
        local,
        mesh,
        (heads, heads, heads, P(), P(), P(), P(), {k: specs[k] for k in named}),
        heads,
    )(
        q_TNH, k_pool, v_pool, block_table_BM, context_len_B, query_start_B, query_len_B, named
    )  # fmt: skip


def sharded_append_kv(
    mesh: Mesh, axis: str, k_pool, v_pool, k_TKH, v_TKH, slot_T, **options
) -> tuple[jax.Array, jax.Array]:
    """`append_kv` with KV heads split over `axis`: pools, new keys and values, and scales."""
    specs = dict(k_scale_K=P(axis), v_scale_K=P(axis), block_offset=P())
    named = {k: options.pop(k) for k in specs if options.get(k) is not None}
    heads = P(None, axis, None)

    def local(*arrays_and_named):
        *arrays, named = arrays_and_named
        return append_kv(*arrays, **named, **options)

    return _shard_map(
        local,
        mesh,
        (heads, heads, heads, heads, P(), {k: specs[k] for k in named}),
        (heads, heads),
    )(k_pool, v_pool, k_TKH, v_TKH, slot_T, named)


def _shard_map(function, mesh: Mesh, in_specs, out_specs):
    # A Pallas call states no varying axes, so the check of them must be off.
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
