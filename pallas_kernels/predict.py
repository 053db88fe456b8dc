"""How long will a compiled kernel take, judged from its code alone? Predicted, not measured.

Five limits are put side by side and the largest is taken, plus the launches:

    memory   bytes moved at 80% of the data sheet's bandwidth, less where too few are in flight: an
             SM needs bandwidth / SMs x 800 ns of them (Little's law; 29 KB on an H200)
    chain    a warp issues an instruction every two clocks at most, so few warps an SM are slow
    issue    instructions of the main loop at 0.65 of the four a clock an SM can issue
    tensor   matrix instructions: flops at 50% of the dense rate (mma.sync reaches about 60% of what
             the warpgroup instruction does on Hopper, and padding rows count)
    waves    all of it stretched by the last, partly filled wave of programs

    launch   2 us for the first kernel of a call inside one executable, 1.5 us for a dependent one

The constants are from published measurements of other kernels (none of these has run on a GPU yet);
`bench` prints measured times beside these.
"""

import math
from dataclasses import dataclass

from pallas_kernels.cost import Cost
from pallas_kernels.devices import MAX_BLOCKS_PER_SM, REGISTERS_PER_SM, Device

BANDWIDTH_EFFICIENCY = 0.8
LATENCY_SECONDS = 800e-9
ISSUE_EFFICIENCY = 0.65
TENSOR_EFFICIENCY = 0.5
FIRST_LAUNCH_SECONDS = 2.0e-6
NEXT_LAUNCH_SECONDS = 1.5e-6


@dataclass(frozen=True)
class Occupancy:
    """What fits on an SM: blocks, warps, and bytes of the streamed operand in flight."""

    blocks: int
    warps: int
    bytes_in_flight: int


def occupancy(
    device: Device, registers: int, shared_bytes: int, threads: int, grid: int, stage_bytes: int,
    num_stages: int,
) -> Occupancy:  # fmt: skip
    """Resident blocks an SM for a kernel, given what the assembler and XLA report.

    `stage_bytes` is what one block loads of the weight or the KV pool per loop iteration, with
    num_stages - 1 iterations under way. A grid too small for all SMs has fewer blocks resident.
    """
    warps = threads // 32
    # Registers are handed out in units of 256 a warp; every block reserves 1 KB of shared memory.
    per_warp = math.ceil(registers * 32 / 256) * 256
    limits = (
        REGISTERS_PER_SM // (per_warp * warps),
        device.smem_per_sm // (shared_bytes + 1024),
        device.threads_per_sm // threads,
        MAX_BLOCKS_PER_SM[device.arch],
        max(1, math.ceil(grid / device.num_sms)),
    )
    blocks = max(1, min(limits))
    return Occupancy(blocks, blocks * warps, blocks * stage_bytes * max(1, num_stages - 1))


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of a call, and what most of them go to.

    `limit` is "memory", "chain", "issue" or "tensor" (see the module), or "launch" where starting
    the kernels takes longer than running them.
    """

    seconds: float
    limit: str


def prediction(
    device: Device, cost: Cost, occ: Occupancy, *, grid: int, instructions: float,
    tensor_flops: float, num_kernels: int, extra_bytes: int,
) -> Prediction:  # fmt: skip
    """How long a call takes.

    Args:
      cost: the op's own bytes; extra_bytes: partial sums, written and read once more.
      grid: programs of the main kernel.
      instructions: warp instructions of its main loop, all programs together.
      tensor_flops: what its tensor cores execute, padding included.
      num_kernels: launches of the call.
    """
    sms = min(device.num_sms, grid)
    needed = device.bandwidth / device.num_sms * LATENCY_SECONDS
    in_flight = min(1.0, occ.bytes_in_flight / needed) * sms / device.num_sms
    limits = {
        "memory": (cost.bytes_moved + extra_bytes)
        / (BANDWIDTH_EFFICIENCY * device.bandwidth * in_flight),
        "chain": 2 * instructions / (occ.warps * sms * device.clock_hz),
        "issue": instructions / (sms * 4 * ISSUE_EFFICIENCY * device.clock_hz),
        "tensor": tensor_flops / (TENSOR_EFFICIENCY * device.tensor_flops * sms / device.num_sms),
    }
    limit = max(limits, key=lambda name: limits[name])
    full = grid / (occ.blocks * device.num_sms)
    running = limits[limit] * (math.ceil(full) / full if full > 1 else 1.0)
    launches = FIRST_LAUNCH_SECONDS + (num_kernels - 1) * NEXT_LAUNCH_SECONDS
    return Prediction(launches + running, limit if running > launches else "launch")


# Bars set beforehand: the longest 64 rows may take, in times of 16; how much faster FP8 KV must be
# than 16-bit KV where the batch is large and contexts are long.
MANY_ROWS_BAR = 1.6
FP8_BAR = 1.5

# Targets on an H200 in microseconds, set before anything was written, from fits to other engines'
# published times. int4_matmul: (N, K) at up to 16 rows, 4 bits, groups of 128.
INT4_TARGETS = {
    (4096, 4096): 9,
    (6144, 4096): 11,
    (14336, 4096): 16,
    (4096, 14336): 16,
    (28672, 4096): 26,
}
# paged_attention, FP8 decode: (KV heads, head_dim, context, batch).
ATTENTION_TARGETS = {
    (8, 128, 1024, 1): 9, (8, 128, 1024, 8): 13, (8, 128, 1024, 64): 48,
    (8, 128, 4096, 1): 12, (8, 128, 4096, 8): 28, (8, 128, 4096, 64): 175,
    (8, 128, 8192, 1): 15, (8, 128, 8192, 8): 48, (8, 128, 8192, 64): 340,
    (8, 128, 32768, 1): 33, (8, 128, 32768, 8): 175, (8, 128, 32768, 64): 1330,
    (3, 64, 1024, 1): 10, (3, 64, 1024, 8): 11, (3, 64, 1024, 64): 14,
    (3, 64, 4096, 1): 10, (3, 64, 4096, 8): 11, (3, 64, 4096, 64): 38,
    (3, 64, 8192, 1): 12, (3, 64, 8192, 8): 14, (3, 64, 8192, 64): 68,
    (3, 64, 32768, 1): 12, (3, 64, 32768, 8): 38, (3, 64, 32768, 64): 255,
}  # fmt: skip
