"""`helios simulate`: a recorded trace, served by the scheduler in simulated time."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from helios_jax.cli import options
from helios_jax.cli.options import Debug

_COLUMNS = {
    "ttft_met": "TTFT met",
    "tpot_met": "TPOT met",
    "ttft_p50_seconds": "TTFT p50",
    "ttft_p95_seconds": "p95, s",
    "output_throughput": "tok/s",
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
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="All combinations of policies, loads, pool sizes, watermarks and seeds side by "
            "side (vmap), and the highest load at which --wanted of the TTFT targets are met.",
        ),
    ] = False,
    wanted: Annotated[float, typer.Option(help="With --sweep: share of targets.")] = 0.95,
    load: Annotated[
        list[float] | None,
        typer.Option(
            "--load",
            help="Arrivals at this load instead: 1 offers as much in a second as the machine can "
            "serve of this trace; repeatable. Default: as recorded.",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="llama-3-8b, llama-2-7b, llama-2-7b-gqa, or a folder with a config.json.",
        ),
    ] = "llama-3-8b",
    gpu: Annotated[
        str, typer.Option(help="a100, l4, h100, h200 or b200, as in their data sheets.")
    ] = "h100",
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instead of a GPU: an engine as `helios replay --costs` measured it, with the "
            "limits it had then.",
        ),
    ] = None,
    acceptance_rate: Annotated[
        float | None, typer.Option(help="Speculate: share of draft tokens that are accepted.")
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(help="Draft tokens a round.")] = 4,
    draft_cost: Annotated[
        float, typer.Option(help="Of a draft step, relative to a plain decode step.")
    ] = 0.02,
    efficiency: Annotated[
        float, typer.Option(help="Share of the data sheet's bandwidth and flops that is reached.")
    ] = 0.6,
    weight_bits: Annotated[int, typer.Option(help="Of the linears: 16, 8, 4 or 3.")] = 4,
    kv_cache_dtype: Annotated[str, typer.Option(help="fp8 or bfloat16.")] = "fp8",
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the memory for weights and KV cache.")
    ] = 0.9,
    kv_cache_bytes: Annotated[
        list[float] | None,
        typer.Option(
            "--kv-cache-bytes",
            help="Of the KV cache, instead of what the weights leave; repeatable with --sweep.",
        ),
    ] = None,
    kv_watermark: Annotated[
        list[float] | None,
        typer.Option(
            "--kv-watermark",
            help="With fp8: longer sequences use 16 bits; repeatable with --sweep. Default: none.",
        ),
    ] = None,
    start_seconds: Annotated[float, typer.Option(help="Skip so much of the trace.")] = 0.0,
    window_seconds: Annotated[
        float | None, typer.Option(help="Serve so much of it. Default: all.")
    ] = None,
    sample: Annotated[float, typer.Option(help="Share of the requests that is kept.")] = 1.0,
    time_stretch: Annotated[
        float,
        typer.Option(help="What arrival times are multiplied with; 0.1 is ten times faster."),
    ] = 1.0,
    length_scale: Annotated[float, typer.Option(help="What lengths are multiplied with.")] = 1.0,
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
    seed: Annotated[
        list[int] | None,
        typer.Option("--seed", help="Of the targets; repeatable with --sweep. Default: 0."),
    ] = None,
    plot: options.PlotPath = None,
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

    from helios_jax import replay
    from helios_jax.config import require
    from helios_jax.scheduler import find_policy

    options.check_folder("json", json_path)
    options.check_plot(plot)
    for offered in load or ():
        require(offered > 0, f"load={offered}: must be above 0")
    require(sweep or plot is None, "plot: draws a sweep; add --sweep, or leave it out")
    require(0 < wanted <= 1, f"wanted={wanted}: must be in (0, 1]")
    for name, values in (("kv_cache_bytes", kv_cache_bytes), ("kv_watermark", kv_watermark),
                         ("seed", seed)):  # fmt: skip
        require(
            sweep or len(values or ()) <= 1,
            f"{name}={values}: several are compared with --sweep; add it, or give one",
        )
    # As `python -m` does; an installed command looks in its own folder only.
    sys.path.insert(0, os.getcwd())
    policies = {name: find_policy(name) for name in policy or ("deadline", "fcfs", "priority")}
    requests = replay.read_trace(trace).cut(
        start_seconds=start_seconds,
        window_seconds=window_seconds,
        sample=sample,
        num_requests=num_requests,
        time_stretch=time_stretch,
        length_scale=length_scale,
        seed=(seed or [0])[0],
    )
    if costs is not None:
        machine, what = _measured_machine(costs), f"costs of {costs.name}"
    else:
        machine = _gpu_machine(
            model, gpu, weight_bits, kv_cache_dtype, acceptance_rate, num_draft_tokens, draft_cost,
            efficiency=efficiency,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_bytes=max(kv_cache_bytes) if kv_cache_bytes else None,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )  # fmt: skip
        what = f"{model}, {weight_bits}-bit weights, {kv_cache_dtype} KV, {gpu} at {efficiency:.0%}"
        if acceptance_rate is not None:
            what += f", {num_draft_tokens} draft tokens accepted at {acceptance_rate:.0%}"
    if len(kv_watermark or ()) == 1 and not sweep:
        machine = dataclasses.replace(
            machine,
            config=dataclasses.replace(machine.config, kv_watermark=(kv_watermark or [])[0]),
        )
    ttft = ttft_target_seconds or [1.0, 8.0]

    def deal(number: int) -> "replay.Targets":
        return replay.deal_targets(len(requests), ttft, tpot_target_seconds, number)

    console = Console()
    report: dict[str, Any]
    runs: list[dict[str, Any]]
    with Console(stderr=True).status("") as status:
        status.update("how long the machine takes at least")
        capacity = replay.saturation_seconds(requests, machine)
        most = float(requests.num_output.sum()) / capacity
        recorded = capacity / max(float(requests.arrival_seconds[-1]), 1e-9)
        if sweep:
            report = _sweep(
                requests, machine, policies, load or [0.4, 0.6, 0.8, 1.0], recorded, deal,
                kv_cache_bytes, kv_watermark, seed or [0], wanted, status.update,
            )  # fmt: skip
            runs = report["runs"]
        else:
            targets = deal((seed or [0])[0])
            runs = []
            for offered in load or [recorded]:
                arriving = requests.at_load(offered / recorded)
                for name, function in policies.items():
                    status.update(f"load {offered:.2f}, {name}")
                    outcome = replay.simulate(
                        arriving, targets, machine.config, machine.step_seconds, function,
                        overlaps=machine.overlaps,
                    )  # fmt: skip
                    summary = replay.summarize(arriving, targets, outcome)
                    about = {"load": offered, "policy": name}
                    runs.append(about | summary | {"capacity_tokens_per_second": most})
            report = {"runs": runs}
    console.print(_table(runs, sweep))
    console.print(
        f"{len(requests)} requests; recorded at a load of {recorded:.2f}; {what}, "
        f"{machine.config.num_blocks * machine.config.narrow_block_tokens} tokens of KV cache",
        highlight=False,
    )
    if sweep:
        loads = [run["load"] for run in runs]
        for name, highest in report["highest_load"].items():
            shown = (
                "not at the lowest load" if highest is None else f"up to a load of {highest:.2f}"
            )
            if replay.is_lower_bound(highest, loads):
                shown += ", the highest one here"
            console.print(f"{name}: {wanted:.0%} of the TTFT targets are met {shown}")
        console.print(
            f"{len(runs)} lanes in {report['seconds']:.1f} s, "
            f"{report['compile_seconds']:.1f} s of compiling before",
            highlight=False,
        )
    if json_path is not None:
        # A plain run's JSON is its list of figures.
        written = report | {"what": what} if sweep else runs
        json_path.write_text(json.dumps(written, indent=2) + "\n")
    if plot is not None:
        from helios_jax import plots

        plots.save(plots.sweep_picture(report), plot)


def _table(runs: list[dict[str, Any]], is_sweep: bool):
    from rich.table import Table

    lane = ["kv_cache_blocks", "kv_watermark", "seed"] if is_sweep else []
    table = Table("load", "policy", *lane, *_COLUMNS.values())
    for run in runs:
        cells = ["–" if run[key] is None else f"{run[key]:.4g}" for key in (*lane, *_COLUMNS)]
        table.add_row(f"{run['load']:.2f}", run["policy"], *cells)
    return table


def _gpu_machine(
    model: str, gpu: str, weight_bits: int, kv_cache_dtype: str, acceptance_rate: float | None,
    num_draft_tokens: int, draft_cost: float, **limits: Any,
):  # fmt: skip
    from helios_jax import replay
    from helios_jax.config import require
    from helios_jax.profiler import Formats

    kv_bits = {"fp8": 8, "bfloat16": 16}
    require(
        kv_cache_dtype in kv_bits,
        f"kv_cache_dtype={kv_cache_dtype!r}: must be one of {', '.join(kv_bits)}",
    )
    config = options.bare_config(model)
    if config is None:
        raise ValueError(
            f"model={model!r}: must be one of {', '.join(replay.MODELS)}, or a folder with a "
            "config.json"
        )
    drafts = None
    if acceptance_rate is not None:
        drafts = replay.Drafts(acceptance_rate, num_draft_tokens, draft_cost)
    formats = Formats(weight_bits=weight_bits, kv_bits=kv_bits[kv_cache_dtype])
    return replay.machine(config, gpu, formats, drafts=drafts, **limits)


def _measured_machine(path: Path):
    from helios_jax import replay
    from helios_jax.config import require
    from helios_jax.replay.calibration import costs_from_json, scheduler_from_json

    fields = json.loads(path.read_text())
    require(isinstance(fields, dict), f"costs={str(path)!r}: must be a JSON object")
    return replay.Machine(scheduler_from_json(fields), costs_from_json(fields), overlaps=True)


def _sweep(
    requests, machine, policies, loads, recorded, deal, kv_cache_bytes, kv_watermark, seeds,
    wanted, say,
) -> dict[str, Any]:  # fmt: skip
    """All lanes at once."""
    from helios_jax import replay

    largest, most = machine.config.num_blocks, max(kv_cache_bytes or [1.0])
    pools = [max(1, int(largest * each / most)) for each in kv_cache_bytes or [most]]
    watermarks = kv_watermark or [None]
    lanes = [
        replay.Lane(policy, load / recorded, blocks, watermark, seed)
        for policy in policies
        for load in loads
        for blocks in pools
        for watermark in watermarks
        for seed in seeds
    ]
    say(f"compiling {len(lanes)} lanes")
    started = time.perf_counter()
    run_lanes = replay.compile_lanes(
        requests, lanes, policies, deal, machine.config, machine.step_seconds,
        overlaps=machine.overlaps,
    )  # fmt: skip
    compiled = time.perf_counter()
    say(f"{len(lanes)} lanes")
    outcomes = run_lanes()
    ended = time.perf_counter()
    runs = []
    for lane, outcome in zip(lanes, outcomes, strict=True):
        arriving, targets = requests.at_load(lane.load), deal(lane.seed)
        about = {
            "load": lane.load * recorded, "policy": lane.policy,
            "kv_cache_blocks": lane.num_blocks, "kv_watermark": lane.kv_watermark,
            "seed": lane.seed,
        }  # fmt: skip
        runs.append(about | replay.summarize(arriving, targets, outcome))

    def met(policy: str, load: float) -> float:
        shares = [
            run["ttft_met"] for run, lane in zip(runs, lanes, strict=True)
            if lane.policy == policy and lane.load == load / recorded
        ]  # fmt: skip
        return sum(shares) / len(shares)

    highest = {
        name: replay.highest_load(loads, [met(name, load) for load in loads], wanted)
        for name in policies
    }
    return {
        "runs": runs,
        "wanted": wanted,
        "highest_load": highest,
        "seconds": ended - compiled,
        "compile_seconds": compiled - started,
    }
