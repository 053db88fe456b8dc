"""`helios replay`: recorded traffic, sent at its own times to an engine in this process."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from helios_jax.cli import options
from helios_jax.cli.options import Debug

_TRAFFIC = "Traffic"
_SERVING = "Serving"


def _option(panel: str, help: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, rich_help_panel=panel, help=help, **more)


def replay(
    trace: Annotated[
        Path,
        typer.Argument(
            help="Azure's or BurstGPT's .csv, Mooncake's .jsonl, or an engine's recording."
        ),
    ],
    model: Annotated[str, typer.Argument(help="A model as for generate.")] = options.DEFAULT_MODEL,
    ladder: Annotated[
        bool,
        typer.Option(
            "--ladder",
            help="Five configurations on the same trace: 16-bit weights with multi-head attention, "
            "then 4-bit weights, grouped queries with FP8 KV, speculation, and deadlines.",
        ),
    ] = False,
    row: Annotated[
        list[int] | None, typer.Option("--row", help="Only these rows of it, 1 to 5; repeatable.")
    ] = None,
    quantised: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --ladder: the 4-bit checkpoint, where MODEL is not one itself.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Replay to a running `helios serve` of MODEL instead; serving options are its "
            "own, but --max-model-len, which lengths are cut to.",
        ),
    ] = None,
    start_seconds: Annotated[float, _option(_TRAFFIC, "Skip so much of the recording.")] = 0.0,
    window_seconds: Annotated[
        float | None, _option(_TRAFFIC, "Replay so much of it. Default: all.")
    ] = None,
    sample: Annotated[float, _option(_TRAFFIC, "Share of the requests that is kept.")] = 1.0,
    time_stretch: Annotated[
        float, _option(_TRAFFIC, "What arrival times are multiplied with; 0.1 is ten times faster.")
    ] = 1.0,
    length_scale: Annotated[float, _option(_TRAFFIC, "What lengths are multiplied with.")] = 1.0,
    max_prompt: Annotated[
        int | None, _option(_TRAFFIC, "Longest prompt. Default: half of max-model-len.")
    ] = None,
    max_output: Annotated[
        int | None, _option(_TRAFFIC, "Longest output. Default: half of max-model-len.")
    ] = None,
    ttft_target_seconds: Annotated[
        list[float] | None,
        _option(
            _TRAFFIC,
            "Dealt at random, shorter ones with better priority; repeatable.",
            "--ttft-target-seconds",
        ),
    ] = None,
    tpot_target_seconds: Annotated[float, _option(_TRAFFIC, "Of requests with a target.")] = 0.2,
    goodput: Annotated[
        list[str] | None,
        _option(
            _TRAFFIC,
            "What counts as good, as in vLLM: ttft:500 tpot:100 e2el:5000 (ms); "
            "repeatable. Default: the requests' targets.",
            "--goodput",
        ),
    ] = None,
    text: Annotated[
        Path | None, _option(_TRAFFIC, "Cut prompts from this file, not Python's reference.")
    ] = None,
    temperature: Annotated[float, _option(_TRAFFIC, "0 is greedy.")] = 0.0,
    seed: Annotated[int, _option(_TRAFFIC, "Of sample, targets, prompts and sampling.")] = 0,
    dtype: options.Dtype = "auto",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    kv_watermark: options.KvWatermark = 4000,
    prompt_lookup: options.PromptLookup = None,
    draft: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    policy: Annotated[
        str, _option(_SERVING, "deadline, priority, fcfs, shortest or MODULE:FUNCTION.")
    ] = "deadline",
    max_model_len: Annotated[int, _option(_SERVING, "Longest sequence.")] = 1024,
    max_num_seqs: Annotated[int, _option(_SERVING, "Requests running at a time.")] = 8,
    max_num_batched_tokens: Annotated[int, _option(_SERVING, "Tokens of a step.")] = 512,
    kv_cache_memory_bytes: Annotated[
        int | None, _option(_SERVING, "Of the KV pool; small ones preempt.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the report there: vLLM's field names."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table there too.")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Fit what steps cost to this run, for `simulate --costs`; not with --ladder.",
        ),
    ] = None,
    predict: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Simulate the same requests too, with costs that --costs wrote of another run.",
        ),
    ] = None,
    plot: options.PlotPath = None,
    debug: Debug = False,
) -> None:
    """Replay recorded traffic in an open loop, and say what each request had to wait.

    Requests come at their recorded times whether earlier ones are done or not. Prompts are real
    text of the recorded lengths; outputs go on until the recorded length. Programs are compiled
    before; what was compiled all the same while it ran is counted. Ctrl-C reports what came so far.
    """
    from rich.console import Console
    from rich.table import Table

    from helios_jax.bench.ladder import ladder_markdown, run_ladder
    from helios_jax.bench.replay import Serving, Traffic, predicted, replay_to_server
    from helios_jax.bench.replay import replay as run
    from helios_jax.calibrate.record import circumstances
    from helios_jax.config import require
    from helios_jax.replay.calibration import costs_from_json, fit_costs, to_json
    from helios_jax.replay.report import TABLE, cells
    from helios_jax.replay.report import markdown as to_markdown
    from helios_jax.replay.serving import State

    for name, path in (("json", json_path), ("markdown", markdown), ("costs", costs)):
        options.check_folder(name, path)
    options.check_plot(plot)
    rows = tuple(number - 1 for number in row or range(1, 6))
    require(
        bool(ladder) or not (row or quantised),
        "row, quantised: are for --ladder; add it, or leave them out",
    )
    require(set(rows) <= set(range(5)), f"row={row}: must be in 1..5")
    require(not (ladder and (costs or predict)), "costs, predict: of which row? leave --ladder out")
    require(
        server is None or not (ladder or costs or predict),
        "server: has one configuration, and its steps are not seen; leave --ladder, --costs and "
        "--predict out",
    )
    speculating = options.speculating(prompt_lookup, draft, speculative_config)
    require(
        not (speculating and (costs or predict)),
        "costs, predict: are of plain decoding; leave --prompt-lookup, --draft and "
        "--speculative-config out",
    )
    given_costs = None if predict is None else json.loads(predict.read_text())
    if given_costs is not None:
        costs_from_json(given_costs)
    sys.path.insert(0, os.getcwd())
    traffic = Traffic(
        trace=str(trace),
        start_seconds=start_seconds,
        window_seconds=window_seconds,
        sample=sample,
        time_stretch=time_stretch,
        length_scale=length_scale,
        max_prompt=max_prompt,
        max_output=max_output,
        ttft_target_seconds=tuple(ttft_target_seconds or ()),
        tpot_target_seconds=tpot_target_seconds,
        text=None if text is None else str(text),
        temperature=temperature,
        seed=seed,
    )
    serving = Serving(
        model=model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_watermark=kv_watermark,
        policy=policy,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        **speculating,
    )
    goals = _goals(goodput)

    def write(report: dict[str, Any], text: str) -> None:
        if json_path is not None:
            json_path.write_text(json.dumps(report, indent=2) + "\n")
        if markdown is not None:
            markdown.write_text(text)

    report: dict[str, Any]
    with Console(stderr=True).status("") as status:
        saying = ""

        def say(words: str) -> None:
            nonlocal saying
            saying = words
            status.update(words)

        def watch(state: State) -> None:
            status.update(
                f"{saying}: {state.seconds:.0f} s, {state.num_ended} of {state.num_requests} done, "
                f"{state.num_sent - state.num_ended} in flight, {state.num_tokens} tokens"
            )

        if ladder:
            report = run_ladder(
                traffic, serving, quantised=quantised, rows=rows, goodput=goals, say=say,
                watch=watch,
            )  # fmt: skip
            reports = {each["name"]: each["report"] for each in report["ladder"]}
            text_of = ladder_markdown(report)
        elif server is not None:
            report = {"circumstances": circumstances()} | replay_to_server(
                traffic, server, model, max_model_len=max_model_len, goodput=goals, say=say,
                watch=watch,
            )  # fmt: skip
            reports = {server: report}
            text_of = to_markdown(reports)
        else:
            replayed = run(traffic, serving, goodput=goals, say=say, watch=watch)
            report = {"circumstances": circumstances()} | replayed.report
            reports = {model: report}
            text_of = to_markdown(reports)
            # Before what else is made of it, which a run of few requests may not suffice for.
            write(report, text_of)
            if costs is not None:
                limits = replayed.scheduler_config
                fitted = fit_costs(replayed.steps, limits)
                about = {key: report[key] for key in ("circumstances", "traffic", "serving")}
                costs.write_text(json.dumps(about | to_json(fitted, limits), indent=2) + "\n")
            if given_costs is not None:
                status.update("simulating the same requests")
                report["predicted"] = predicted(replayed, given_costs)
    write(report, text_of)
    # A column per run: as rows, fifteen figures would not fit a terminal.
    table = Table("")
    for name in reports:
        table.add_column(name, justify="right")
    for title, *values in zip(TABLE.values(), *map(cells, reports.values()), strict=True):
        table.add_row(title, *values)
    console = Console()
    console.print(table)
    for name, each in reports.items():
        console.print(
            f"{name}: {each['completed']} of {each['num_prompts']} requests in "
            f"{each['duration']:.0f} s"
            + (" (interrupted)" if each["is_interrupted"] else "")
            + (
                f"; {each['weights']}; programs compiled while it ran: {each['num_new_programs']}"
                if "weights" in each
                else f"; {each['failed']} failed"
            ),
            highlight=False,
        )
    if "predicted" in report:
        found = report["predicted"]
        of_measured = {
            name: "–" if ratio is None else f"{ratio:.2f}"
            for name, ratio in found["ratios"].items()
        }
        console.print(
            f"simulated with {predict}: median TTFT {1e3 * found['ttft_p50_seconds']:.0f} ms "
            f"({of_measured['median_ttft']} of the measured one), "
            f"{found['output_throughput']:.1f} tokens/s in all "
            f"({of_measured['output_throughput']})",
            highlight=False,
        )
    if plot is not None:
        from helios_jax import plots

        plots.save(plots.replay_picture(reports), plot)


def _goals(entries: list[str] | None) -> dict[str, float] | None:
    """{"ttft": ms, …} of vLLM's NAME:MS; ValueError for another form."""
    if not entries:
        return None
    goals = {}
    for entry in entries:
        name, colon, limit = entry.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = -1.0
        if name not in ("ttft", "tpot", "e2el") or not colon or not value > 0:
            raise ValueError(
                f"goodput={entry!r}: must be ttft:MS, tpot:MS or e2el:MS, with a time above 0"
            )
        goals[name] = value
    return goals
