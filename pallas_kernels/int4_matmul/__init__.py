"""W4A16: activations times INT4 or INT8 weights, dequantised in registers."""

from pallas_kernels.int4_matmul.api import int4_matmul
from pallas_kernels.int4_matmul.bytes import cost

__all__ = ["cost", "int4_matmul"]
