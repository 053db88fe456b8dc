"""What does the table say about a compiled case, and all of it together about a device?"""

import collections
import dataclasses
from typing import Any

from pallas_kernels import predict
from pallas_kernels.aot import cases
from pallas_kernels.aot.cases import Compile
from pallas_kernels.aot.judge import load_width, main_kernel
from pallas_kernels.cost import Cost
from pallas_kernels.devices import DEVICES
from pallas_kernels.paged_attention.shapes import Case as AttentionCase

# What one thread can load at once.
WIDEST_LOAD = 16
COLUMNS = (
    "case", "registers", "shared_bytes", "warps", "kb_in_flight", "load_bytes", "alu_per_element",
    "limit", "microseconds", "floor_microseconds", "share_of_floor", "target_microseconds", "note",
)  # fmt: skip
HEADER = (
    f"{'case':58} {'device':6} {'regs':>4} {'smem':>6} {'warps':>5} {'KB fly':>6} {'load':>4} "
    f"{'alu/el':>6} {'limit':6} {'us':>8} {'floor':>8} {'share':>5} {'target':>6}"
)


def record(c: Compile, facts: dict) -> dict[str, Any]:
    """A line of the table: COLUMNS -> value, None where a case has no such figure."""
    kernel = main_kernel(facts)
    found: dict[str, Any] = dict.fromkeys(COLUMNS)
    found["case"] = c.label
    if kernel is None:
        return found | dict(note="no kernel")
    found["registers"] = kernel["registers"]
    found["shared_bytes"] = max((x["shared_bytes"] for x in facts["launches"]), default=0)
    if kernel["loop"] is not None:
        found["load_bytes"] = load_width(facts)
        found["note"] = _why_narrow(c, facts)
    estimated = estimate(c, facts)
    if estimated is not None:
        occ = estimated["occupancy"]
        found |= dict(
            warps=occ.warps,
            kb_in_flight=round(occ.bytes_in_flight / 1024),
            alu_per_element=round(estimated["alu_per_element"], 2),
            target_microseconds=estimated["target"],
        )
        for name in ("limit", "microseconds", "floor_microseconds", "share_of_floor"):
            found[name] = estimated[name]
    return found


def row(device_key: str, line: dict[str, Any]) -> str:
    """A record as text under HEADER."""

    def shown(name: str, width: int, digits: int | None = None) -> str:
        value = line[name]
        if value is None:
            return " " * width
        return f"{value:{width}}" if digits is None else f"{value:{width}.{digits}f}"

    text = " ".join(
        (
            f"{line['case']:58} {device_key:6}", shown("registers", 4), shown("shared_bytes", 6),
            shown("warps", 5), shown("kb_in_flight", 6), shown("load_bytes", 4),
            shown("alu_per_element", 6, 2), shown("limit", 6), shown("microseconds", 8, 1),
            shown("floor_microseconds", 8, 2), shown("share_of_floor", 5, 2),
            shown("target_microseconds", 6), line["note"] or "",
        )
    )  # fmt: skip
    return text.rstrip()


