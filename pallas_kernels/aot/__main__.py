"""`python -m pallas_kernels.aot`: is the code compiled for GPUs that are not there any good?

    python -m pallas_kernels.aot              all of tuned/ and shapes.py for sm_80, sm_89, sm_90
    python -m pallas_kernels.aot --reduced    each code path once (continuous integration)
    python -m pallas_kernels.aot --predict h200 h100    rewrites their predictions in tuned/

Runs on a machine without GPU and driver, Python 3.12 or newer, with a plain CPU jax and, beside it,
the compiler wheels of the same version, installed without their dependencies:

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12

An error is: a case that does not lower or compile; an empty list of cases; register spills; more
shared memory than the device has; an array as large as the weight or a pool made by XLA (a copy);
gathering in a sharded program; and, for a model's shapes, loads of the weight or of keys and values
narrower than 8 bytes a thread in the main loop.

Columns: registers a thread; shared memory a block; resident warps an SM and KB of weight or KV in
flight an SM (30 needed on an H200); bytes a thread loads of the weight or KV at once; arithmetic
PTX instructions per weight or KV element in the main loop, addresses and softmax included;
predicted and least possible time, their ratio, and the target. Nothing here was measured on a GPU.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pallas_kernels import predict, tuning
from pallas_kernels.aot import cases
from pallas_kernels.aot.cases import Compile
from pallas_kernels.cost import Cost
from pallas_kernels.devices import DEVICES
from pallas_kernels.int4_matmul import config as matmul_configs
from pallas_kernels.paged_attention import config as attention_configs
from pallas_kernels.paged_attention.shapes import Case as AttentionCase

NARROWEST_LOAD = 8
TIMEOUT_SECONDS = 240


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--reduced", action="store_true", help="each code path once")
    parser.add_argument("--device", choices=tuple(DEVICES), help="only this device's cases")
    parser.add_argument(
        "--predict", nargs="+", choices=tuple(DEVICES), help="rewrite predicted entries of tuned/"
    )
    parser.add_argument("--jobs", type=int, default=2, help="compiling processes at a time")
    options = parser.parse_args()
    if options.predict and len({_code_of(device) for device in options.predict}) > 1:
        parser.error("--predict: devices predicted together must share their code (h100 and h200)")
    if options.predict:
        todo = [
            Compile(op, options.predict[0], dataclasses.asdict(case), critical=True)
            for op, case in cases.model_cases()
        ]
    elif options.reduced:
        todo = cases.reduced()
    else:
        todo = cases.all_cases((options.device,) if options.device else tuple(DEVICES))
    if options.device:
        todo = [c for c in todo if c.device == options.device]
    if not todo:
        print("error: no cases: the tables of tuned/ are missing")
        return 1
    start = time.monotonic()
    errors: list[str] = []
    results = []
    print(_HEADER)
    with ThreadPoolExecutor(options.jobs) as pool:
        run = _run_first_that_fits if options.predict else _run
        for c, outcome in zip(todo, pool.map(run, todo), strict=True):
            found = [outcome] if isinstance(outcome, str) else judge(c, outcome)
            errors += [f"{c.label} ({c.device}): {e}" for e in found]
            if not isinstance(outcome, str):
                results.append((c, outcome))
                print(_row(c, outcome), flush=True)
    print(f"{len(todo)} compilations in {time.monotonic() - start:.0f} s, {len(errors)} errors")
    for error in errors:
        print("error:", error)
    if options.predict and not errors:
        for device in options.predict:
            same = [(dataclasses.replace(c, device=device), facts) for c, facts in results]
            print("wrote", _write(device, same))
    return 1 if errors else 0


def _code_of(device_key: str) -> tuple[str, int]:
    """What a device's compiled code depends on: its architecture and, by the rules, its SMs."""
    return DEVICES[device_key].arch, DEVICES[device_key].num_sms


def _run(c: Compile) -> dict | str:
    """The compiled facts of a case, or what went wrong."""
    request = json.dumps(dataclasses.asdict(c))
    try:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "pallas_kernels.aot.compile_case", request],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"did not compile in {TIMEOUT_SECONDS} s"
    if run.returncode:
        lines = [line for line in run.stderr.strip().splitlines() if line.strip()]
        return "does not compile: " + " | ".join(lines[-3:])[:600]
    return json.loads(run.stdout)


