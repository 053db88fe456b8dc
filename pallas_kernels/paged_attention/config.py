"""How attention is cut into programs: the tuned table's answer, or a rule where it has none."""

import math

from pallas_kernels import tuning
from pallas_kernels.devices import DEVICES, Device
from pallas_kernels.paged_attention.problem import Problem, describe
from pallas_kernels.paged_attention.shapes import Case, abstract_arguments
from pallas_kernels.paged_attention.triton import Config, check_config, rows_of

MAX_SPLITS = 64
# Rows of a program's tiles; 128 spill where the head dimension is 128.
MAX_ROWS = 64
# A split of fewer keys costs more to join than it saves.
MIN_KEYS_PER_SPLIT = 128


def table_key(problem: Problem) -> dict:
    """The fields of a tuned entry that must match; contexts are bucketed to powers of two."""
    return dict(
        num_rows=_bucket(problem.num_rows),
        max_query_len=_bucket(problem.max_query_len),
        max_context=_bucket(problem.max_context),
        num_kv_heads=problem.num_kv_heads,
        group=problem.group,
        head_dim=problem.head_dim,
        kv_dtype=problem.kv_dtype,
    )


def problem_of_case(case: Case) -> Problem:
    """The problem that a case of shapes.py states."""
    positional, keyword = abstract_arguments(case)
    absent = dict.fromkeys(("k_scale_K", "v_scale_K", "softmax_scale", "tree_mask_BJJ"))
    return describe(*positional, **(absent | keyword))


def key_of_case(case: Case) -> dict:
    """The key of the entry that serves a case of shapes.py."""
    return table_key(problem_of_case(case))


def config_for(problem: Problem, device: Device | None) -> Config:
    """The configuration of `problem` on `device` (None: interpreting, no device)."""
    if device is not None:
        entry = tuning.lookup(device.key, "paged_attention", table_key(problem))
        if entry is not None:
            config = Config(**entry["config"])
            check_config(problem, config)
            return config
    return rule(problem, device)


def rule(problem: Problem, device: Device | None) -> Config:
    """A configuration from sizes alone.

    A program takes 16 (token, head) pairs where the row has no more, and gets a warp per 16: with
    more warps than that, each would decode the whole KV tile for itself.
    """
    device = device or DEVICES["h200"]
    pairs = problem.max_query_len * problem.group
    rows = min(MAX_ROWS, max(16, 1 << (pairs - 1).bit_length()))
    block_q = max(1, rows // problem.group)
    block_q = min(block_q, problem.max_query_len)
    rows = rows_of(problem, block_q)
    fp8_decode = "cvt" if device.capability >= (9, 0) else "bits"
    # Taking FP8 apart by bits needs registers too: 64 keys by 128 dimensions spill then.
    by_bits = problem.format.bits == 8 and fp8_decode == "bits"
    block_s = 64 if problem.head_dim <= (64 if by_bits else 128) and rows > 16 else 32
    # One warp for all dimensions of two tiles of 32 keys: only what needs no padding fits.
    few_keys = problem.format.bits == 8 and rows == 16 and problem.head_dim not in (16, 32, 64, 128)
    block_s = 16 if few_keys else block_s
    programs = problem.num_rows * math.ceil(problem.max_query_len / block_q) * problem.num_kv_heads
    # So many programs an SM are resident at once and keep enough loads in flight; one more would
    # start a second wave.
    per_sm = 8 if problem.format.bits == 8 else 4
    wanted = max(1, per_sm * device.num_sms // programs)
    most_splits = max(1, problem.max_context // MIN_KEYS_PER_SPLIT)
    num_splits = 1 << (min(wanted, most_splits, MAX_SPLITS).bit_length() - 1)
    resident = per_sm * device.num_sms
    if programs > resident:
        num_splits = min(
            (s for s in (1, 2, 4, 8) if s == 1 or problem.max_context >= 1024 * s),
            key=lambda s: _last_wave_loss(programs * s / resident) + 0.02 * s,
        )
    # Joining writes and reads float32 parts of every token: in prefill only where SMs are idle (and
    # registers are left to address the parts).
    if problem.max_query_len > 16:
        idle = 2 * device.num_sms // programs if programs < device.num_sms and not by_bits else 1
        num_splits = 1 << (min(idle, most_splits, 4).bit_length() - 1)
    return Config(
        block_q=block_q,
        block_s=block_s,
        num_splits=num_splits,
        fp8_decode=fp8_decode,
        # One warp alone cannot hold the sums of 256 dimensions.
        num_warps=max(1 if problem.head_dim <= 128 else 2, min(4, rows // 16)),
        num_stages=4 if few_keys else 3,
    )


def _last_wave_loss(waves: float) -> float:
    """How much longer whole waves take than `waves` of them."""
    return math.ceil(waves) / waves - 1


def _bucket(value: int) -> int:
    return 1 << (max(value, 1) - 1).bit_length()
