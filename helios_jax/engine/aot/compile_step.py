"""Compiles one step for a GPU that is not there, judges it, and reports as JSON.

Run as a process of its own (a fault in the compiler ends the process), with the variables of
`pallas_kernels.aot.absent.environment(FOLDER)`:

    python -m helios_jax.engine.aot.compile_step '{"device": "h100", "num_layers": 4, ...}' FOLDER
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from helios_jax.engine.aot import hlo
from helios_jax.engine.aot.cases import StepCase, abstract_step
from helios_jax.engine.aot.judge import (
    Memory,
    judge,
    launches_of,
    loop_condition,
    passes_of,
)
from helios_jax.model.compiler import COMPILER_OPTIONS
from pallas_kernels import dispatch
from pallas_kernels.aot import absent, ptx
from pallas_kernels.devices import DEVICES


def report(case: StepCase, dump: Path) -> dict[str, Any]:
    """Errors and figures of the compiled step, JSON-ready.

    Args:
      dump: the folder that was given to `environment`, where the kernels' PTX will lie.
    """
    step = abstract_step(case)
    device = absent.topology(DEVICES[case.device]).devices[0]
    sharding = SingleDeviceSharding(device)
    arguments = jax.tree.map(
        lambda struct: jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding),
        step.arguments,
    )
    start = time.monotonic()
    with dispatch.compile_for(case.device), jax.default_device(device):
        lowered = jax.jit(step.function, donate_argnums=1).lower(*arguments)
        lowered_at = time.monotonic()
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS["gpu"])
    seconds = time.monotonic() - lowered_at
    analysis: Any = compiled.memory_analysis()
    memory = Memory(
        analysis.temp_size_in_bytes, analysis.alias_size_in_bytes, analysis.argument_size_in_bytes
    )
    program = hlo.parse(compiled.as_text() or "")
    served = [
        f"{op} was served by {choice.backend}: {choice.reason}"
        for op, choices in dispatch.in_use().items()
        for choice in choices
        if choice.backend != "triton"
    ]
    names = {each.kernel for each in program.executed() if each.kernel}
    found: dict[str, Any] = dict(
        errors=[*served, *judge(program, memory, step.expected), *_spills(dump, names)],
        lower_seconds=round(lowered_at - start, 1),
        compile_seconds=round(seconds, 1),
        temporary_bytes=memory.temporary,
        argument_bytes=memory.argument,
        alias_bytes=memory.alias,
        pool_bytes=step.expected.pool_bytes,
    )
    for name, body in zip(("chunk", "round"), passes_of(program), strict=False):
        found[name] = launches_of(program, body, loop_condition(program, body))._asdict()
    return found


def _spills(dump: Path, names: set[str]) -> list[str]:
    """Errors for our kernels that spill registers; XLA's own are not judged."""
    errors, assembler = [], ptx.assembler()
    for path in sorted(dump.glob("*.ptx")):
        text = path.read_text()
        if not any(f".entry {name}" in text for name in names):
            continue
        errors += [
            f"{kernel.name} spills {kernel.spill_bytes} bytes a thread"
            for kernel in ptx.kernels(path, assembler)
            if kernel.spill_bytes and kernel.name.startswith(tuple(names))
        ]
    return errors


if __name__ == "__main__":
    print(json.dumps(report(StepCase(**json.loads(sys.argv[1])), Path(sys.argv[2]))))
