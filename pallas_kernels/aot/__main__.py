"""`python -m pallas_kernels.aot`: is the code compiled for GPUs that are not there any good?

    python -m pallas_kernels.aot                     all of tuned/ and shapes.py on all devices
    python -m pallas_kernels.aot --device h100 h200  a part of it: these devices (one compilation
                                                     serves both, their code is the same)
    python -m pallas_kernels.aot --reduced           each code path once (continuous integration)
    python -m pallas_kernels.aot --resume FOLDER     keeps what each compilation gave in FOLDER, and
                                                     takes from there what the same sources gave
    python -m pallas_kernels.aot --out FILE          writes the table, device by device, as JSON;
                                                     devices of other runs stay in the file
    python -m pallas_kernels.aot --predict h200 h100 rewrites their predictions in tuned/

Runs on a machine without GPU and driver, Python 3.12 or newer, with a plain CPU jax and, beside it,
the compiler wheels of the same version, installed without their dependencies:

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12

An error is: a case that does not lower or compile; an empty list of cases; register spills; more
shared memory than the device has; an array as large as the weight or a pool made by XLA (a copy);
gathering in a sharded program; an atomic instruction (sums would vary from run to run); and, for a
model's shapes, loads of the weight or of keys and values narrower than 8 bytes a thread in the main
loop.

Columns: registers a thread; shared memory a block; resident warps an SM and KB of weight or KV in
flight an SM (30 needed on an H200); bytes a thread loads of the weight or KV at once (16 is the
most; where it is less, the end of the line says why); arithmetic instructions per weight or KV
element in the main loop, addresses and softmax included (of PTX: the machine code has a few more
moves); what limits the predicted time (see `predict`); that time, the least possible one, their
ratio, and the target. Nothing here was measured on a GPU.

The last complete run is in results/, one file per version of jax.
"""

import argparse
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pallas_kernels import tuning
from pallas_kernels.aot import cases, provenance, report
from pallas_kernels.aot.cases import Compile
from pallas_kernels.aot.judge import judge
from pallas_kernels.devices import DEVICES
from pallas_kernels.int4_matmul import config as matmul_configs
from pallas_kernels.paged_attention import config as attention_configs

TIMEOUT_SECONDS = 240
_PACKAGE = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--reduced", action="store_true", help="each code path once")
    parser.add_argument(
        "--device", nargs="+", choices=tuple(DEVICES), help="only these devices' cases"
    )
    parser.add_argument(
        "--predict", nargs="+", choices=tuple(DEVICES), help="rewrite predicted entries of tuned/"
    )
    parser.add_argument("--jobs", type=int, default=2, help="compiling processes at a time")
    parser.add_argument("--resume", type=Path, help="folder of compilations already made")
    parser.add_argument(
        "--out", type=Path, help="JSON file of the table; keeps other devices' part"
    )
    options = parser.parse_args()
    if options.predict and len({_code_of(device) for device in options.predict}) > 1:
        parser.error("--predict: devices predicted together must share their code (h100 and h200)")
    if options.out and (options.reduced or options.predict):
        parser.error("--out: keeps complete runs, not --reduced nor --predict")
    devices = tuple(options.device or DEVICES)
    if options.predict:
        todo = [
            Compile(op, options.predict[0], dataclasses.asdict(case), critical=True)
            for op, case in cases.model_cases()
        ]
    elif options.reduced:
        todo = [c for c in cases.reduced() if c.device in devices]
    else:
        todo = cases.all_cases(devices)
    if not todo:
        print("error: no cases: the tables of tuned/ are missing")
        return 1
    start = time.monotonic()
    errors: dict[str, list[str]] = {}
    results: list[tuple[Compile, dict]] = []
    print(report.HEADER)
    with ThreadPoolExecutor(options.jobs) as pool:
        run = functools.partial(
            _run_first_that_fits if options.predict else _run, kept=options.resume
        )
        for compiled, outcome in zip(todo, pool.map(run, todo), strict=True):
            for device in (compiled.device, *compiled.also):
                c = dataclasses.replace(compiled, device=device)
                found = [outcome] if isinstance(outcome, str) else judge(c, outcome)
                errors.setdefault(device, []).extend(f"{c.label} ({device}): {e}" for e in found)
                if not isinstance(outcome, str):
                    results.append((c, outcome))
                    print(report.row(device, report.record(c, outcome)), flush=True)
    for device in errors:
        for line in report.bars(device, results):
            print("predicted,", line)
    seconds = time.monotonic() - start
    number = sum(map(len, errors.values()))
    print(f"{len(todo)} compilations in {seconds:.0f} s, {number} errors")
    for error in (error for found in errors.values() for error in found):
        print("error:", error)
    if options.predict and not number:
        for device in options.predict:
            same = [(dataclasses.replace(c, device=device), facts) for c, facts in results]
            print("wrote", _write(device, same))
    if options.out:
        _keep(options.out, results, errors, seconds)
        print("wrote", options.out)
    return 1 if number else 0


