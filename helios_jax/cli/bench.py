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

_PeerPython = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="A Python interpreter that has the peers, where this one has not.",
    ),
]
_Seed = Annotated[int, typer.Option(help="Of the random prompts.")]
_JsonPath = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the report there too.")
]


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
    peer_python: _PeerPython = None,
    repeats: Annotated[int, typer.Option(help="Processes per engine; the median counts.")] = 3,
    seed: _Seed = 0,
    cold_start: Annotated[
        bool,
        typer.Option(
            "--cold-start",
            help="Instead: time whole processes up to their first token, with an empty compilation "
            "cache and with a warm one, and their peak memory.",
        ),
    ] = False,
    json_path: _JsonPath = None,
    debug: Debug = False,
) -> None:
    """Measure decode and prefill rates, with --against beside other engines.

    Every engine runs in processes of its own, in turn. Prompts are random token ids, decoding is
    greedy and goes on after the end-of-sequence token; compilation and warm-up are not timed.
    """
    from rich.console import Console

    from helios_jax.bench import Workload, compare, measure_cold_start, tables

    _check_folder(json_path)
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
    _write(report, json_path)
    if cold_start:
        console.print(tables.cold_start_table(report))
        console.print(report["cold_start"]["weights"], highlight=False)
    else:
        console.print(tables.comparison_table(report))
        for line in tables.describe_engines(report):
            console.print(line, highlight=False)
    console.print(tables.describe_machine(report["machine"]), highlight=False)


@app.command()
def serve(
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="single (one request), batch (requests of one size), mix (of mixed lengths), "
            "fairness (behind a long prompt, shared beginnings); repeatable. Default: all.",
        ),
    ] = None,
    num_requests: Annotated[int, typer.Option(help="Of the part mix.")] = 64,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Their lengths: a trace of Azure (.csv) or Mooncake (.jsonl). Default: drawn.",
        ),
    ] = None,
    trace_scale: Annotated[
        float, typer.Option(help="What the trace's lengths are multiplied with.")
    ] = 1.0,
    against: Annotated[
        str | None,
        typer.Option("--against", help="transformers: also the part batch, in its own process."),
    ] = None,
    peer_python: _PeerPython = None,
    pairs: Annotated[
        int, typer.Option(help="Measurements of each kind in a process; medians count.")
    ] = 3,
    repeats: Annotated[int, typer.Option(help="Processes.")] = 1,
    seed: _Seed = 0,
    json_path: _JsonPath = None,
    debug: Debug = False,
) -> None:
    """Measure the serving engine beside the pure generate(), static batches and transformers.

    Both take turns, from submission to the last token, warm. Prompts are random token ids, decoding
    is greedy and goes on after the end-of-sequence token. Every row states its bar.
    """
    from rich.console import Console

    from helios_jax.bench import ServingWorkload, measure_serving, tables
    from helios_jax.bench.serving_workload import PARTS

    _check_folder(json_path)
    workload = ServingWorkload(
        model=model,
        dtype=dtype,
        parts=tuple(part or PARTS),
        mix_requests=num_requests,
        trace=trace,
        trace_scale=trace_scale,
        pairs=pairs,
        repeats=repeats,
        seed=seed,
    )
    status = Console(stderr=True).status("")
    with status:
        report = measure_serving(workload, against, peer_python, status.update)
    _write(report, json_path)
    console = Console()
    console.print(tables.serving_table(report))
    for line in tables.describe_serving(report):
        console.print(line, highlight=False)
    console.print(tables.describe_machine(report["machine"]), highlight=False)


@app.command()
def speculative(
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="JSONL: an object a line with prompt, messages or turns, and perhaps category.",
        ),
    ],
    model: options.Model = options.DEFAULT_MODEL,
    prompt_lookup: options.PromptLookup = None,
    draft: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    dtype: options.Dtype = "auto",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    category: Annotated[
        list[str] | None, typer.Option("--category", help="Only these; repeatable. Default: all.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of a category at most. Default: all.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(help="Of each prompt, at most.")] = 128,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Of the tokens drawn.")] = 0,
    json_path: _JsonPath = None,
    debug: Debug = False,
) -> None:
    """Measure decoding with and without speculation on the prompts of a file, by category.

    Every prompt is asked alone, of two engines in turn; rates count the tokens after the first.
    Without another choice prompt lookup drafts, as many tokens as pay.
    """
    from rich.console import Console

    from helios_jax.bench import SpeculationWorkload, measure_speculation, tables

    _check_folder(json_path)
    chosen = options.speculating(prompt_lookup, draft, speculative_config)
    workload = SpeculationWorkload(
        prompts=str(prompts),
        speculative_config=chosen.get("speculative_config", {"method": "ngram"}),
        model=model,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        categories=tuple(category or ()),
        limit=limit,
        output_tokens=output_tokens,
        temperature=temperature,
        seed=seed,
    )
    status = Console(stderr=True).status("")
    with status:
        report = measure_speculation(workload, status.update)
    _write(report, json_path)
    console = Console()
    console.print(tables.speculation_table(report))
    for line in tables.describe_speculation(report):
        console.print(line, highlight=False)
    console.print(tables.describe_machine(report["machine"]), highlight=False)


@app.command()
def server(
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
    num_streams: Annotated[int, typer.Option(help="Requests streamed side by side.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="Of each.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Of each.")] = 128,
    pairs: Annotated[int, typer.Option(help="Measurements of each kind; medians count.")] = 5,
    seed: _Seed = 0,
    json_path: _JsonPath = None,
    debug: Debug = False,
) -> None:
    """Measure what the gRPC server costs beside the engine in process.

    A server in a process of its own and an engine in the clients' process take turns at the same
    requests. Prompts are random token ids, decoding is greedy.
    """
    from rich.console import Console

    from helios_jax.bench import ServerWorkload, describe_server, measure_server, tables

    _check_folder(json_path)
    workload = ServerWorkload(
        model=model,
        dtype=dtype,
        num_streams=num_streams,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        pairs=pairs,
        seed=seed,
    )
    status = Console(stderr=True).status("")
    with status:
        report = measure_server(workload, status.update)
    _write(report, json_path)
    console = Console()
    for line in describe_server(report):
        console.print(line, highlight=False)
    console.print(tables.describe_machine(report["machine"]), highlight=False)


def _check_folder(json_path: Path | None) -> None:
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ValueError(f"json={str(json_path)!r}: its folder must exist")


def _write(report: dict[str, Any], json_path: Path | None) -> None:
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
