"""`helios evaluate`: perplexity, distance from a reference, and tasks, for one or more models."""

import json
from pathlib import Path
from typing import Annotated

import typer

from helios_jax.cli.options import Debug

_KV = "KV cache precision"


def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Known names, hf:org/name, .gguf files or folders.")
    ],
    against: Annotated[
        str | None, typer.Option("--against", help="A reference model to be compared with.")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", help="FILE or DOMAIN=FILE, text or .jsonl requests; repeatable."),
    ] = None,
    task: Annotated[
        list[Path] | None,
        typer.Option("--task", help="JSONL with prompt, answer, and choices or not; repeatable."),
    ] = None,
    kv_cache_dtype: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-cache-dtype",
            rich_help_panel=_KV,
            help="Instead: what keys and values in this format cost, by context length. bfloat16, "
            "float16, fp8_e4m3, fp8_e5m2, int8, k16v8 (keys in bfloat16, values in FP8), or all; "
            "repeatable.",
        ),
    ] = None,
    kv_calibration: Annotated[
        list[Path] | None,
        typer.Option(
            "--kv-calibration",
            rich_help_panel=_KV,
            help="Text to fit the scales to; default: the checkpoint's (calibrate-kv); repeatable.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            help="Tokens of a window. Default: 1024; 8192 with --kv-cache-dtype; at most the "
            "model's.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option("--stride", help="Tokens from window to window; default: half a context."),
    ] = None,
    max_text_tokens: Annotated[
        int | None, typer.Option("--max-text-tokens", help="Score no more of each text.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Longest generated answer of a task.")
    ] = 64,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Form of the weights; float32 is exact.")
    ] = "float32",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write results and circumstances here.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables here.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Measure a model on text and tasks, alone or against a reference."""
    from helios_jax.cli.steps import steps
    from helios_jax.config import require
    from helios_jax.llm import use_compilation_cache

    require(bool(text or task), "nothing to evaluate on: give --text FILE or --task FILE")
    require(
        max_text_tokens is None or max_text_tokens >= 2,
        f"max_text_tokens={max_text_tokens}: must be at least 2",
    )
    require(
        bool(kv_cache_dtype) or not kv_calibration,
        "kv_calibration: scales of which cache? give --kv-cache-dtype too",
    )
    use_compilation_cache()
    texts = dict(map(_named, text or []))
    require(
        len(texts) == len(text or []),
        f"text={text}: two files have the same name; name them with DOMAIN=FILE",
    )
    with steps("windows") as progress:
        if kv_cache_dtype:
            from helios_jax.calibrate.kv_evaluation import evaluate_kv, kv_markdown
            from helios_jax.calibrate.kv_precision import KV_DTYPES

            require(
                len(models) == 1 and not (against or task or stride),
                "kv_cache_dtype: takes one model and --text; leave --against, --task and --stride "
                "out",
            )
            report = evaluate_kv(
                models[0],
                [*KV_DTYPES] if "all" in kv_cache_dtype else kv_cache_dtype,
                texts,
                calibration=kv_calibration or (),
                context=context,
                max_text_tokens=max_text_tokens,
                dtype=dtype,
                progress=progress,
            )
            tables = kv_markdown(report)
        else:
            from helios_jax.calibrate.evaluation import evaluate as evaluate_models
            from helios_jax.calibrate.evaluation import to_markdown

            report = evaluate_models(
                models,
                against=against,
                texts=texts,
                tasks=task or [],
                context=context,
                stride=stride,
                max_text_tokens=max_text_tokens,
                max_tokens=max_tokens,
                dtype=dtype,
                progress=progress,
            )
            tables = to_markdown(report)
    print(tables)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    if markdown is not None:
        markdown.write_text(tables + "\n")


def _named(entry: str) -> tuple[str, Path]:
    """DOMAIN=FILE, or FILE with its stem for a domain."""
    domain, equals, file = entry.partition("=")
    path = Path(file if equals else entry)
    return (domain if equals else path.stem), path
