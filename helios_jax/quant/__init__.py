"""Quantised weights: `QuantTensor`, the one stored form of every INT4 and INT8 linear."""

from helios_jax.quant.tensor import QuantTensor

__all__ = ["QuantTensor"]