def _keep(path: Path, results: list, errors: dict[str, list[str]], seconds: float) -> None:
    """Writes the devices of this run to `path`, one row of the table a line."""
    run = dict(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=provenance.commit(_PACKAGE),
        machine=f"{os.cpu_count()} cores, no GPU",
        versions=provenance.versions(),
        seconds=round(seconds),
    )
    parts = json.loads(path.read_text()) if path.exists() else {}
    for device, found in errors.items():
        records = [report.record(c, facts) for c, facts in results if c.device == device]
        parts[device] = run | dict(
            errors=found,
            bars=report.bars(device, results),
            columns=report.COLUMNS,
            rows=[list(line.values()) for line in records],
        )
    blocks = []
    for device, part in parts.items():
        rows = ",\n".join(f"    {json.dumps(line)}" for line in part.pop("rows"))
        head = ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items())
        blocks.append(f' {json.dumps(device)}: {{\n{head},\n   "rows": [\n{rows}\n   ]\n }}')
    path.parent.mkdir(exist_ok=True)
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def _code_of(device_key: str) -> tuple[str, int]:
    """What a device's compiled code depends on: its architecture and, by the rules, its SMs."""
    return DEVICES[device_key].arch, DEVICES[device_key].num_sms


def _run(c: Compile, kept: Path | None = None) -> dict | str:
    """The compiled facts of a case, from `kept` where they are there, or what went wrong."""
    if kept is None:
        return _compile(c)
    path = kept / f"{_sources(c.num_devices > 1)}_{_key(c)}.json"
    if path.exists():
        return json.loads(path.read_text())
    outcome = _compile(c)
    kept.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(outcome))
    return outcome


def _key(c: Compile) -> str:
    """What of a case decides its code."""
    of = [c.op, *_code_of(c.device), c.case, c.config, c.num_devices]
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]


@functools.cache
def _sources(by_rule: bool) -> str:
    """What else decides it: versions, and sources but those that judge.

    The rules and tuned/ count where the compiled program asks them for its configuration.
    """
    folder = _PACKAGE
    others = {
        "predict.py",
        *(f"aot/{name}.py" for name in ("__main__", "judge", "provenance", "report")),
    }
    rules = {"tuning.py", "int4_matmul/config.py", "paged_attention/config.py"}
    left_out = {folder / name for name in (others if by_rule else others | rules)}
    paths = [p for p in sorted(folder.rglob("*.py")) if p not in left_out]
    paths += sorted(folder.glob("tuned/*.json")) if by_rule else []
    digest = hashlib.sha256(json.dumps(provenance.versions()).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(c: Compile) -> dict | str:
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


def _run_first_that_fits(c: Compile, kept: Path | None = None) -> dict | str:
    """Like `_run`, trying smaller configurations than the rule's until one does not spill.

    Whether the assembler spills hangs on details (it caps small programs at 128 registers on
    Ampere), so the rule's answer is a start; what the table ships has been compiled.
    """
    outcome = ""
    for config in _ever_smaller(c):
        attempt = dataclasses.replace(c, config=dataclasses.asdict(config))
        outcome = _run(attempt, kept)
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


def _write(device_key: str, results: list) -> str:
    """Writes predicted entries; measured ones with the same key stay."""
    table = tuning.load(device_key)
    for op, configs in (("int4_matmul", matmul_configs), ("paged_attention", attention_configs)):
        measured = {json.dumps(e["key"]) for e in table.get(op, []) if e["status"] == "measured"}
        entries = []
        for c, facts in results:
            estimate = report.estimate(c, facts) if c.op == op else None
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
