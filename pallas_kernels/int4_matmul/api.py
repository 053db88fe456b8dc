"""The typed entry to W4A16: checks, takes a backend and a configuration, calls it."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.int4_matmul import config as configs
from pallas_kernels.int4_matmul import reference, triton
from pallas_kernels.int4_matmul.bytes import cost as cost_of
from pallas_kernels.int4_matmul.problem import describe


def int4_matmul(
    x: jax.Array,
    packed: jax.Array,
    scale: jax.Array,
    *,
    zero: jax.Array | None = None,
    offset: jax.Array | None = None,
    bias: jax.Array | None = None,
    layer: jax.Array | int | None = None,
    bits: int = 4,
    group_size: int,
    span: int = 32,
    implicit_zero: int = 8,
    gate_activation: str | None = None,
    out_dtype=None,
    backend: str | None = None,
    config: triton.Config | None = None,
) -> jax.Array:
    """Multiplies activations with a quantised weight: y[m, n] = sum_k x[m, k] w[n, k].

    w[n, k] = scale[n, g] * (q[n, k] - zero[n, g]), or scale[n, g] * q[n, k] + offset[n, g], with
    g = k // group_size. Products are summed in float32.

    Args:
      x: [..., K] bfloat16, float16 or float32 (float32: the XLA backend only). Where the weight's
        K was padded to a multiple of `span` when packing, x is padded with zeros here.
      packed: codes, uint8 [N, K // 2] (4 bits, see `packing`) or int8 [N, K] (8 bits); with
        `layer`, a stack [L, N, ...], of which nothing but the layer is read.
      scale: [N, K // group_size] (or [L, N, ...]) in bfloat16, float16 or float32.
      zero: integers like scale, the code that stands for 0, in -112..127; or
      offset: floats like scale, the value of code 0; or neither, then `implicit_zero` is the zero
        point of all groups (8 for symmetric 4-bit codes; give 0 for signed 8-bit codes).
      bias: [N] (or [L, N]), added before the gate.
      layer: index into the stacks, a scalar that may be traced.
      bits, group_size, span: how the weight is stored; group_size 32, 64, 128, or -1 for one group
        per output channel.
      gate_activation: "silu", "gelu_tanh" or "gelu": the first N // 2 rows of the weight are a
      gate,
        the others its values, and the result is act(gate) * up, [..., N // 2].
      out_dtype: of the result, x's where None.
      backend: see `dispatch`.
      config: the kernel's tiling, for tuning; None looks it up.

    Returns:
      [..., N], or [..., N // 2] where gated. With no rows, an empty array.

    Raises:
      ValueError: arguments contradict each other.
      NotImplementedError: an explicit backend cannot serve.
    """
    problem = describe(
        x, packed, scale, zero=zero, offset=offset, bias=bias, layer=layer, bits=bits,
        group_size=group_size, span=span, implicit_zero=implicit_zero,
        gate_activation=gate_activation, out_dtype=out_dtype,
    )  # fmt: skip
    shape = (*x.shape[:-1], problem.out_columns)
    slower = None
    if problem.rows > configs.max_kernel_rows(dispatch.target().device):
        slower = "many rows: XLA's matmul on the dequantised weight is expected to be faster"
    choice = dispatch.choose("int4_matmul", backend, triton.unsupported(problem), slower)
    if 0 in shape:
        return jnp.zeros(shape, problem.out_dtype)
    x = x.reshape(problem.rows, x.shape[-1])
    if x.shape[1] < problem.in_features:
        x = jnp.pad(x, ((0, 0), (0, problem.in_features - x.shape[1])))
    arrays = (packed, scale, zero, offset, bias, layer)
    if choice.backend == "xla":
        return reference.matmul(x, *arrays, problem).reshape(shape)
    cost = cost_of(
        x, packed, scale, zero=zero, offset=offset, bias=bias, layer=layer, bits=bits,
        group_size=group_size, span=span, implicit_zero=implicit_zero,
        gate_activation=gate_activation, out_dtype=out_dtype,
    )  # fmt: skip
    config = config or configs.config_for(problem, dispatch.target().device)
    interpret = choice.backend == "interpret"
    return triton.matmul(x, *arrays, problem, config, cost, interpret).reshape(shape)
