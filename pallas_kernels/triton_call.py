"""How is a kernel launched? By `pallas_call` on the Triton backend, alike on all jax versions.

Three things differ between jax 0.10.2, 0.11.2 and 0.12, and are settled here once:

- The backend a bare `pallas_call` takes (Mosaic in 0.10.2, Triton later): we always pass Triton's
  `CompilerParams`.
- The warning. Since 0.11.0 each lowering says that "The Pallas Triton backend is deprecated"; it
  still ships in 0.12.0.1 and is the only backend of Pallas with index gathers and support from
  sm_80 on, so the warning is silenced below. The way out, when it goes: the kernel bodies are
  written in the subset that maps one to one onto `@triton.jit` functions called by `jax_triton`.
  A test imports the backend, so its removal is noticed.
- `elementwise_inline_asm` with several results does not lower in any of them; we use one result.
"""

import functools
import warnings
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

warnings.filterwarnings(
    "ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning
)

# A gather's offsets are computed in int32 unless the array exceeds 2**32 bytes, so an array of
# one-byte elements between 2**31 and 2**32 elements would wrap to negative addresses.
MAX_ONE_BYTE_ELEMENTS = 2**31 - 1


def triton_call(
    kernel: Callable,
    arguments: Sequence[jax.Array],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape,
    num_warps: int,
    num_stages: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
    bytes_accessed: int = 0,
    flops: int = 0,
):
    """Calls `kernel(*argument_refs, *output_refs)` on whole-array references.

    Args:
      kernel: the body; it slices its references itself, so nothing is copied or padded outside.
      arguments: arrays.
      name: of the kernel in profiles and compiled text.
      grid: number of programs per axis, at most three axes.
      out_shape: a ShapeDtypeStruct or a list of them.
      num_warps, num_stages: 32-thread warps a program, and depth of the load pipeline.
      interpret: run the body with jnp on the default device instead of compiling it.
      aliases: argument index -> output index of arrays updated in place.
      bytes_accessed, flops: XLA's cost estimate of the call.

    Raises:
      NotImplementedError: an operand of one-byte elements is too large for int32 offsets.
    """
    for array in arguments:
        _check_index_width(name, array)
    outputs = out_shape if isinstance(out_shape, list) else [out_shape]
    out_specs = [_whole(output) for output in outputs]
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[_whole(array) for array in arguments],
        out_specs=out_specs if isinstance(out_shape, list) else out_specs[0],
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        cost_estimate=pl.CostEstimate(
            flops=flops, transcendentals=0, bytes_accessed=bytes_accessed
        ),
        interpret=interpret,
        name=name,
    )(*arguments)


def _whole(array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, functools.partial(_origin, len(array.shape)))


def _origin(ndim: int, *_grid_indices):
    return (0,) * ndim


def _check_index_width(name: str, array) -> None:
    if jnp.dtype(array.dtype).itemsize == 1 and array.size > MAX_ONE_BYTE_ELEMENTS:
        raise NotImplementedError(
            f"{name}: an operand of shape {array.shape} and dtype {array.dtype} has {array.size} "
            f"one-byte elements, more than {MAX_ONE_BYTE_ELEMENTS}: int32 offsets would wrap; "
            "split the stack of layers into several arrays"
        )
