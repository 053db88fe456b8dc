"""What an int4_matmul call must move and compute: bytes read, bytes written, flops."""

import jax.numpy as jnp

from pallas_kernels.cost import Cost, nbytes
from pallas_kernels.int4_matmul.problem import describe


def cost(
    x, packed, scale, *, zero=None, offset=None, bias=None, layer=None, bits=4, group_size,
    span=32, implicit_zero=8, gate_activation=None, out_dtype=None,
) -> Cost:  # fmt: skip
    """The floor of a call with these arguments (arrays or ShapeDtypeStructs), each byte moved once.

    Of a stack `[L, ...]` one layer is read. Partial sums of a split-K run and the expanded weight
    of the dequantise path are not in it: they are what an implementation adds to the floor.
    """
    problem = describe(
        x, packed, scale, zero=zero, offset=offset, bias=bias, layer=layer, bits=bits,
        group_size=group_size, span=span, implicit_zero=implicit_zero,
        gate_activation=gate_activation, out_dtype=out_dtype,
    )  # fmt: skip
    weight = sum(nbytes(array) for array in (packed, scale, zero, offset, bias))
    out_bytes = problem.rows * problem.out_columns * jnp.dtype(problem.out_dtype).itemsize
    return Cost(
        bytes_read=nbytes(x) + weight // (problem.num_layers or 1),
        bytes_written=out_bytes,
        flops=2 * problem.rows * problem.out_features * problem.in_features,
    )
