"""What the GPUs we tune for can do: compute capability, memory, clocks, limits per SM.

Bandwidth and tensor rates are the vendors' data-sheet figures, not measurements; `bench` measures
the bandwidth of the device it runs on.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU model.

    Attributes:
      key: our short name, the stem of `tuned/<key>.json`.
      kind: jax's `device_kind`; entries match by prefix, longest first.
      capability: CUDA compute capability (major, minor).
      num_sms: streaming multiprocessors.
      bandwidth: device memory, bytes per second.
      tensor_flops: dense bf16 with float32 accumulation, per second.
      clock_hz: boost clock.
      l2_bytes: level 2 cache.
      smem_per_sm, smem_per_block: shared memory, bytes.
      threads_per_sm: resident threads.
      memory_bytes: device memory.
      fp32_per_sm: float32 lanes an SM.
    """

    key: str
    kind: str
    capability: tuple[int, int]
    num_sms: int
    bandwidth: float
    tensor_flops: float
    clock_hz: float
    l2_bytes: int
    smem_per_sm: int
    smem_per_block: int
    threads_per_sm: int
    memory_bytes: int
    fp32_per_sm: int

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


# Registers an SM, and blocks resident on one, are the same on all of them.
REGISTERS_PER_SM = 65536
MAX_BLOCKS_PER_SM = {"sm_80": 32, "sm_89": 24, "sm_90": 32}

DEVICES = {
    device.key: device
    for device in (
        Device("a100", "NVIDIA A100", (8, 0), 108, 2.039e12, 312e12, 1.41e9, 41943040,
               167936, 166912, 2048, 85100068864, 64),
        Device("l4", "NVIDIA L4", (8, 9), 58, 0.300e12, 121e12, 2.04e9, 50331648,
               102400, 101376, 1536, 23609475072, 128),
        Device("h100", "NVIDIA H100", (9, 0), 132, 3.352e12, 989e12, 1.98e9, 52428800,
               233472, 232448, 2048, 84942979072, 128),
        Device("h200", "NVIDIA H200", (9, 0), 132, 4.800e12, 989e12, 1.98e9, 52428800,
               233472, 232448, 2048, 151397597184, 128),
    )
}  # fmt: skip


def device_of_kind(kind: str, capability: tuple[int, int]) -> Device:
    """The entry for jax's `device_kind`, or the nearest of the same or a lower capability.

    A GPU we have no entry for is described by its closest relative (tuning is then a guess, never
    wrong results): kernels depend on `capability` for which instructions exist, on the rest for
    speed only.
    """
    for device in sorted(DEVICES.values(), key=lambda d: -len(d.kind)):
        if kind.startswith(device.kind):
            return device
    relatives = [d for d in DEVICES.values() if d.capability <= capability]
    return max(relatives or [DEVICES["a100"]], key=lambda d: (d.capability, -d.bandwidth))


def target_config(device: Device) -> str:
    """XLA's GpuTargetConfigProto (text) for compiling for `device` where there is none."""
    major, minor = device.capability
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {device.smem_per_sm}
  threads_per_core_limit: {device.threads_per_sm}
  core_count: {device.num_sms}
  fpus_per_core: {device.fp32_per_sm}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {int(device.bandwidth)}
  l2_cache_size: {device.l2_bytes}
  clock_rate_ghz: {device.clock_hz / 1e9}
  device_memory_size: {device.memory_bytes}
  shared_memory_per_block_optin: {device.smem_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: {REGISTERS_PER_SM}
  registers_per_block_limit: {REGISTERS_PER_SM}
  name: "{device.kind}"
  runtime_version: "12.9.0"
  driver_version: "13.0.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{device.kind}"
"""
