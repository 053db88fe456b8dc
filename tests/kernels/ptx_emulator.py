"""What do the few PTX instructions of our inline assembly compute? (numpy, 32-bit registers)"""

import re

import ml_dtypes
import numpy as np

_PAIR = {"bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}


def run(assembly: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Executes `assembly` on uint32 arrays named "$1", ...; returns all registers."""
    registers = dict(inputs)
    with np.errstate(over="ignore"):
        for statement in re.split(r";", assembly.strip().removeprefix("{").removesuffix("}")):
            statement = statement.strip()
            if statement and not statement.startswith(".reg"):
                _step(statement, registers)
    return registers


def _step(statement: str, registers: dict) -> None:
    opcode, operands = statement.split(" ", 1)
    if opcode == "mov.b32" and operands.startswith("{"):
        low, high, source = re.findall(r"[\w$]+", operands)
        registers[low], registers[high] = registers[source] & 0xFFFF, registers[source] >> 16
        return
    target, *names = [name.strip() for name in operands.split(",")]
    args = [registers[n] if n in registers else np.uint32(int(n, 0)) for n in names]
    registers[target] = _execute(opcode, args)


def _execute(opcode: str, args: list) -> np.ndarray:
    if opcode == "mov.b32":
        return args[0]
    if opcode == "and.b32":
        return args[0] & args[1]
    if opcode == "xor.b32":
        return args[0] ^ args[1]
    if opcode == "shr.u32":
        return args[0] >> args[1]
    if opcode == "lop3.b32":
        assert args[3] == 0xEA, "the table of (a & b) | c"
        return (args[0] & args[1]) | args[2]
    if opcode == "prmt.b32":
        both = [(args[i // 4] >> np.uint32(8 * (i % 4))) & 0xFF for i in range(8)]
        picks = [int(args[2]) >> 4 * i & 0xF for i in range(4)]
        assert max(picks) < 8, "sign replication is not emulated"
        return sum(np.uint32(both[p]) << np.uint32(8 * i) for i, p in enumerate(picks))
    if opcode == "cvt.rn.f16x2.e4m3x2":
        halves = [(args[0] >> np.uint32(8 * i)).astype(np.uint8) for i in range(2)]
        return pack([h.view(ml_dtypes.float8_e4m3fn).astype(np.float16) for h in halves])
    if opcode == "fma.rn.f32":
        # A product of two float32 numbers is exact in float64; their sum is rounded twice here.
        a, b, c = (np.atleast_1d(x).view(np.float32).astype(np.float64) for x in args)
        return (a * b + c).astype(np.float32).view(np.uint32)
    if opcode in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
        high, low = (np.atleast_1d(x).view(np.float32) for x in args)
        dtype = _PAIR[opcode.split(".")[2]]
        return pack([low.astype(dtype), high.astype(dtype)])
    operation, _, suffix = opcode.split(".")
    assert operation == "fma", opcode
    a, b, c = ([h.astype(np.float64) for h in unpack(x, _PAIR[suffix])] for x in args)
    return pack([(a[i] * b[i] + c[i]).astype(_PAIR[suffix]) for i in range(2)])


def pack(halves) -> np.ndarray:
    """Two arrays of 16-bit numbers, low and high -> uint32."""
    low, high = (np.atleast_1d(h).view(np.uint16).astype(np.uint32) for h in halves)
    return low | high << np.uint32(16)


def unpack(words, dtype) -> list[np.ndarray]:
    """uint32 -> [low, high] as `dtype`."""
    words = np.atleast_1d(words)
    return [(words >> np.uint32(16 * i)).astype(np.uint16).view(dtype) for i in range(2)]
