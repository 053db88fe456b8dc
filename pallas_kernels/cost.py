"""What an op must move and compute, and how long a device needs for that at least."""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.devices import Device


@dataclass(frozen=True)
class Cost:
    """Bytes an op reads and writes, each counted once, and its multiply-add flops (2 per pair)."""

    bytes_read: int
    bytes_written: int
    flops: int

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    def floor_seconds(self, device: Device) -> float:
        """The larger of memory time and tensor time at the shares a good kernel sustains.

        90% of the data sheet's bandwidth and 70% of its dense rate: 4.3 TB/s and 700 TFLOP/s on an
        H200.
        """
        return max(
            self.bytes_moved / (0.9 * device.bandwidth), self.flops / (0.7 * device.tensor_flops)
        )


def nbytes(array) -> int:
    """Bytes of an array or a ShapeDtypeStruct; 0 for None."""
    if array is None:
        return 0
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
