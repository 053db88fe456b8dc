"""Attention over a paged KV pool: FP8, INT8 or 16-bit keys and values, decoded in registers."""

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.bytes import cost

__all__ = ["cost", "paged_attention"]
