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


def _tuned(key: str, name: str) -> Gpu:
    """One that kernels are tuned for."""
    device = DEVICES[key]
    return Gpu(
        name,
        Hardware(device.bandwidth, device.tensor_flops),
        device.memory_bytes,
        f"https://www.nvidia.com/en-us/data-center/{key}/",
    )


GPUS = {
    "a100": _tuned("a100", "A100 80 GB SXM"),
    "l4": _tuned("l4", "L4"),
    "h100": _tuned("h100", "H100 SXM"),
    "h200": _tuned("h200", "H200 SXM"),
    # An eighth of the system's 64 TB/s, 1,440 GB and 36 PFLOPS with sparsity.
    "b200": Gpu(
        "B200",
        Hardware(8.0e12, 2250e12),
        180e9,
        "https://www.nvidia.com/en-us/data-center/dgx-b200/",
    ),
}
