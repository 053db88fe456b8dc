"""Which dense values does a leaf stand for, a few rows at a time?"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from checkpoints_conv.tree import Leaf, LeafSpec
from helios_jax.quant import QuantTensor

_CHUNK_VALUES = 1 << 22


def dense_rows(leaf: Leaf, spec: LeafSpec, chosen: slice | np.ndarray) -> np.ndarray:
    """The chosen rows of the leaf in its source's shape, (out, in) for a linear, as float32."""
    if isinstance(leaf, QuantTensor):
        rows = {
            name: None if array is None else array[chosen]
            for name in ("packed", "scale", "zero", "offset")
            for array in (getattr(leaf, name),)
        }
        return np.asarray(dataclasses.replace(leaf, **rows).dequantize())
    source = leaf.T if spec.kind == "linear" else leaf
    return np.ascontiguousarray(source[chosen]).astype(np.float32)


def row_chunks(spec: LeafSpec) -> Iterator[tuple[int, int]]:
    """(start, stop) of runs of rows that together are all of the leaf's."""
    width = int(np.prod(spec.shape[1:]))
    step = max(_CHUNK_VALUES // width, 1)
    for start in range(0, spec.shape[0], step):
        yield start, min(start + step, spec.shape[0])


def dense_chunks(leaf: Leaf, spec: LeafSpec, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The leaf in its source's shape as runs of rows in `dtype`, rounded once.

    Raises:
      ValueError: a finite value is too large for `dtype` (float16).
    """
    for start, stop in row_chunks(spec):
        rows = dense_rows(leaf, spec, slice(start, stop))
        with np.errstate(over="ignore"):
            rounded = rows.astype(dtype)
        if not np.array_equal(np.isfinite(rows), np.isfinite(rounded.astype(np.float32))):
            raise ValueError(
                f"a value of {np.abs(rows[np.isfinite(rows)]).max()} is too large for "
                f"{np.dtype(dtype).name}; write bfloat16"
            )
        yield rounded


def exact_chunks(leaf: np.ndarray, spec: LeafSpec) -> Iterator[np.ndarray]:
    """A dense leaf in its source's shape and its own dtype."""
    source = leaf.T if spec.kind == "linear" else leaf
    for start, stop in row_chunks(spec):
        yield np.ascontiguousarray(source[start:stop])
