"""What compiled GPU text says about a kernel: registers, spills, load widths, instructions a loop.

Reads PTX, NVIDIA's virtual assembly, as XLA dumps it, and runs `ptxas -v` on it for what only the
assembler knows. Instruction counts are of PTX; the machine code has a few more moves.
"""

import collections
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
_STATEMENT = re.compile(r"^(?:@!?%p\d+\s+)?([a-z][\w.:]*)\b\s*(.*)$", re.S)
_ATOMIC = re.compile(r"\b(?:atom|red)\.")
_LABEL = re.compile(r"^(\$L\w+):")
_REGISTER = re.compile(r"%\w+")
_PTXAS = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads.*?Used (\d+) registers",
    re.S,
)
# Neither arithmetic nor a memory access: free, or not issued to the ALU pipes.
_NOT_ALU = (
    "mov",
    "bra",
    "bar",
    "ld",
    "st",
    "cp",
    "mma",
    "wgmma",
    "ldmatrix",
    "ret",
    "fence",
    "red",
)


@dataclass(frozen=True)
class Loop:
    """The innermost loop with matrix instructions (or, without such, with the most loads).

    Attributes:
      alu: arithmetic instructions a thread executes per iteration.
      matrix: tensor-core instructions per iteration.
      asynchronous: whether any global load goes to shared memory without registers (cp.async).
      load_bytes: {argument index: bytes of the narrowest global load from it}.
    """

    alu: int
    matrix: int
    asynchronous: bool
    load_bytes: dict[int, int]


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel. Bytes are per thread (stack, spills); atomics, instructions in all."""

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    atomics: int
    loop: Loop | None


def assembler() -> str:
    """Path of the compiler wheel's `ptxas`, or of the one on the path."""
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    for folder in ("cuda_nvcc", "cu13"):
        path = wheels / folder / "bin" / "ptxas"
        if path.exists():
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("no ptxas: install nvidia-cuda-nvcc-cu12")
    return found


def kernels(path: Path, ptxas: str) -> list[Kernel]:
    """All kernels of a PTX file, assembled for the file's own target."""
    text = path.read_text()
    if not text:
        return []  # jax 0.10.2 dumps one for a module that holds constants only
    target = re.search(r"^\.target (\w+)", text, re.M)
    assert target is not None, f"{path} has no .target"
    facts = _assemble(text, target.group(1), ptxas)
    found = []
    starts = [m.start() for m in _ENTRY.finditer(text)] + [len(text)]
    for start, end in zip(starts, starts[1:], strict=False):
        body = text[start:end]
        name = _ENTRY.match(body).group(1)  # type: ignore[union-attr]
        registers, stack, spill = facts[name]
        atomics = len(_ATOMIC.findall(body))
        found.append(Kernel(name, registers, stack, spill, atomics, _main_loop(body, name)))
    return found


def _assemble(text: str, target: str, ptxas: str) -> dict[str, tuple[int, int, int]]:
    """{kernel: (registers, stack bytes, spill bytes)} by `ptxas -v`.

    XLA may write a newer PTX version than this ptxas reads, for instructions both know: on that
    complaint the version is lowered to the one it names.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        for _attempt in range(2):
            source.write_text(text)
            run = subprocess.run(
                [ptxas, "-v", f"-arch={target}", str(source), "-o", f"{folder}/kernel.cubin"],
                capture_output=True,
                text=True,
            )
            newest = re.search(r"Unsupported \.version .*current version is '([\d.]+)'", run.stderr)
            if newest is None:
                break
            text = re.sub(r"^\.version .*$", f".version {newest.group(1)}", text, flags=re.M)
    if run.returncode:
        raise RuntimeError(f"ptxas failed: {run.stderr[:2000]}")
    return {
        name: (int(registers), int(stack), int(stores) + int(loads))
        for name, stack, stores, loads, registers in _PTXAS.findall(run.stderr)
    }


def _main_loop(body: str, name: str) -> Loop | None:
    statements = _statements(body)
    labels = {}
    for index, statement in enumerate(statements):
        label = _LABEL.match(statement)
        if label:
            labels[label.group(1)] = index
    loops = []
    for index, statement in enumerate(statements):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+)", statement)
        if jump and labels.get(jump.group(1), index) < index:
            loops.append(statements[labels[jump.group(1)] : index + 1])
    if not loops:
        return None
    origin = _argument_of_register(statements, name)
    summaries = [_summarise(loop, origin) for loop in loops]
    with_matrix = [(len(loop), s) for loop, s in zip(loops, summaries, strict=True) if s.matrix]
    if with_matrix:
        return min(with_matrix, key=lambda pair: pair[0])[1]
    return max(summaries, key=lambda s: len(s.load_bytes))


def _statements(body: str) -> list[str]:
    """Instructions and labels in order, without comments and the braces of inline assembly."""
    body = re.sub(r"//[^\n]*", "", body)
    body = re.sub(r"(\$L\w+:)", r"\1;", body)
    # Operand lists keep their braces: only a brace that opens or closes a scope stands alone.
    body = re.sub(r"(^|;)(\s*)\{(?=[^}]*;)", r"\1\2", body)
    body = re.sub(r";(\s*)\}", r";\1", body)
    return [" ".join(s.split()) for s in body.split(";") if s.strip()]


def _argument_of_register(statements: list[str], name: str) -> dict[str, set[int]]:
    """Which kernel arguments an address register derives from, through arithmetic only."""
    origin: dict[str, set[int]] = collections.defaultdict(set)
    for _pass in range(3):  # addresses carried around loops settle in the second pass
        for statement in statements:
            match = _STATEMENT.match(statement)
            if not match:
                continue
            opcode, operands = match.groups()
            if opcode.startswith("ld.param"):
                argument = re.search(rf"\[{name}_param_(\d+)", operands)
                if argument:
                    origin[_REGISTER.findall(operands)[0]].add(int(argument.group(1)))
            elif not opcode.startswith(("ld", "st", "cp.async", "mma", "wgmma", "setp")):
                registers = _REGISTER.findall(operands)
                for source in registers[1:]:
                    origin[registers[0]] |= origin[source]
    return origin


def _summarise(loop: list[str], origin: dict[str, set[int]]) -> Loop:
    alu = matrix = 0
    asynchronous = False
    load_bytes: dict[int, int] = {}
    for statement in loop:
        match = _STATEMENT.match(statement)
        if not match:
            continue
        opcode, operands = match.groups()
        if opcode.startswith(("mma.", "wgmma.mma_async")):
            matrix += 1
        width = _load_width(opcode, operands)
        if width:
            asynchronous |= opcode.startswith("cp.async")
            address = _REGISTER.findall(operands.split("[")[-1])[0]
            for argument in origin.get(address, ()):
                load_bytes[argument] = min(width, load_bytes.get(argument, width))
        elif not opcode.startswith(_NOT_ALU):
            alu += 1
    return Loop(alu, matrix, asynchronous, load_bytes)


def _load_width(opcode: str, operands: str) -> int:
    """Bytes a thread loads from global memory with this instruction; 0 for any other."""
    if opcode.startswith("cp.async.c") and "global" in opcode:
        return int(operands.split("],")[-1].split(",")[0].strip(), 16)
    if not opcode.startswith("ld.global"):
        return 0
    vector = re.search(r"\.v(\d)", opcode)
    bits = re.search(r"\.[bfus](\d+)$", opcode)
    assert bits is not None, opcode
    return int(bits.group(1)) // 8 * (int(vector.group(1)) if vector else 1)
