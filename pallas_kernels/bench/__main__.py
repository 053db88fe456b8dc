"""`python -m pallas_kernels.bench`: how fast are the kernels on this device, and against what?

    python -m pallas_kernels.bench            measures (GPU), or checks and prints the byte model
    python -m pallas_kernels.bench --tune     tries configurations, writes tuned/<device>.json
    python -m pallas_kernels.bench --out F    where the JSON goes (default pallas_bench.json)

Random weights of Llama-3-8B and SmolLM2-135M shapes; no model file is needed. On a GPU: kernel
times by CUPTI, cold level 2 cache, rotating inputs, medians; GB/s, share of the bandwidth measured
in the same run and of the floor (`cost.Cost.floor_seconds`), beside rivals timed in the same run.
One call ends within six minutes: cases that did not fit are listed. On a CPU nothing is timed: each
op is checked against its reference in interpret mode, and the byte model is printed.
"""

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, tuning
from pallas_kernels.aot import cases as compile_cases
from pallas_kernels.bench import rivals, timing
from pallas_kernels.devices import DEVICES, Device
from pallas_kernels.int4_matmul import config as matmul_configs
from pallas_kernels.int4_matmul import cost as matmul_cost
from pallas_kernels.int4_matmul import int4_matmul
from pallas_kernels.int4_matmul import shapes as matmul_shapes
from pallas_kernels.paged_attention import config as attention_configs
from pallas_kernels.paged_attention import cost as attention_cost
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention import shapes as attention_shapes

BUDGET_SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tune", action="store_true", help="write this device's configurations")
    parser.add_argument("--out", default="pallas_bench.json", help="JSON file of all figures")
    options = parser.parse_args()
    device = dispatch.target().device
    if device is None:
        if options.tune:
            parser.error("--tune needs a GPU")
        result = check_on_cpu()
    elif options.tune:
        result = tune(device)
    else:
        result = measure(device)
    with open(options.out, "w") as file:
        json.dump(result, file, indent=1)
    print(f"wrote {options.out}")
    return 0


def bench_cases() -> list[tuple[str, Any]]:
    """What is measured: decode and verify of both models, small and large batches, prefill."""
    found: list[tuple[str, Any]] = []
    for _, N, K in matmul_shapes.LLAMA3_8B[:1] + matmul_shapes.LLAMA3_8B[3:]:
        for M in (1, 16, 64, 2048):
            found.append(("int4_matmul", matmul_shapes.Case(M, N, K)))
    for _, N, K in matmul_shapes.SMOLLM2_135M[:1] + matmul_shapes.SMOLLM2_135M[4:]:
        found.append(
            ("int4_matmul", matmul_shapes.Case(1, N, K, 32, zero_kind="offset"))
        )  # fmt: skip
    for _, K, G, H in attention_shapes.MODELS:
        for batch in attention_shapes.DECODE_BATCHES:
            for context in (1024, 4096, 32768):
                if batch * context <= 64 * 4096:
                    rows = ((context, 1),) * batch
                    found.append(("paged_attention", attention_shapes.Case(K, G, H, rows)))
    return found


def check_on_cpu() -> dict:
    """Interprets a few cases of each op against its reference, and prints the byte model."""
    print("no GPU: checking against the references and printing the byte model, timing nothing\n")
    checked = []
    for op, call, arguments in (
        ("int4_matmul", int4_matmul, matmul_shapes.arguments(matmul_shapes.Case(5, 96, 256, 64))),
        (
            "paged_attention",
            paged_attention,
            attention_shapes.arguments(attention_shapes.Case(3, 3, 64, ((70, 1), (33, 5)))),
        ),
    ):
        positional, keyword = arguments
        outputs = [
            np.asarray(call(*positional, **keyword, backend=backend), np.float64)
            for backend in ("interpret", "xla")
        ]
        difference = float(np.abs(outputs[0] - outputs[1]).max() / np.abs(outputs[1]).max())
        assert difference < 2e-2, f"{op}: backends differ by {difference}"
        checked.append(dict(op=op, difference=difference))
        print(f"{op}: interpreted kernel and reference differ by {difference:.1e} of the largest")
    print(f"\n{'call':52} {'MB moved':>9} {'MFLOP':>9}   least us on " + " ".join(DEVICES))
    rows = []
    for op, case in bench_cases():
        cost = _cost(op, case)
        floors = {key: cost.floor_seconds(d) * 1e6 for key, d in DEVICES.items()}
        rows.append(dict(op=op, case=dataclasses.asdict(case), **dataclasses.asdict(cost),
                         floor_microseconds=floors))  # fmt: skip
        label = compile_cases.describe(op, dataclasses.asdict(case))
        shown = " ".join(f"{floor:8.2f}" for floor in floors.values())
        print(f"{label:52} {cost.bytes_moved / 1e6:9.2f} {cost.flops / 1e6:9.1f}   {shown}")
    return dict(device=jax.devices()[0].device_kind, checked=checked, byte_model=rows)


