"""Compiles one case for a GPU that is not there, and reports what the code is like, as JSON.

Run as a process of its own (a fault in the compiler ends the process):

    python -m pallas_kernels.aot.compile_case '{"op": ..., "device": ..., "case": {...}}'

Needs a plain CPU jax with the compiler wheels beside it, see `pallas_kernels.aot`.
"""

import dataclasses
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from pallas_kernels.aot import absent


def main(request: str) -> None:
    with tempfile.TemporaryDirectory() as dump:
        os.environ |= absent.environment(Path(dump))
        print(json.dumps(_compile(json.loads(request), Path(dump))))


def _compile(request: dict, dump: Path) -> dict:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

    from pallas_kernels import dispatch
    from pallas_kernels.aot import cases, ptx
    from pallas_kernels.devices import DEVICES

    device = DEVICES[request["device"]]
    case = cases.case_of(request["op"], request["case"])
    num_devices = request.get("num_devices", 1)
    topology = absent.topology(device, num_devices)
    if num_devices == 1:
        mesh = None
        sharding = SingleDeviceSharding(topology.devices[0])
    else:
        mesh = Mesh(np.array(topology.devices), ("model",))
        sharding = NamedSharding(mesh, PartitionSpec())
    function, arguments, facts = _call(request, case, sharding, mesh)
    donated = (0, 1) if request["op"] == "append_kv" else ()
    with dispatch.compile_for(device.key), jax.default_device(topology.devices[0]):
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        compiled = lowered.compile(
            compiler_options={"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
        )
    text = compiled.as_text() or ""
    memory: Any = compiled.memory_analysis()
    assembler = ptx.assembler()
    kernels = [k for path in sorted(dump.glob("*.ptx")) for k in ptx.kernels(path, assembler)]
    launches = "".join(path.read_text() for path in dump.glob("*thunk_sequence.txt"))
    return facts | dict(
        kernels=[dataclasses.asdict(k) for k in kernels],
        launches=_launches(launches),
        temporary_bytes=memory.temp_size_in_bytes,
        largest_copy_bytes=_largest_made(text),
        collectives=sorted(set(re.findall(r"all-gather|all-reduce|all-to-all|permute", text))),
    )


def _call(request: dict, case, sharding, mesh):
    """(function, argument structs, facts): the op on the case, sharded where there is a mesh."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels import append_kv, int4_matmul, paged_attention
    from pallas_kernels import sharding as sharded
    from pallas_kernels.append_kv import shapes as append_shapes
    from pallas_kernels.dispatch import compile_for
    from pallas_kernels.int4_matmul import config as matmul_configs
    from pallas_kernels.int4_matmul import shapes as matmul_shapes
    from pallas_kernels.int4_matmul import triton as matmul_triton
    from pallas_kernels.int4_matmul.problem import describe as describe_matmul
    from pallas_kernels.paged_attention import config as attention_configs
    from pallas_kernels.paged_attention import shapes as attention_shapes
    from pallas_kernels.paged_attention import triton as attention_triton
    from pallas_kernels.paged_attention.problem import describe as describe_attention

    op, given = request["op"], request.get("config")
    shapes = {
        "int4_matmul": matmul_shapes,
        "paged_attention": attention_shapes,
        "append_kv": append_shapes,
    }[op]
    # A pool as an engine has it, many times what the rows of one call hold.
    size = dict(num_blocks=8 * len(case.rows) * case.table_width) if op == "paged_attention" else {}
    positional, keyword = shapes.abstract_arguments(case, sharding, **size)
    arrays = {k: v for k, v in keyword.items() if isinstance(v, jax.ShapeDtypeStruct)}
    static = {k: v for k, v in keyword.items() if k not in arrays} | dict(backend="triton")
    with compile_for(request["device"]) as device:
        if op == "int4_matmul":
            absent = dict.fromkeys(("zero", "offset", "bias", "layer", "out_dtype"))
            problem = describe_matmul(*positional, **(absent | dict(implicit_zero=8) | keyword))
            config = (
                matmul_triton.Config(**given)
                if given
                else matmul_configs.config_for(problem, device)
            )
            cost = int4_matmul.cost(*positional, **keyword)
            big, plain, split = (2,), int4_matmul.int4_matmul, sharded.sharded_int4_matmul
            static["config"] = config
        elif op == "paged_attention":
            absent = dict.fromkeys(("k_scale_K", "v_scale_K", "softmax_scale", "tree_mask_BJJ"))
            problem = describe_attention(*positional, **(absent | keyword))
            config = (
                attention_triton.Config(**given)
                if given
                else attention_configs.config_for(problem, device)
            )
            cost = paged_attention.cost(*positional, **keyword)
            big, plain, split = (
                (1, 2),
                paged_attention.paged_attention,
                (sharded.sharded_paged_attention),
            )
            static["config"] = config
        else:
            config, cost = None, append_kv.cost(*positional, **keyword)
            big, plain, split = (), append_kv.append_kv, sharded.sharded_append_kv
    facts = dict(
        config=dataclasses.asdict(config) if config else None,
        cost=dataclasses.asdict(cost),
        big_arguments=big,
        big_bytes=_big_bytes(op, positional) // (mesh.size if mesh else 1),
    )
    if mesh is None:
        return (lambda *p: plain(*p[:-1], **p[-1], **static)), (*positional, arrays), facts

    static.pop("config", None)  # a device's part has other sizes than the whole
    column, heads, vector = P("model", None), P(None, "model", None), P("model")
    if op == "int4_matmul":
        places = [P(), column, column]
        named = dict.fromkeys(arrays, column)
        if case.gate_activation:
            # Gate and up halves apart, as the helper wants them.
            column = P(None, "model", None)
            places = [P(), column, column]
            named = dict.fromkeys(arrays, column)
            halve = lambda s: jax.ShapeDtypeStruct((2, s.shape[0] // 2, *s.shape[1:]), s.dtype)  # noqa: E731
            positional = (positional[0], *map(halve, positional[1:]))
            arrays = {k: halve(v) for k, v in arrays.items()}
    elif op == "paged_attention":
        places = [heads, heads, heads, P(), P(), P(), P()]
        named = dict.fromkeys(arrays, vector)
    else:
        places = [heads, heads, heads, heads, P()]
        named = dict.fromkeys(arrays, vector)

    def place(struct, spec):
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=NamedSharding(mesh, spec))

    positional = tuple(place(s, spec) for s, spec in zip(positional, places, strict=True))
    arrays = {k: place(v, named[k]) for k, v in arrays.items()}
    return (
        (lambda *p: split(mesh, "model", *p[:-1], **p[-1], **static)),
        (*positional, arrays),
        facts,
    )


def _big_bytes(op: str, positional) -> int:
    """Bytes of the operand no program may copy: the weight, or one pool."""
    from pallas_kernels.cost import nbytes

    return nbytes(positional[0 if op == "append_kv" else 1])


def _launches(text: str) -> list[dict]:
    """Kernel launches of XLA's thunk listing: name, grid, threads and shared memory of each."""
    pattern = re.compile(
        r"k(?:Custom)?Kernel .*?\]\s+(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), .*?"
        r"shared_memory: (\d+)"
    )
    return [
        dict(name=name, grid=int(x) * int(y) * int(z), threads=int(t), shared_bytes=int(shared))
        for name, x, y, z, t, shared in pattern.findall(text)
    ]


def _largest_made(text: str) -> int:
    """Bytes of the largest array that XLA itself makes: results of kernels of ours do not count."""
    sizes = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4,
             "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
    largest = 0
    for dtype, shape, op in re.findall(r"= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(", text):
        if op in ("parameter", "custom-call", "get-tuple-element", "bitcast", "tuple"):
            continue
        elements = 1
        for size in filter(None, shape.split(",")):
            elements *= int(size)
        largest = max(largest, elements * sizes.get(dtype, 4))
    return largest


if __name__ == "__main__":
    main(sys.argv[1])
