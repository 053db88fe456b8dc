"""Quantised weights and what multiplies them.

`QuantTensor` is the one stored form of every INT3, INT4, INT8 and FP8 linear; `ExpandedWeight` is
what a CPU computes with; `matmul` takes either, or a plain array.
"""

from helios_jax.quant.expanded import ExpandedWeight, expand
from helios_jax.quant.matmul import (
    Weight,
    embedding_lookup,
    float32_matmul,
    matmul,
    weight_shape,
)
from helios_jax.quant.tensor import FLOAT8, QuantTensor, join_outputs

__all__ = [
    "FLOAT8",
    "ExpandedWeight",
    "QuantTensor",
    "Weight",
    "embedding_lookup",
    "expand",
    "float32_matmul",
    "join_outputs",
    "matmul",
    "weight_shape",
]
