"""How a problem is cut into programs: the tuned table's answer, or a rule where it has none."""

import math

from pallas_kernels import tuning
from pallas_kernels.devices import DEVICES, Device
from pallas_kernels.int4_matmul.problem import Problem, describe
from pallas_kernels.int4_matmul.shapes import Case, abstract_arguments
from pallas_kernels.int4_matmul.triton import Config, check_config, post

# Rows are bucketed: a table entry serves all row counts up to its bucket.
ROW_BUCKETS = (16, 32, 64, 128, 256, 512, 1024)

# Above this many rows XLA's matmul on the expanded weight wins: expanding moves 2.5 bytes a weight
# and then runs at the library's rate, which the fused kernel does not reach. Predicted (the rate
# of the fused kernel is put at 60% of the library's), until `bench --tune` measures it.
MAX_KERNEL_ROWS = 512


# Bytes of weight an SM must have on their way for an H200's bandwidth (Little's law: its share of
# 4.8 TB/s for 800 ns); the others need less.
BYTES_IN_FLIGHT = 30 * 1024


def row_bucket(rows: int) -> int:
    """The bucket that serves `rows` (beyond the last, the last)."""
    return next((bucket for bucket in ROW_BUCKETS if rows <= bucket), ROW_BUCKETS[-1])


def table_key(problem: Problem) -> dict:
    """The fields of a tuned entry that must match."""
    return dict(
        rows=row_bucket(problem.rows),
        out_features=problem.out_features,
        in_features=problem.in_features,
        bits=problem.bits,
        group_size=problem.group_size if problem.num_groups > 1 else -1,
        offset=problem.has_offset,
        gated=problem.activation is not None,
    )


def problem_of_case(case: Case) -> Problem:
    """The problem that a case of shapes.py states."""
    positional, keyword = abstract_arguments(case)
    absent = dict.fromkeys(("zero", "offset", "bias", "layer", "out_dtype"))
    return describe(*positional, **(absent | dict(implicit_zero=8) | keyword))


def key_of_case(case: Case) -> dict:
    """The key of the entry that serves a case of shapes.py."""
    return table_key(problem_of_case(case))


def config_for(problem: Problem, device: Device | None) -> Config:
    """The configuration of `problem` on `device` (None: interpreting, no device)."""
    if device is not None:
        entry = tuning.lookup(device.key, "int4_matmul", table_key(problem))
        if entry is not None:
            config = Config(**entry["config"])
            try:
                check_config(problem, config)
                return config
            except ValueError:
                pass  # tuned for the same sizes with another packing span
    return rule(problem, device)


def rule(problem: Problem, device: Device | None) -> Config:
    """A configuration from sizes alone.

    Up to 64 rows, two warps a program: on Hopper four would take the warpgroup tensor instruction,
    whose register operand is filled from shared memory two bytes at a time, while two warps keep
    the older one that reads eight. K is split until there are up to four programs an SM: all are
    resident at once, and no second wave starts. Many rows take tiles of 128 x 128, or smaller ones
    where those would leave SMs idle.
    """
    device = device or DEVICES["h200"]
    few = problem.rows <= 64
    block_m = max(16, min(64 if few else 128, 1 << (max(problem.rows, 1) - 1).bit_length()))
    block_n = 64 if few else 128
    if not few and problem.activation is not None:
        block_m = min(block_m, 64)  # two accumulators live at once
    while not few and block_n > 64 and _tiles(problem, block_n, block_m) < device.num_sms:
        block_n, block_m = (block_n, 64) if block_m > 64 else (64, block_m)

    def scale_after(block_k: int) -> bool:
        return few and post(problem, block_k) and problem.group_size >= 2 * block_m

    block_k, narrow = _block_k(problem, 128 if few else 64), _block_k(problem, 64)
    # Scaling weight by weight holds a scale and a least value for each: 128 codes of K then take
    # all registers that the assembler grants 64 threads, 128 with 16 rows and on Ampere 168 with
    # 64, and spill on some versions of jax.
    holds_many = block_m == 16 or (block_m == 64 and device.capability < (9, 0))
    if not scale_after(block_k) and (holds_many or scale_after(narrow)):
        block_k = narrow
    scaling = "post" if scale_after(block_k) else "pre"
    split_k = 1
    if few:
        tiles = math.ceil(problem.out_features / block_n)
        num_k_tiles = problem.in_features // block_k
        wanted = max(1, 4 * device.num_sms // tiles)
        # At least 512 codes of K a split, or the pipeline never fills.
        most = max(1, problem.in_features // 512)
        split_k = max(1, min(wanted, most, num_k_tiles, 16))
        # Partial sums are float32 and move twice: at 64 rows 16 splits move more than the weight.
        split_k = min(split_k, max(1, 256 // block_m))
        split_k = 1 << (split_k.bit_length() - 1)
    num_stages = (4 if block_k == 128 else 6) if few else 3
    if few and block_m == 64:
        # Tiles of x are large by now: as many stages as the loads need and shared memory holds.
        weight_bytes = block_n * block_k * problem.bits // 8
        stage_bytes = weight_bytes + 2 * block_m * block_k
        resident = min(4, math.ceil(_tiles(problem, block_n, block_m) * split_k / device.num_sms))
        needed = math.ceil(BYTES_IN_FLIGHT / (resident * weight_bytes))
        fits = device.smem_per_sm // (resident * stage_bytes)
        num_stages = 1 + max(2, min(needed, fits, 4))
    return Config(
        block_n=block_n,
        block_m=block_m,
        block_k=block_k,
        split_k=split_k,
        scaling=scaling,
        num_warps=2 if few else 4 if block_n * block_m <= 64 * 64 else 8,
        num_stages=num_stages,
    )


def _tiles(problem: Problem, block_n: int, block_m: int) -> int:
    """Programs of an unsplit call."""
    return math.ceil(problem.out_columns / block_n) * math.ceil(problem.rows / block_m)


def _block_k(problem: Problem, most: int) -> int:
    """The largest tile of K up to `most` that the problem can be cut into."""
    group = problem.group_size
    for block_k in (256, 128, 64, 32):
        fits = problem.in_features % block_k == 0 and block_k <= most
        aligned = problem.num_groups == 1 or block_k % group == 0 or group % block_k == 0
        if fits and aligned and (problem.bits == 8 or block_k % problem.span == 0):
            return block_k
    raise AssertionError(f"no tile of K cuts {problem}")


def max_kernel_rows(device: Device | None) -> int:
    """Rows up to which the kernel is taken rather than XLA on the dequantised weight."""
    if device is None:
        return MAX_KERNEL_ROWS
    return tuning.load(device.key).get("max_kernel_rows", MAX_KERNEL_ROWS)
