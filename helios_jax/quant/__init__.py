"""Quantised weights and what multiplies them.

`QuantTensor` is the one stored form of every INT4 and INT8 linear; `ExpandedWeight` is what a CPU
computes with; `matmul` takes either, or a plain array.
"""

from helios_jax.quant.expanded import ExpandedWeight, expand
from helios_jax.quant.matmul import (
    Weight,
    embedding_lookup,
    float32_matmul,
    matmul,
    weight_shape,
)
from helios_jax.quant.tensor import QuantTensor

__all__ = [
    "ExpandedWeight",
    "QuantTensor",
    "Weight",
    "embedding_lookup",
    "expand",
    "float32_matmul",
    "matmul",
    "weight_shape",
]