def _cost(op: str, case):
    if op == "int4_matmul":
        positional, keyword = matmul_shapes.abstract_arguments(case)
        return matmul_cost(*positional, **keyword)
    positional, keyword = attention_shapes.abstract_arguments(case)
    lengths = np.array(case.rows, np.int32)
    q, k_pool, v_pool, table, _, starts, _ = positional
    return attention_cost(q, k_pool, v_pool, table, lengths[:, 0], starts, lengths[:, 1], **keyword)


def _inputs(op: str, case) -> tuple[tuple, dict]:
    """(arrays, static options) of a call, made on the device."""
    if op == "int4_matmul":
        positional, keyword = matmul_shapes.abstract_arguments(case)
    else:
        positional, keyword = attention_shapes.abstract_arguments(case)
    arrays = {k: v for k, v in keyword.items() if isinstance(v, jax.ShapeDtypeStruct)}
    static = {k: v for k, v in keyword.items() if k not in arrays}
    key = jax.random.key(0)

    @jax.jit
    def make():
        def fill(struct):
            if jnp.issubdtype(struct.dtype, jnp.floating):
                return jax.random.normal(key, struct.shape, jnp.float32).astype(struct.dtype)
            if struct.dtype == jnp.uint16:  # words of small finite numbers in every format
                return jax.random.randint(key, struct.shape, 0, 0x3838).astype(jnp.uint16) & 0x3F3F
            return jax.random.randint(key, struct.shape, 0, 15).astype(struct.dtype)

        return jax.tree.map(fill, (positional, arrays))

    filled, named = make()
    if op == "paged_attention":
        lengths = np.array(case.rows, np.int32)
        starts = np.concatenate([[0], np.cumsum(lengths[:, 1])[:-1]]).astype(np.int32)
        blocks = np.random.default_rng(0).permutation(filled[1].shape[0]).astype(np.int32)
        table = blocks[: filled[3].size].reshape(filled[3].shape)
        filled = (*filled[:3], *map(jnp.asarray, (table, lengths[:, 0], starts, lengths[:, 1])))
    return (*filled, named), static


def _time(op: str, case, device: Device, config=None, backend: str = "triton") -> float:
    arrays, static = _inputs(op, case)
    call = int4_matmul if op == "int4_matmul" else paged_attention
    function = jax.jit(lambda *a: call(*a[:-1], **a[-1], **static, backend=backend, config=config))
    return timing.seconds(function, timing.copies_of(arrays, device.l2_bytes))


def measure(device: Device) -> dict:
    """Times every bench case and its rivals, within the budget."""
    start = time.monotonic()
    bandwidth = timing.bandwidth()
    print(f"{jax.devices()[0].device_kind}: {bandwidth / 1e12:.2f} TB/s measured")
    rows, skipped = [], []
    for op, case in bench_cases():
        label = compile_cases.describe(op, dataclasses.asdict(case))
        if time.monotonic() - start > BUDGET_SECONDS:
            skipped.append(label)
            continue
        cost = _cost(op, case)
        elapsed = _time(op, case, device)
        row: dict[str, Any] = dict(
            op=op,
            case=dataclasses.asdict(case),
            label=label,
            microseconds=elapsed * 1e6,
            gigabytes_per_second=cost.bytes_moved / elapsed / 1e9,
            share_of_bandwidth=cost.bytes_moved / elapsed / bandwidth,
            share_of_floor=cost.floor_seconds(device) / elapsed,
            rivals={},
        )
        if op == "paged_attention":
            bf16 = dataclasses.replace(case, kv_dtype="bfloat16", scales=False)
            row["rivals"]["ours, bf16 KV"] = _time(op, bf16, device) * 1e6
        named = rivals.of_matmul(case) if op == "int4_matmul" else rivals.of_attention(case)
        for name, function, arguments in named:
            try:
                copies = timing.copies_of(arguments, device.l2_bytes)
                row["rivals"][name] = timing.seconds(function, copies) * 1e6
            except Exception as error:  # a rival may refuse a shape in any way it likes
                row["rivals"][name] = f"failed: {type(error).__name__}"
        by_torch = rivals.torch_seconds(case, device.l2_bytes)
        if by_torch is not None:
            row["rivals"]["torch bf16"] = by_torch * 1e6
        rows.append(row)
    print(f"\n{'call':52} {'us':>8} {'GB/s':>6} {'band':>5} {'floor':>5}  rivals, us")
    for row in rows:
        shown = ", ".join(
            f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row["rivals"].items()
        )
        print(
            f"{row['label']:52} {row['microseconds']:8.1f} {row['gigabytes_per_second']:6.0f} "
            f"{row['share_of_bandwidth']:5.2f} {row['share_of_floor']:5.2f}  {shown}"
        )
    if skipped:
        print(f"not measured, the {BUDGET_SECONDS} s were over: {', '.join(skipped)}")
    return dict(device=jax.devices()[0].device_kind, jax=jax.__version__, bandwidth=bandwidth,
                rows=rows, skipped=skipped)  # fmt: skip


