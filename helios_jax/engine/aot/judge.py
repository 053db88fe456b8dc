"""Is a compiled step good enough? The rules of `python -m helios_jax.engine.aot`.

kernels    each pass over the model (the chunk's, a decode round's) launches the Pallas kernels
           it must, as often as it must
codes      the codes of a quantised linear are read by int4_matmul and by nothing else: nothing
           expands, multiplies or copies them
products   no matrix product has an operand of a weight's size but the weights that are dense
arrays     nothing of a weight's size is made but by our kernels, or in place in a pool; logits
           aside
pools      no copy of an array that grows with the KV pool, none of the block tables' either
memory     temporaries are a small part of the pools, and the pools are updated in place
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from helios_jax.engine.aot.hlo import PLUMBING, Array, Instruction, Program

MAX_TEMPORARY_SHARE = 0.06
_MATMUL = "int4_matmul"
_LIBRARY_PRODUCTS = ("gemm", "matmul", "cublas", "cudnn")
_COPIES = ("copy", "copy-start")


@dataclass(frozen=True)
class Expected:
    """What the step was compiled for.

    Attributes:
      passes: kernels of each pass over the model, in order, and how often each is launched.
      codes: shapes of the packed codes of quantised linears.
      dense: shapes of the linears that are not quantised.
      weight_size: elements of the smallest quantised linear.
      growing: arrays whose size follows the KV pool's, the pools among them.
      pool_bytes: of all pools.
      logits: (tokens of a round's pass, vocabulary): logits and probabilities may be as large as a
        weight.
    """

    passes: tuple[dict[str, int], ...]
    codes: frozenset[tuple[int, ...]]
    dense: frozenset[tuple[int, ...]]
    weight_size: int
    growing: frozenset[Array]
    pool_bytes: int
    logits: tuple[int, int]


class Memory(NamedTuple):
    """Bytes by XLA's memory analysis; alias: results that lie in an argument's place."""

    temporary: int
    alias: int
    argument: int


class Launches(NamedTuple):
    """Launches of one turn of a loop, and the decisions that the host may have to wait for.

    fewest, most: launches by the branches taken; each loop within counts as one turn.
    by_kind: of all branches: Pallas kernels by name, "fusion", "copy", other operations.
    num_decisions: loops and branches within.
    """

    fewest: int
    most: int
    by_kind: dict[str, int]
    num_decisions: int


def judge(program: Program, memory: Memory, expected: Expected) -> list[str]:
    """What is wrong with a compiled step; the rules are the module's."""
    return [
        *_kernels(program, expected),
        *_codes(program, expected),
        *_products(program, expected),
        *_arrays(program, expected),
        *_pools(program, expected),
        *_repeats(program),
        *_memory(memory, expected),
    ]


def passes_of(program: Program) -> list[str]:
    """The loops that pass over the model, in order: bodies of the entry's loops with kernels."""
    bodies = []
    for instruction in program.computations[program.entry]:
        body = dict(instruction.runs).get("body")
        if body is not None and any(each.kernel for each in program.executed(body)):
            bodies.append(body)
    return bodies


def launches_of(program: Program, body: str, condition: str | None = None) -> Launches:
    """What one turn of the loop `body` launches, its condition included where given."""
    roots = [name for name in (body, condition) if name is not None]
    counts = [_count(program, name) for name in roots]
    executed = [each for name in roots for each in program.executed(name)]
    kinds = Counter(
        each.kernel or each.target or each.opcode
        for each in executed
        if each.opcode not in PLUMBING
    )  # fmt: skip
    return Launches(
        fewest=sum(low for low, _ in counts),
        most=sum(high for _, high in counts),
        by_kind=dict(kinds.most_common()),
        num_decisions=sum(each.opcode in ("while", "conditional") for each in executed),
    )


def loop_condition(program: Program, body: str) -> str | None:
    """The condition of the entry's loop whose body is `body`."""
    for instruction in program.computations[program.entry]:
        runs = dict(instruction.runs)
        if runs.get("body") == body:
            return runs.get("condition")
    return None


def _count(program: Program, name: str) -> tuple[int, int]:
    """Fewest and most launches of a computation."""
    fewest = most = 0
    for each in program.computations[name]:
        inner = [_count(program, other) for _, other in each.runs]
        if each.opcode == "conditional":
            fewest += min(low for low, _ in inner)
            most += max(high for _, high in inner)
        else:
            own = each.opcode not in PLUMBING
            fewest += own + sum(low for low, _ in inner)
            most += own + sum(high for _, high in inner)
    return fewest, most


def _kernels(program: Program, expected: Expected) -> list[str]:
    errors, bodies = [], passes_of(program)
    if len(bodies) != len(expected.passes):
        errors.append(
            f"{len(bodies)} loops of the step launch Pallas kernels: {len(expected.passes)} passes "
            "over the model must"
        )
    for number, (body, kernels) in enumerate(zip(bodies, expected.passes, strict=False)):
        found = Counter(each.kernel for each in program.executed(body))
        errors += [
            f"pass {number} over the model launches {kernel} {found[kernel]} times: must be {times}"
            for kernel, times in kernels.items()
            if found[kernel] != times
        ]
    return errors


def _codes(program: Program, expected: Expected) -> list[str]:
    errors = []
    for name in program.run_by(program.entry):
        codes = {
            each.name: each.arrays[0]
            for each in program.computations[name]
            if len(each.arrays) == 1
            and each.arrays[0].dtype == "u8"
            and each.arrays[0].squeezed in expected.codes
        }
        for each in program.computations[name]:
            read = [codes[operand] for operand in each.operands if operand in codes]
            if read and each.opcode not in PLUMBING and each.kernel != _MATMUL:
                errors.append(
                    f"{_describe(each)} reads {read[0]}, the codes of a quantised linear: only "
                    f"{_MATMUL} may"
                )
    return errors


def _products(program: Program, expected: Expected) -> list[str]:
    errors = []
    for instructions in program.computations.values():
        results = {each.name: each.arrays for each in instructions}
        for each in instructions:
            is_library = any(word in (each.target or "") for word in _LIBRARY_PRODUCTS)
            if each.opcode not in ("dot", "convolution") and not is_library:
                continue
            for operand in each.operands:
                errors += [
                    f"{_describe(each)} multiplies {array}: of that size are only weights, and "
                    "quantised ones are multiplied by kernels"
                    for array in results.get(operand, ())
                    if array.size >= expected.weight_size
                    and _sorted(array) not in map(sorted, expected.dense)
                ]
    return errors


def _sorted(array: Array) -> list[int]:
    return sorted(array.squeezed)


def _arrays(program: Program, expected: Expected) -> list[str]:
    return [
        f"{_describe(each)} makes {array}: as large as a weight"
        for each in program.executed()
        if each.opcode not in PLUMBING and each.kernel is None
        for array in each.arrays
        if array.size >= expected.weight_size
        and array not in expected.growing
        and not _are_logits(array, expected)
    ]


def _are_logits(array: Array, expected: Expected) -> bool:
    num_tokens, vocab_size = expected.logits
    return array.shape[-1:] == (vocab_size,) and array.size <= num_tokens * vocab_size


def _pools(program: Program, expected: Expected) -> list[str]:
    return [
        f"{_describe(each)} copies {each.arrays[0]}, which grows with the KV pool"
        for each in program.executed()
        if each.opcode in _COPIES and each.arrays[0] in expected.growing
    ]


def _repeats(program: Program) -> list[str]:
    repeated = [
        each.name
        for each in program.executed()
        if ".remat" in each.name and each.opcode not in PLUMBING
    ]
    if not repeated:
        return []
    return [f"{len(repeated)} operations are repeated to save memory, among them {repeated[0]}"]


def _memory(memory: Memory, expected: Expected) -> list[str]:
    errors, limit = [], MAX_TEMPORARY_SHARE * expected.pool_bytes
    if memory.temporary > limit:
        errors.append(
            f"temporaries take {memory.temporary / 2**20:.0f} MiB: more than "
            f"{MAX_TEMPORARY_SHARE:.0%} of the pools' {expected.pool_bytes / 2**20:.0f} MiB"
        )
    if memory.alias < expected.pool_bytes:
        errors.append(
            f"{memory.alias / 2**20:.0f} MiB are updated in place: less than the pools' "
            f"{expected.pool_bytes / 2**20:.0f} MiB"
        )
    return errors


def _describe(instruction: Instruction) -> str:
    kind = instruction.kernel or instruction.target or instruction.opcode
    return f"{instruction.name} ({kind})"
