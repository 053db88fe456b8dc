"""What do data sheets promise of GPUs, and where do they say so?

Not measurements: what is reached in practice is less, see `replay.machine`'s efficiency.
"""

from dataclasses import dataclass

from helios_jax.profiler.bytes import Hardware
from pallas_kernels.devices import DEVICES


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet.

    Attributes:
      name: for people.
      hardware: bandwidth of its memory, and dense bfloat16 flops.
      memory_bytes: capacity, as the driver reports it where we know that.
      source: the vendor's page.
    """

    name: str
    hardware: Hardware
    memory_bytes: float
    source: str


GPUS = {
    "a100": Gpu(
        "A100 80 GB SXM", Hardware(2.039e12, 312e12), DEVICES["a100"].memory_bytes,
        "https://www.nvidia.com/en-us/data-center/a100/",
    ),
    "l4": Gpu(
        "L4", Hardware(0.300e12, 121e12), DEVICES["l4"].memory_bytes, "https://www.nvidia.com/en-us/data-center/l4/"
    ),
    "h100": Gpu(
        "H100 SXM", Hardware(3.35e12, 989e12), DEVICES["h100"].memory_bytes,
        "https://www.nvidia.com/en-us/data-center/h100/",
    ),
    "h200": Gpu(
        "H200 SXM", Hardware(4.8e12, 989e12), DEVICES["h200"].memory_bytes,
        "https://www.nvidia.com/en-us/data-center/h200/",
    ),
    # An eighth of the system's 64 TB/s, 1,440 GB and 36 PFLOPS with sparsity.
    "b200": Gpu(
        "B200", Hardware(8.0e12, 2250e12), 180e9,
        "https://www.nvidia.com/en-us/data-center/dgx-b200/",
    ),
}  # fmt: skip