def estimate(c: Compile, facts: dict) -> dict[str, Any] | None:
    """Occupancy and predicted time; None for kernels without a main loop."""
    kernel, config = main_kernel(facts), facts["config"]
    if kernel is None or kernel["loop"] is None or config is None or c.num_devices > 1:
        return None
    device, case = DEVICES[c.device], cases.case_of(c.op, c.case)
    launch = _launch(facts)
    tile_bytes, elements = _tile(case, config)
    if isinstance(case, AttentionCase):
        pairs = case.max_query_len * case.G
        row_blocks = -(-case.max_query_len // config["block_q"])
        total_keys = sum(context for context, _ in case.rows) * row_blocks
        iterations = total_keys * case.K / config["block_s"]
        rows = max(16, 1 << (config["block_q"] * case.G - 1).bit_length())
        tensor = 2 * rows * elements * iterations
        splits, parts = config["num_splits"], pairs * case.K * len(case.rows) * case.H
    else:
        row_blocks = -(-case.M // config["block_m"])
        iterations = case.N * case.K * row_blocks / elements
        tensor = 2 * config["block_m"] * elements * iterations
        splits, parts = config["split_k"], case.M * case.N
    occ = predict.occupancy(
        device, kernel["registers"], launch["shared_bytes"], launch["threads"], launch["grid"],
        tile_bytes, config["num_stages"],
    )  # fmt: skip
    loop = kernel["loop"]
    warps = launch["threads"] // 32
    cost = Cost(**facts["cost"])
    predicted = predict.prediction(
        device,
        cost,
        occ,
        grid=launch["grid"],
        instructions=(1.15 * loop["alu"] + loop["matrix"]) * warps * iterations,
        tensor_flops=tensor,
        num_kernels=len(facts["launches"]),
        extra_bytes=8 * splits * parts if splits > 1 else 0,
    )
    floor, time = cost.floor_seconds(device), predicted.seconds
    return dict(
        occupancy=occ,
        alu_per_element=loop["alu"] * launch["threads"] / elements,
        limit=predicted.limit,
        microseconds=round(time * 1e6, 1),
        floor_microseconds=round(floor * 1e6, 3),
        share_of_floor=round(floor / time, 4),
        target=_target(c, case),
    )


def _launch(facts: dict) -> dict:
    """The launch of the main kernel: grid, threads, shared memory."""
    kernel = main_kernel(facts)
    assert kernel is not None
    return next(x for x in facts["launches"] if x["name"] == kernel["name"])


def _tile(case, config: dict) -> tuple[int, int]:
    """(bytes, elements) of the weight, or of keys and values, that an iteration reads."""
    if isinstance(case, AttentionCase):
        bits = 8 if case.kv_dtype in ("fp8_e4m3", "fp8_e5m2", "int8") else 16
        elements = config["block_s"] * case.H * 2
    else:
        bits, elements = case.bits, config["block_n"] * config["block_k"]
    return elements * bits // 8, elements


def _why_narrow(c: Compile, facts: dict) -> str | None:
    """Why a thread loads fewer than 16 bytes of the weight or KV at once; None where it does not.

    A tile of fewer than 16 bytes a thread has no more to give each; else it is the compiler's
    layout, which follows the rows of the tile.
    """
    width, config = load_width(facts), facts["config"]
    if config is None or width is None or width >= WIDEST_LOAD:
        return None
    case, threads = cases.case_of(c.op, c.case), _launch(facts)["threads"]
    # Keys and values are tiles of their own.
    tile_bytes = _tile(case, config)[0] // (2 if isinstance(case, AttentionCase) else 1)
    if tile_bytes < WIDEST_LOAD * threads:
        return f"load: a tile is {tile_bytes} bytes for {threads} threads"
    return f"load: the compiler's layout of a tile of {tile_bytes} bytes for {threads} threads"


def _target(c: Compile, case) -> int | None:
    if DEVICES[c.device].key != "h200":
        return None
    if isinstance(case, AttentionCase):
        key = (case.K, case.H, case.rows[0][0], len(case.rows))
        decode = case.max_query_len == 1 and case.kv_dtype == "fp8_e4m3"
        return predict.ATTENTION_TARGETS.get(key) if decode else None
    few = case.M <= 16 and case.group_size == 128
    return predict.INT4_TARGETS.get((case.N, case.K)) if few else None


def bars(device_key: str, results: list[tuple[Compile, dict]]) -> list[str]:
    """Predicted ratios beside the bars set for them: many rows to few, FP8 KV to bfloat16 KV."""
    figures = {}
    for c, facts in results:
        estimated = estimate(c, facts) if c.device == device_key and c.critical else None
        if estimated is not None:
            figures[c.op, cases.case_of(c.op, c.case)] = estimated
    rows, formats, over, under = [], [], [], []
    for (op, case), found in figures.items():
        if op == "int4_matmul" and case.M == 64:
            few = figures.get((op, dataclasses.replace(case, M=16)))
            if few:
                rows.append(found["microseconds"] / few["microseconds"])
                over += [found["limit"]] if rows[-1] > predict.MANY_ROWS_BAR else []
        if op == "paged_attention" and case.kv_dtype == "fp8_e4m3":
            wide = figures.get((op, dataclasses.replace(case, kv_dtype="bfloat16", scales=False)))
            long = case.rows[0][0] >= 4096 and len(case.rows) >= 16
            if wide and long and case.max_query_len == 1:
                formats.append(wide["microseconds"] / found["microseconds"])
                under += [found["limit"]] if formats[-1] < predict.FP8_BAR else []
    lines = []
    if rows:
        lines.append(
            f"{device_key}: 64 rows take {min(rows):.1f} to {max(rows):.1f} times as long as 1 to "
            f"16 (bar: at most {predict.MANY_ROWS_BAR}); {len(over)} of {len(rows)} weights over"
            + _limits(over)
        )
    if formats:
        lines.append(
            f"{device_key}: FP8 KV is {min(formats):.1f} to {max(formats):.1f} times as fast as "
            f"bfloat16 KV at 64 rows from 4k keys on (bar: at least {predict.FP8_BAR}); "
            f"{len(under)} of {len(formats)} shapes under" + _limits(under)
        )
    return lines


def _limits(names: list[str]) -> str:
    """ ", limited by tensor (3), chain (1)"; nothing where there are none."""
    counted = collections.Counter(names).most_common()
    shown = ", ".join(f"{name} ({number})" for name, number in counted)
    return f", limited by {shown}" if shown else ""
