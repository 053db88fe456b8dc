"""`helios simulate`: a recorded trace, served by the scheduler in simulated time."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from helios_jax.cli.options import Debug

_COLUMNS = {
    "ttft_met": "TTFT met",
    "tpot_met": "TPOT met",
    "ttft_p50_seconds": "TTFT p50",
    "ttft_p95_seconds": "p95, s",
    "preemption_rate": "preempted",
    "num_recomputed_tokens": "recomputed",
    "prefix_hit_rate": "prefix hits",
    "num_refused": "refused",
}


def simulate(
    trace: Annotated[
        Path, typer.Argument(help="Azure's LLM inference .csv, or Mooncake's .jsonl.")
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME|MODULE:FUNCTION",
            help="deadline, priority, fcfs, shortest, or a function of yours, looked for in this "
            "folder too; repeatable. Default: deadline, fcfs, priority.",
        ),
    ] = None,
    load: Annotated[
        list[float] | None,
        typer.Option(
            "--load",
            help="Speed the arrivals up or down: 1 offers as much in a second as the machine can "
            "serve of this trace; repeatable. Default: as recorded.",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="llama-3-8b, or a folder with a config.json.")
    ] = "llama-3-8b",
    gpu: Annotated[str, typer.Option(help="a100, l4, h100 or h200, as in their data sheets.")] = (
        "h100"
    ),
    efficiency: Annotated[
        float, typer.Option(help="Share of the data sheet's bandwidth and flops that is reached.")
    ] = 0.6,
    weight_bits: Annotated[int, typer.Option(help="Of the linears: 16, 8, 4 or 3.")] = 4,
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8 or bfloat16.")] = "fp8",
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the memory for weights and KV cache.")
    ] = 0.9,
    kv_cache_bytes: Annotated[
        float | None, typer.Option(help="Of the KV cache, instead of what the weights leave.")
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(help="Longest request; longer ones are refused.")
    ] = 32_768,
    max_num_seqs: Annotated[int, typer.Option(help="Requests running at a time.")] = 128,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens per step.")] = 2048,
    ttft_target_seconds: Annotated[
        list[float] | None,
        typer.Option(
            "--ttft-target-seconds",
            help="Dealt to the requests at random; shorter ones have the better priority; "
            "repeatable. Default: 1, 8.",
        ),
    ] = None,
    tpot_target_seconds: Annotated[float, typer.Option(help="Of every request.")] = 0.1,
    num_requests: Annotated[
        int | None, typer.Option(help="Serve the first ones only. Default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the targets.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there too.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a recorded trace in simulated time, and count which targets each policy meets.

    The scheduler is the real one; what a step takes is the longer of moving its bytes and of doing
    its flops. Nothing is computed, so no GPU is needed.
    """
    from rich.console import Console
    from rich.table import Table

    from helios_jax import replay
    from helios_jax.profiler import Formats
    from helios_jax.scheduler import find_policy

    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ValueError(f"json={str(json_path)!r}: its folder must exist")
    for offered in load or ():
        if offered <= 0:
            raise ValueError(f"load={offered}: must be above 0")
    kv_bits = {"fp8": 8, "bfloat16": 16}
    if kv_cache_dtype not in kv_bits:
        raise ValueError(f"kv_cache_dtype={kv_cache_dtype!r}: must be one of {', '.join(kv_bits)}")
    # As `python -m` does; an installed command looks in its own folder only.
    sys.path.insert(0, os.getcwd())
    policies = {name: find_policy(name) for name in policy or ("deadline", "fcfs", "priority")}
    requests = replay.read_trace(trace)
    if num_requests is not None:
        requests = requests.head(num_requests)
    machine = replay.machine(
        _model(model),
        gpu,
        Formats(weight_bits=weight_bits, kv_bits=kv_bits[kv_cache_dtype]),
        efficiency=efficiency,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    targets = replay.deal_targets(
        len(requests), ttft_target_seconds or [1.0, 8.0], tpot_target_seconds, seed
    )
    console = Console()
    table = Table("load", "policy", *_COLUMNS.values())
    runs = []
    with Console(stderr=True).status("") as status:
        status.update("how long the machine takes at least")
        capacity = replay.saturation_seconds(requests, machine)
        recorded = capacity / max(float(requests.arrival_seconds[-1]), 1e-9)
        for offered in load or [recorded]:
            arriving = requests.at_load(offered / recorded)
            for name, function in policies.items():
                status.update(f"load {offered:.2f}, {name}")
                outcome = replay.simulate(
                    arriving, targets, machine.config, machine.step_seconds, function
                )
                summary = replay.summarize(arriving, targets, outcome)
                runs.append({"load": offered, "policy": name, **summary})
                cells = [f"{summary[key]:.4g}" for key in _COLUMNS]
                table.add_row(f"{offered:.2f}", name, *cells)
    console.print(table)
    console.print(
        f"{len(requests)} requests; recorded at a load of {recorded:.2f}; {model}, "
        f"{weight_bits}-bit weights, {kv_cache_dtype} KV, {gpu} at {efficiency:.0%}, "
        f"{machine.config.num_blocks * replay.BLOCK_TOKENS} tokens of KV cache",
        highlight=False,
    )
    if json_path is not None:
        json_path.write_text(json.dumps(runs, indent=2) + "\n")


def _model(name: str):
    from helios_jax.replay import MODELS

    if name in MODELS:
        return MODELS[name]
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"model={name!r}: must be one of {', '.join(MODELS)}, or a folder with a config.json"
        )
    from checkpoints_conv.huggingface_config import huggingface_config

    return huggingface_config(folder)
