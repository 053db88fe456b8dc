"""`python -m helios_jax.engine.aot`: is the whole engine step good when compiled for a GPU?

    python -m helios_jax.engine.aot                 two layers, on A100 and H100, with FP8 KV alone
                                                    and beside bfloat16 KV; speculating by lookup
                                                    and by a draft model of two layers
    python -m helios_jax.engine.aot --layers 32     the whole of Llama 3 8B
    python -m helios_jax.engine.aot --device h200 --rows 16 --chunk-tokens 256
    python -m helios_jax.engine.aot --out FILE      keeps the table as JSON

`engine_step` with arrivals, a chunk and decode rounds is compiled for GPUs that are not there, with
the shapes of Llama 3 8B: INT4 linears in groups of 64, a bfloat16 head, 20 GiB of KV. An error is
what `helios_jax.engine.aot.judge` says, an op that is not served by its kernel, and a kernel of
ours that spills registers. Needs Python 3.12 or newer and, beside a plain CPU jax,

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12

in jax's version.

Columns: launches of a decode round and of a chunk, by the branches taken (greedy rows take few;
loops within count as one turn), how many of a round's are ours; temporaries, and their share of the
KV pools; arguments, weights and pools together; seconds to trace and to compile. Nothing here was
measured on a GPU.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from helios_jax.engine.aot.cases import DRAFTERS, PRECISIONS, StepCase
from pallas_kernels.aot import absent, provenance
from pallas_kernels.devices import DEVICES

TIMEOUT_SECONDS = 1800
_PACKAGES = (Path(__file__).parents[2], Path(absent.__file__).parents[1])


def main(arguments: list[str] | None = None) -> int:
    """Compiles the cases that the options name; 1 if any has an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", nargs="+", choices=tuple(DEVICES), default=["a100", "h100"])
    parser.add_argument("--layers", type=int, default=2, help="of the model, 32 for all")
    parser.add_argument("--rows", type=int, default=64, help="that decode")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="of the prefill chunk")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=list(DRAFTERS))
    parser.add_argument("--jobs", type=int, default=2, help="compiling processes at a time")
    parser.add_argument("--out", type=Path, help="JSON file of the table")
    options = parser.parse_args(arguments)
    try:
        cases = [
            StepCase(
                device, options.layers, options.rows, options.chunk_tokens, precisions, drafter
            )
            for device, precisions, drafter in itertools.product(
                options.device, options.precisions, options.drafters
            )
            # Speculation doubles the passes, and both precisions their kernels: one at a time.
            if drafter == "none" or precisions == "narrow" or len(options.precisions) == 1
        ]
    except ValueError as error:
        parser.error(str(error))
    start = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        found = list(zip(cases, pool.map(_compile, cases), strict=True))
    seconds = time.monotonic() - start
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(_table(found))
    errors = [(case, error) for case, facts in found for error in facts["errors"]]
    console.print(f"{len(cases)} compilations in {seconds:.0f} s, {len(errors)} errors")
    for case, error in errors:
        console.print(f"error: {case.device}, {case.label}: {error}", markup=False, soft_wrap=True)
    if options.out:
        _keep(options.out, found, seconds)
        console.print(f"wrote {options.out}", markup=False, soft_wrap=True)
    return 1 if errors else 0


def _compile(case: StepCase) -> dict[str, Any]:
    """The facts of a compiled case; only `errors` where it does not compile."""
    request = json.dumps(dataclasses.asdict(case))
    worker = "helios_jax.engine.aot.compile_step"
    with tempfile.TemporaryDirectory() as dump:
        try:
            run = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", worker, request, dump],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                env=os.environ | absent.environment(Path(dump)),
            )
        except subprocess.TimeoutExpired:
            return dict(errors=[f"did not compile in {TIMEOUT_SECONDS} s"])
    if run.returncode:
        lines = [line for line in run.stderr.strip().splitlines() if line.strip()]
        return dict(errors=["does not compile: " + " | ".join(lines[-3:])[:1000]])
    return json.loads(run.stdout)


def _table(found: list[tuple[StepCase, dict[str, Any]]]) -> Table:
    table = Table(title="engine_step compiled for GPUs that are not there")
    table.add_column("device")
    table.add_column("step")
    for name in ("a round", "ours", "a chunk", "temporaries", "share", "arguments", "pools",
                 "trace", "compile", "errors"):  # fmt: skip
        table.add_column(name, justify="right")
    for case, facts in found:
        shown = _figures(facts) if "temporary_bytes" in facts else [""] * 9
        table.add_row(case.device, escape(case.label), *shown, str(len(facts["errors"])))
    return table


def _figures(facts: dict[str, Any]) -> list[str]:
    def launches(name: str) -> str:
        if name not in facts:
            return "none"
        return f"{facts[name]['fewest']}-{facts[name]['most']}"

    kinds = facts["round"]["by_kind"] if "round" in facts else {}
    ours = sum(times for kind, times in kinds.items() if _is_ours(kind))
    return [
        launches("round"),
        str(ours),
        launches("chunk"),
        f"{facts['temporary_bytes'] / 2**20:.0f} MiB",
        f"{facts['temporary_bytes'] / facts['pool_bytes']:.1%}",
        f"{facts['argument_bytes'] / 2**30:.2f} GiB",
        f"{facts['pool_bytes'] / 2**30:.2f} GiB",
        f"{facts['lower_seconds']:.0f} s",
        f"{facts['compile_seconds']:.0f} s",
    ]


def _is_ours(kind: str) -> bool:
    return kind.startswith(("int4_matmul", "append_kv", "paged_attention"))


def _keep(path: Path, found: list[tuple[StepCase, dict[str, Any]]], seconds: float) -> None:
    run = dict(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=provenance.commit(*_PACKAGES),
        machine=f"{os.cpu_count()} cores, no GPU",
        versions=provenance.versions(),
        seconds=round(seconds),
    )
    lines = [json.dumps(dataclasses.asdict(case) | facts) for case, facts in found]
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in run.items())
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(f'{{\n{head},\n "steps": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")


if __name__ == "__main__":
    sys.exit(main())
