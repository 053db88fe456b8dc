"""What does a compiled program run? The text of XLA's optimised HLO, as instructions.

A computation is a list of instructions in the order in which they run. Loops, branches and calls
run others one instruction after the other; a fusion is one kernel, whatever its computation holds.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: |\().*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
# Attributes that name computations: those that run one instruction after the other, and others.
_SEQUENTIAL = re.compile(
    r"\b(body|condition|true_computation|false_computation|branch_computations|"
    r"called_computations|async_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
_CALLS = re.compile(r"\b(?:calls|to_apply)=%([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Pallas' kernels carry their name in the backend's configuration, behind their code.
_KERNEL = re.compile(r'[,{] ?name = "([^"]*)"')
PALLAS_TARGET = "__gpu$xla.gpu.triton"

# Neither a kernel nor a copy: they only say which memory is meant, or what runs next.
PLUMBING = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "opt-barrier copy-done async-start async-update async-done partition-id replica-id".split()
)


@dataclass(frozen=True)
class Array:
    """An array type: "bf16" and (64, 4096)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The shape without axes of one element."""
        return tuple(length for length in self.shape if length != 1)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      arrays: its results; several for a tuple.
      operands: names of instructions of the same computation.
      runs: computations that it runs one instruction after the other: (role, name).
      fused: the computation of a fusion, or what a reduction applies.
      kernel: name of the Pallas kernel that it launches.
      target: of another custom call.
    """

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    runs: tuple[tuple[str, str], ...] = ()
    fused: str | None = None
    kernel: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class Program:
    """entry: name of the computation that starts; computations: by name."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    def run_by(self, name: str) -> Iterator[str]:
        """`name` and all computations that it runs one instruction after the other, each once."""
        seen, todo = {name}, [name]
        while todo:
            current = todo.pop()
            yield current
            for instruction in self.computations[current]:
                for _, other in instruction.runs:
                    if other not in seen:
                        seen.add(other)
                        todo.append(other)

    def executed(self, name: str | None = None) -> Iterator[Instruction]:
        """Instructions that a computation (None: the entry) runs, those of fusions left out."""
        for each in self.run_by(self.entry if name is None else name):
            yield from self.computations[each]


def parse(text: str) -> Program:
    """The program that `text` states.

    Raises:
      ValueError: there is no entry computation in it.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = current = None
    found: list[Instruction] = []
    for line in text.splitlines():
        # A kernel's code ends a line: of no interest here, and long.
        head, _, configuration = line.partition(", backend_config=")
        if line.startswith("}"):
            if current is not None:
                computations[current] = tuple(found)
            current = None
        elif current is None:
            match = _COMPUTATION.match(head)
            if match and not line.startswith("HloModule"):
                current, found = match.group(2), []
                entry = current if match.group(1) else entry
        else:
            match = _INSTRUCTION.match(head)
            if match:
                found.append(_instruction(match.group(1), match.group(2), configuration))
    if entry is None:
        raise ValueError("no ENTRY computation: this is not the text of an HLO module")
    return Program(entry, computations)


def _instruction(name: str, rest: str, configuration: str) -> Instruction:
    """From what stands behind `name = `: type opcode(operands), attributes."""
    end = _type_end(rest)
    result, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    close = _closing(rest)
    operands, attributes = rest[:close], rest[close:]
    runs = [
        (role, each)
        for role, names in _SEQUENTIAL.findall(attributes)
        for each in _NAME.findall(names)
    ]
    called = _CALLS.search(attributes)
    fused = called.group(1) if called else None
    if fused is not None and opcode in ("call", "async-start"):
        runs, fused = [*runs, ("call", fused)], None
    target = _TARGET.search(attributes)
    kernel = None
    if target is not None and target.group(1) == PALLAS_TARGET:
        names = _KERNEL.findall(configuration)
        kernel = names[-1] if names else "unnamed"
    return Instruction(
        name=name,
        arrays=arrays_of(result),
        opcode=opcode,
        operands=tuple(_NAME.findall(operands)),
        runs=tuple(runs),
        fused=fused,
        kernel=kernel,
        target=None if target is None or kernel else target.group(1),
    )


def arrays_of(text: str) -> tuple[Array, ...]:
    """The arrays of a type, a tuple's in order."""
    return tuple(
        Array(dtype, tuple(int(n) for n in shape.split(",") if n))
        for dtype, shape in _ARRAY.findall(text)
    )


def _type_end(text: str) -> int:
    """Where the result's type ends: at a tuple's closing parenthesis, or at the first blank."""
    return _closing(text[1:]) + 2 if text.startswith("(") else text.index(" ")


def _closing(text: str) -> int:
    """Position of the parenthesis that closes one opened before `text`."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place
    return len(text)
