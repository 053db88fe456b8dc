"""How is a program compiled for a GPU that is not there?

In a process started with `environment`, lower under `jax.default_device(topology(...).devices[0])`
and `dispatch.compile_for`, from structs placed on that device, and compile.
"""

from pathlib import Path
from typing import Any

from pallas_kernels.devices import Device, target_config


def environment(dump: Path | None = None) -> dict[str, str]:
    """Variables that must be set before jax is imported.

    Elsewhere the compiler's plugin would ask for a driver. With `dump`, kernels' PTX and the list
    of launches are written there.
    """
    variables = {"JAX_PLATFORMS": "cpu"}
    if dump is not None:
        variables["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_emitter_re=^ptx$"
    return variables


def topology(device: Device, num_devices: int = 1) -> Any:
    """So many GPUs of that model, as jax's topology; its `devices` can be compiled for."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"1x1x{num_devices}",
        target_config=target_config(device),
    )
