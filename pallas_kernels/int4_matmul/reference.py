"""int4_matmul in plain jnp: what every backend must compute, and the path XLA serves.

The weight is dequantised in float32, rounded once to the dtype of x, and multiplied with float32
accumulation: one elementwise fusion and one library matmul. Above a tuned number of rows it is also
the fastest path on a GPU. On a CPU an engine should expand the weight once at load instead (`cpu`).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import packing
from pallas_kernels.int4_matmul.problem import Problem


def matmul(x, packed, scale, zero, offset, bias, layer, problem: Problem):
    """x [M, K] times the dequantised weight; see `api.int4_matmul` for the arguments.

    Returns [M, N], or [M, N // 2] where gated.
    """
    if layer is not None:
        packed, scale, zero, offset, bias = (
            None if array is None else lax.dynamic_index_in_dim(array, layer, keepdims=False)
            for array in (packed, scale, zero, offset, bias)
        )
    weight_NK = dequantize(packed, scale, zero, offset, problem).astype(x.dtype)
    y_MN = lax.dot_general(
        x,
        weight_NK,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    if bias is not None:
        y_MN = y_MN + bias.astype(jnp.float32)
    return finish(y_MN, problem)


def dequantize(packed, scale, zero, offset, problem: Problem) -> jax.Array:
    """The weight in float32, [N, K]."""
    codes = packing.unpack_int4(packed, problem.span) if problem.bits == 4 else packed
    grouped = codes.astype(jnp.float32).reshape(*scale.shape, problem.group_size)
    scale = scale.astype(jnp.float32)[..., None]
    if offset is not None:
        weights = scale * grouped + offset.astype(jnp.float32)[..., None]
    elif zero is not None:
        weights = scale * (grouped - zero.astype(jnp.float32)[..., None])
    else:
        weights = scale * (grouped - jnp.float32(problem.implicit_zero))
    return weights.reshape(codes.shape)


def finish(y_MN: jax.Array, problem: Problem) -> jax.Array:
    """The gate and the cast, on float32 sums with the bias added."""
    if problem.activation is not None:
        gate, up = jnp.split(y_MN, 2, axis=-1)
        y_MN = activate(gate, problem.activation) * up
    return y_MN.astype(problem.out_dtype)


def activate(gate: jax.Array, activation: str) -> jax.Array:
    if activation == "silu":
        return gate * jax.nn.sigmoid(gate)
    return jax.nn.gelu(gate, approximate=activation == "gelu_tanh")
