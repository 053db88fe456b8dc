"""`helios bench`: measurements that anybody can repeat."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from helios_jax.cli import options
from helios_jax.cli.options import Debug

app = typer.Typer(
    name="bench", help="Measure speed and memory, alone or beside other engines.",
    no_args_is_help=True,
)  # fmt: skip


@app.callback()
def _bench() -> None:
    """Verbs of `helios bench`; without this typer would drop the name of an only verb."""


@app.command()
def generate(
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    batch_size: Annotated[
        list[int] | None,
        typer.Option("--batch-size", help="Rows that decode together; repeatable. Default: 1, 8."),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Length of the prompt whose prefill is timed. Default: 512; --cold-start: 32."
        ),
    ] = None,
    context_tokens: Annotated[
        int, typer.Option(help="Length of the prompts that decoding starts after.")
    ] = 32,
    output_tokens: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 128,
    against: Annotated[
        list[str] | None,
        typer.Option("--against", help="transformers or llama.cpp; repeatable."),
    ] = None,
    peer_dtype: Annotated[
        str, typer.Option(help="transformers' weights: bfloat16 or float32.")
    ] = "bfloat16",
    peer_python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="A Python interpreter that has the peers, where this one has not.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Processes per engine; the median counts.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the random prompts.")] = 0,
    cold_start: Annotated[
        bool,
        typer.Option(
            "--cold-start",
            help="Instead: time whole processes up to their first token, with an empty compilation "
            "cache and with a warm one, and their peak memory.",
        ),
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there too.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure decode and prefill rates, with --against beside other engines.

    Every engine runs in processes of its own, in turn. Prompts are random token ids, decoding is
    greedy and goes on after the end-of-sequence token; compilation and warm-up are not timed.
    """
    from rich.console import Console

    from helios_jax.bench import Workload, compare, measure_cold_start, tables

    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ValueError(f"json={str(json_path)!r}: its folder must exist")
    console = Console()
    status = Console(stderr=True).status("")

    def show(text: str) -> None:
        status.update(text)

    report: dict[str, Any]
    with status:
        if cold_start:
            if against:
                raise ValueError(
                    "against, cold_start: peers are measured warm only; leave one option away"
                )
            report = measure_cold_start(
                model,
                dtype=dtype,
                prompt_tokens=32 if prompt_tokens is None else prompt_tokens,
                output_tokens=output_tokens,
                repeats=repeats,
                seed=seed,
                progress=show,
            )
        else:
            workload = Workload(
                model=model,
                dtype=dtype,
                peer_dtype=peer_dtype,
                batch_sizes=tuple(batch_size or (1, 8)),
                prompt_tokens=512 if prompt_tokens is None else prompt_tokens,
                context_tokens=context_tokens,
                output_tokens=output_tokens,
                repeats=repeats,
                seed=seed,
            )
            report = compare(workload, against or (), peer_python, show)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if cold_start:
        console.print(tables.cold_start_table(report))
        console.print(report["cold_start"]["weights"], highlight=False)
    else:
        console.print(tables.comparison_table(report))
        for line in tables.describe_engines(report):
            console.print(line, highlight=False)
    console.print(tables.describe_machine(report["machine"]), highlight=False)