def tune(device: Device) -> dict:
    """Times candidates around the present configuration of each shipped case; keeps the fastest.

    Shapes that no run has measured yet come first: what one run has no time for, the next one does.
    """
    start = time.monotonic()
    entries: dict[str, list[dict]] = {"int4_matmul": [], "paged_attention": []}
    done, todo = 0, sorted(compile_cases.model_cases(), key=lambda c: _is_measured(device, *c))
    for op, case in todo:
        if time.monotonic() - start > BUDGET_SECONDS:
            break
        configs = matmul_configs if op == "int4_matmul" else attention_configs
        timed = []
        for config in candidates(op, case, device):
            try:
                timed.append((_time(op, case, device, config), config))
            except Exception as error:  # does not fit, or spills: not a candidate
                print(f"{config} refused: {type(error).__name__}")
        if not timed:
            continue
        elapsed, best = min(timed, key=lambda pair: pair[0])
        floor = _cost(op, case).floor_seconds(device)
        entries[op].append(
            dict(key=configs.key_of_case(case), config=dataclasses.asdict(best), status="measured",
                 microseconds=round(elapsed * 1e6, 2), floor_microseconds=round(floor * 1e6, 2),
                 share_of_floor=round(floor / elapsed, 4), case=dataclasses.asdict(case))
        )  # fmt: skip
        done += 1
        print(f"{compile_cases.describe(op, dataclasses.asdict(case)):52} {elapsed * 1e6:8.1f} us")
    for op, found in entries.items():
        path = tuning.store(device.key, op, found)
    most_rows, by_rows = rows_limit(device)
    path = tuning.store_max_kernel_rows(device.key, most_rows)
    print(f"{done} of {len(todo)} shapes measured, written to {path}")
    print(f"the kernel is taken up to {most_rows} rows, XLA's matmul beyond")
    return dict(device=device.key, entries=entries, max_kernel_rows=most_rows, by_rows=by_rows)


def _is_measured(device: Device, op: str, case) -> bool:
    configs = matmul_configs if op == "int4_matmul" else attention_configs
    entry = tuning.lookup(device.key, op, configs.key_of_case(case))
    return entry is not None and entry["status"] == "measured"


def rows_limit(device: Device) -> tuple[int, list[dict]]:
    """The most rows for which the kernel beats XLA on the dequantised weight, and the times.

    Measured on one matrix of medium size, 4096 x 4096.
    """
    most, times = 0, []
    for rows in matmul_configs.ROW_BUCKETS:
        case = matmul_shapes.Case(rows, 4096, 4096)
        kernel, xla = (_time("int4_matmul", case, device, backend=b) for b in ("triton", "xla"))
        times.append(dict(rows=rows, kernel=kernel * 1e6, xla=xla * 1e6))
        if kernel > xla:
            break
        most = rows
    return most, times


def candidates(op: str, case, device: Device) -> list:
    """The present configuration and its neighbours that can cut the case."""
    if op == "int4_matmul":
        problem: Any = matmul_configs.problem_of_case(case)
        base: Any = matmul_configs.rule(problem, device)
        check: Any = matmul_configs.check_config
        changes: list[dict] = [
            {},
            dict(split_k=max(1, base.split_k // 2)),
            dict(split_k=base.split_k * 2),
            dict(num_stages=base.num_stages + 1),
            dict(num_warps=4, block_n=128),
            dict(scaling="pre"),
        ]
    else:
        problem = attention_configs.problem_of_case(case)
        base = attention_configs.rule(problem, device)
        check = attention_configs.check_config
        other = "bits" if base.fp8_decode == "cvt" else "cvt"
        changes = [
            {},
            dict(num_splits=max(1, base.num_splits // 2)),
            dict(num_splits=base.num_splits * 2),
            dict(block_s=base.block_s * 2),
            dict(num_stages=2),
        ]
        if problem.kv_dtype == "fp8_e4m3" and device.capability >= (8, 9):
            changes.append(dict(fp8_decode=other))
    found = []
    for change in changes:
        config = dataclasses.replace(base, **change)
        try:
            check(problem, config)
        except ValueError:
            continue
        if config not in found:
            found.append(config)
    return found


if __name__ == "__main__":
    sys.exit(main())
