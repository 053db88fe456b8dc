"""Is a compiled case good enough? The gates of `python -m pallas_kernels.aot`."""

from pallas_kernels.aot.cases import Compile
from pallas_kernels.devices import DEVICES

NARROWEST_LOAD = 8


def judge(c: Compile, facts: dict) -> list[str]:
    """The gates of the module docstring; what is wrong with a compiled case."""
    errors = []
    ours = main_kernel(facts)
    if ours is None:
        return ["no kernel of ours in the compiled program"]
    for kernel in facts["kernels"]:
        if kernel["spill_bytes"]:
            errors.append(f"{kernel['name']} spills {kernel['spill_bytes']} bytes a thread")
        if kernel["atomics"]:
            errors.append(
                f"{kernel['name']} has {kernel['atomics']} atomic instructions: their order, and "
                "with it the rounding of sums, would vary from run to run"
            )
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
    width = load_width(facts)
    if c.critical and c.op != "append_kv" and (width is None or width < NARROWEST_LOAD):
        errors.append(f"loads {width} bytes of weight or KV at a time, under {NARROWEST_LOAD}")
    return errors


def main_kernel(facts: dict) -> dict | None:
    """The kernel that reads the weight or the pools; None where the program has none of ours."""
    names = ("int4_matmul", "int8_matmul", "paged_attention", "append_kv")
    ours = [
        k for k in facts["kernels"]
        if k["name"].startswith(names) and not k["name"].endswith(("_reduce", "_join"))
    ]  # fmt: skip
    return ours[0] if ours else None


def load_width(facts: dict) -> int | None:
    """The narrowest load of the weight or the pools in the main loop, bytes a thread."""
    kernel = main_kernel(facts)
    if kernel is None or kernel["loop"] is None:
        return None
    loads = kernel["loop"]["load_bytes"]
    widths = [loads[str(a)] for a in facts["big_arguments"] if str(a) in loads]
    return min(widths) if len(widths) == len(facts["big_arguments"]) and widths else None
