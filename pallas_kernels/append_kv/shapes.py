"""The cases that tests and compile checks of append_kv share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.kv_format import pool_shape


@dataclass(frozen=True)
class Case:
    """T tokens of K heads of H dimensions, into a pool of `num_blocks` blocks."""

    T: int
    K: int
    H: int
    kv_dtype: str
    dtype: str = "bfloat16"
    num_blocks: int = 4


EDGES = (
    Case(1, 1, 16, "fp8_e4m3"),
    Case(7, 3, 64, "fp8_e4m3"),
    Case(5, 2, 80, "fp8_e5m2"),
    Case(33, 2, 96, "int8"),
    Case(6, 2, 128, "fp8_e4m3", "float32"),
    Case(5, 1, 256, "fp8_e4m3", "float16"),
    Case(9, 2, 64, "bfloat16"),
    Case(9, 2, 96, "float16", "float16"),
    Case(9, 2, 64, "float16", "float32"),
)


def abstract_arguments(case: Case, sharding=None) -> tuple[tuple, dict]:
    """ShapeDtypeStructs of `append_kv`'s (positional, keyword) arguments."""

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    pool = struct(pool_shape(case.num_blocks, case.K, case.H), "uint16")
    values = struct((case.T, case.K, case.H), case.dtype)
    scale = struct((case.K,), "float32")
    return (pool, pool, values, values, struct((case.T,), "int32")), dict(
        kv_dtype=case.kv_dtype, k_scale_K=scale, v_scale_K=scale
    )