def _run_first_that_fits(c: Compile) -> dict | str:
    """Like `_run`, trying smaller configurations than the rule's until one does not spill.

    Whether the assembler spills hangs on details (it caps small programs at 128 registers on
    Ampere), so the rule's answer is a start; what the table ships has been compiled.
    """
    outcome = ""
    for config in _ever_smaller(c):
        attempt = dataclasses.replace(c, config=dataclasses.asdict(config))
        outcome = _run(attempt)
        if not isinstance(outcome, str) and not judge(attempt, outcome):
            break
    return outcome


def _ever_smaller(c: Compile) -> list:
    """The rule's configuration, then ones that need fewer registers."""
    configs: Any = matmul_configs if c.op == "int4_matmul" else attention_configs
    problem = configs.problem_of_case(cases.case_of(c.op, c.case))
    base = configs.rule(problem, DEVICES[c.device])
    if c.op == "int4_matmul":
        half_n = base.block_n // 2
        changes: list[dict] = [
            dict(block_n=half_n), dict(num_stages=2), dict(block_n=half_n, num_stages=2),
        ]  # fmt: skip
    else:
        half = max(16, base.block_s // 2)
        changes = [
            dict(num_stages=2), dict(block_s=half), dict(block_s=half, num_stages=2),
            dict(block_s=16), dict(fp8_decode="bits", block_s=16),
        ]  # fmt: skip
    return [base, *(dataclasses.replace(base, **change) for change in changes)]


def judge(c: Compile, facts: dict) -> list[str]:
    """The gates of the module docstring; what is wrong with a compiled case."""
    errors = []
    ours = _main_kernel(facts)
    if ours is None:
        return ["no kernel of ours in the compiled program"]
    for kernel in facts["kernels"]:
        if kernel["spill_bytes"]:
            errors.append(f"{kernel['name']} spills {kernel['spill_bytes']} bytes a thread")
    limit = DEVICES[c.device].smem_per_block
    for launch in facts["launches"]:
        if launch["shared_bytes"] > limit:
            errors.append(
                f"{launch['name']} needs {launch['shared_bytes']} bytes of shared memory, the "
                f"device has {limit}"
            )
    # Small operands are within the noise of index arithmetic: judge from 64 KB on.
    if facts["big_bytes"] >= 2**16 and facts["largest_copy_bytes"] >= facts["big_bytes"]:
        errors.append(
            f"XLA makes an array of {facts['largest_copy_bytes']} bytes: the weight or pool "
            f"({facts['big_bytes']}) is copied"
        )
    if c.num_devices > 1 and facts["collectives"]:
        errors.append(f"the sharded program communicates: {facts['collectives']}")
    width = _load_width(facts)
    if c.critical and c.op != "append_kv" and (width is None or width < NARROWEST_LOAD):
        errors.append(f"loads {width} bytes of weight or KV at a time, under {NARROWEST_LOAD}")
    return errors


def _main_kernel(facts: dict) -> dict | None:
    names = ("int4_matmul", "int8_matmul", "paged_attention", "append_kv")
    ours = [
        k for k in facts["kernels"]
        if k["name"].startswith(names) and not k["name"].endswith(("_reduce", "_join"))
    ]  # fmt: skip
    return ours[0] if ours else None


def _load_width(facts: dict) -> int | None:
    """The narrowest load of the weight or the pools in the main loop, bytes a thread."""
    kernel = _main_kernel(facts)
    if kernel is None or kernel["loop"] is None:
        return None
    loads = kernel["loop"]["load_bytes"]
    widths = [loads[str(a)] for a in facts["big_arguments"] if str(a) in loads]
    return min(widths) if len(widths) == len(facts["big_arguments"]) and widths else None


def _estimate(c: Compile, facts: dict) -> dict[str, Any] | None:
    """Occupancy and predicted time; None for kernels without a main loop."""
    kernel, config = _main_kernel(facts), facts["config"]
    if kernel is None or kernel["loop"] is None or config is None or c.num_devices > 1:
        return None
    device, case = DEVICES[c.device], cases.case_of(c.op, c.case)
    launch = next(x for x in facts["launches"] if x["name"] == kernel["name"])
    if isinstance(case, AttentionCase):
        bits = 8 if case.kv_dtype in ("fp8_e4m3", "fp8_e5m2", "int8") else 16
        elements = config["block_s"] * case.H * 2
        pairs = case.max_query_len * case.G
        row_blocks = -(-case.max_query_len // config["block_q"])
        total_keys = sum(context for context, _ in case.rows) * row_blocks
        iterations = total_keys * case.K / config["block_s"]
        rows = max(16, 1 << (config["block_q"] * case.G - 1).bit_length())
        tensor = 2 * rows * elements * iterations
        splits, parts = config["num_splits"], pairs * case.K * len(case.rows) * case.H
    else:
        bits = case.bits
        elements = config["block_n"] * config["block_k"]
        row_blocks = -(-case.M // config["block_m"])
        iterations = case.N * case.K * row_blocks / elements
        tensor = 2 * config["block_m"] * elements * iterations
        splits, parts = config["split_k"], case.M * case.N
    occ = predict.occupancy(
        device, kernel["registers"], launch["shared_bytes"], launch["threads"], launch["grid"],
        elements * bits // 8, config["num_stages"],
    )  # fmt: skip
    loop = kernel["loop"]
    warps = launch["threads"] // 32
    cost = Cost(**facts["cost"])
    time = predict.seconds(
        device,
        cost,
        occ,
        grid=launch["grid"],
        instructions=(1.15 * loop["alu"] + loop["matrix"]) * warps * iterations,
        tensor_flops=tensor,
        num_kernels=len(facts["launches"]),
        extra_bytes=8 * splits * parts if splits > 1 else 0,
    )
    floor = cost.floor_seconds(device)
    return dict(
        occupancy=occ,
        alu_per_element=loop["alu"] * launch["threads"] / elements,
        microseconds=round(time * 1e6, 1),
        floor_microseconds=round(floor * 1e6, 3),
        share_of_floor=round(floor / time, 4),
        target=_target(c, case),
    )


def _target(c: Compile, case) -> int | None:
    if DEVICES[c.device].key != "h200":
        return None
    if isinstance(case, AttentionCase):
        key = (case.K, case.H, case.rows[0][0], len(case.rows))
        decode = case.max_query_len == 1 and case.kv_dtype == "fp8_e4m3"
        return predict.ATTENTION_TARGETS.get(key) if decode else None
    few = case.M <= 16 and case.group_size == 128
    return predict.INT4_TARGETS.get((case.N, case.K)) if few else None


_HEADER = (
    f"{'case':58} {'device':6} {'regs':>4} {'smem':>6} {'warps':>5} {'KB fly':>6} {'load':>4} "
    f"{'alu/el':>6} {'us':>8} {'floor':>8} {'share':>5} {'target':>6}"
)


def _row(c: Compile, facts: dict) -> str:
    kernel, estimate = _main_kernel(facts), _estimate(c, facts)
    if kernel is None:
        return f"{c.label:58} {c.device:6} no kernel"
    shared = max((x["shared_bytes"] for x in facts["launches"]), default=0)
    head = f"{c.label:58} {c.device:6} {kernel['registers']:4} {shared:6}"
    if estimate is None:
        return head
    occ, target = estimate["occupancy"], estimate["target"] or ""
    return (
        f"{head} {occ.warps:5} {occ.bytes_in_flight / 1024:6.0f} {_load_width(facts) or '?':>4} "
        f"{estimate['alu_per_element']:6.2f} {estimate['microseconds']:8.1f} "
        f"{estimate['floor_microseconds']:8.2f} {estimate['share_of_floor']:5.2f} {target:>6}"
    )


def _write(device_key: str, results: list) -> str:
    """Writes predicted entries; measured ones with the same key stay."""
    table = tuning.load(device_key)
    for op, configs in (("int4_matmul", matmul_configs), ("paged_attention", attention_configs)):
        measured = {json.dumps(e["key"]) for e in table.get(op, []) if e["status"] == "measured"}
        entries = []
        for c, facts in results:
            estimate = _estimate(c, facts) if c.op == op else None
            if estimate is None:
                continue
            key = configs.key_of_case(cases.case_of(op, c.case))
            if json.dumps(key) not in measured:
                figures = ("microseconds", "floor_microseconds", "share_of_floor")
                entries.append(
                    dict(key=key, config=facts["config"], status="predicted")
                    | {name: estimate[name] for name in figures}
                    | dict(case=c.case)
                )
        path = tuning.store(device_key, op, entries)
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
