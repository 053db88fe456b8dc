"""The typed entry to writing keys and values: checks, takes a backend, calls it."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.append_kv import reference, triton
from pallas_kernels.append_kv.bytes import cost as cost_of
from pallas_kernels.append_kv.problem import describe


def append_kv(
    k_pool: jax.Array,
    v_pool: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    slot_T: jax.Array,
    *,
    kv_dtype: str,
    k_scale_K: jax.Array | None = None,
    v_scale_K: jax.Array | None = None,
    block_offset: jax.Array | int = 0,
    backend: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Quantises new keys and values and writes them into the pools, in place.

    Stored is value / scale, rounded to nearest even and saturated at the format's largest number;
    NaN is stored as NaN. Donate the pools (or carry them in a loop) and use the returned ones: then
    nothing is copied.

    Args:
      k_pool, v_pool: uint16 [L * P, K, 8 * H], see `kv_format`.
      k_TKH, v_TKH: new keys and values in bfloat16, float16 or float32.
      slot_T: int32, block id within a layer * tokens per block + place in the block; -1 writes
        nothing. No slot twice.
      kv_dtype: as in `paged_attention`; "float32" with the XLA backend only.
      k_scale_K, v_scale_K: float32 [K], None for 1.
      block_offset: added to block ids: layer * P. A scalar that may be traced.
      backend: see `dispatch`.

    Returns:
      (k_pool, v_pool) with the tokens written.

    Raises:
      ValueError: arguments contradict each other.
      NotImplementedError: an explicit backend cannot serve.
    """
    options: dict[str, Any] = dict(kv_dtype=kv_dtype, k_scale_K=k_scale_K, v_scale_K=v_scale_K)
    arrays: tuple[Any, ...] = (k_pool, v_pool, k_TKH, v_TKH, slot_T)
    problem = describe(*arrays, **options)
    choice = dispatch.choose("append_kv", backend, triton.unsupported(problem))
    if problem.num_tokens == 0:
        return jnp.asarray(k_pool), jnp.asarray(v_pool)
    arguments: Any = (
        *jax.tree.map(jnp.asarray, (*arrays, k_scale_K, v_scale_K, block_offset)),
        problem,
    )
    if choice.backend == "xla":
        return reference.append(*arguments)
    cost = cost_of(*arrays, **options)
    return triton.append(*arguments, cost=cost, interpret=choice.backend == "interpret")
