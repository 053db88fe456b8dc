"""`helios profile`: what a decode step moves, by part, and how long that takes and must take."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from helios_jax.cli import options
from helios_jax.cli.options import Debug


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="A model as for generate; llama-3-8b, or a folder with nothing but a config.json, "
            "is predicted for and not measured."
        ),
    ] = options.DEFAULT_MODEL,
    batch_size: Annotated[int, typer.Option(help="Rows that decode together.")] = 1,
    context_tokens: Annotated[int, typer.Option(help="Cached tokens of each row.")] = 512,
    dtype: options.Dtype = "auto",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    prompt_lookup: options.PromptLookup = None,
    draft: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", help="a100, l4, h100, h200 or b200, as in their data sheets; repeatable."
        ),
    ] = None,
    efficiency: Annotated[
        float, typer.Option(help="Share of a GPU's data sheet that is taken to be reached.")
    ] = 1.0,
    weight_bits: Annotated[
        int, typer.Option(help="Of the linears, where there is only a configuration.")
    ] = 4,
    repeats: Annotated[int, typer.Option(help="Steps that are timed; the median counts.")] = 20,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write a trace of jax.profiler there, its operations named after the parts.",
        ),
    ] = None,
    plot: options.PlotPath = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there too.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Count the bytes of a decode step by part; measure the step beside this machine's bandwidth.

    A step that reached the bandwidth would take the floor's time; the roofline share says how near
    it comes. For GPUs the floor is predicted from their data sheets.
    """
    from rich.console import Console

    from helios_jax.bench import tables
    from helios_jax.bench.profile import ProfileJob, gpu_kv_bits, profile_config
    from helios_jax.bench.profile import profile as measure
    from helios_jax.profiler import GPUS, Formats

    options.check_folder("json", json_path)
    options.check_plot(plot)
    job = ProfileJob(
        num_rows=batch_size,
        context_tokens=context_tokens,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        gpus=tuple(gpu or GPUS),
        efficiency=efficiency,
        repeats=repeats,
        trace=None if trace is None else str(trace),
        **options.speculating(prompt_lookup, draft, speculative_config),
    )
    config = options.bare_config(model)
    report: dict[str, Any]
    with Console(stderr=True).status("") as status:
        if config is None:
            report = measure(model, job, status.update)
        else:
            formats = Formats(weight_bits=weight_bits, kv_bits=gpu_kv_bits(kv_cache_dtype))
            report = profile_config(model, config, formats, job)
    console = Console()
    console.print(tables.profile_table(report))
    console.print(tables.gpu_table(report))
    for line in tables.describe_profile(report):
        console.print(line, highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if plot is not None:
        from helios_jax import plots

        plots.save(plots.profile_picture(report), plot)
