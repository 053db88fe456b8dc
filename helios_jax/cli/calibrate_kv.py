"""`helios calibrate-kv`: scales of an FP8 key and value cache, written into a checkpoint."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from helios_jax.cli.options import Debug


def calibrate_kv(
    model: Annotated[
        str, typer.Argument(help="A known name, hf:org/name, a .gguf file or a folder.")
    ],
    calibration: Annotated[
        list[Path],
        typer.Option(
            "--calibration", help="Requests (.jsonl: `prompt` or `messages`) or text; repeatable."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="The folder to make; without it MODEL, a native one, is changed."
        ),
    ] = None,
    num_sequences: Annotated[
        int, typer.Option("--num-sequences", help="Sequences to look at.")
    ] = 16,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", help="Tokens of each.")
    ] = 2048,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing native checkpoint.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Fit the scales of an FP8 KV cache to a model, on your own text.

    A scale per layer and KV head lets FP8 E4M3 hold the largest key, or value, of the text; other
    8-bit formats are scaled by the same ranges.
    """
    import numpy as np

    from checkpoints_conv import KvScales, check_target, open_checkpoint, read_params
    from checkpoints_conv import write_checkpoint as write
    from helios_jax import hub
    from helios_jax.calibrate.kv_evaluation import kv_calibration
    from helios_jax.calibrate.kv_precision import kv_ranges, scales_of
    from helios_jax.config import require
    from helios_jax.llm import use_compilation_cache
    from helios_jax.model.forms import serving_form

    if out is None:
        require(
            Path(model).is_dir(),
            f"out=None, model={model!r}: only a local folder can be changed in place; give --out",
        )
    checkpoint = open_checkpoint(hub.resolve(model))
    if out is None:
        require(
            checkpoint.format == "native",
            f"out=None: {model} is in the format {checkpoint.format!r}, only native checkpoints "
            "can be changed in place; give --out",
        )
    target = Path(model) if out is None else out
    replace = overwrite or out is None
    check_target(target, replace)
    use_compilation_cache()
    drawn = kv_calibration(
        calibration, checkpoint.tokenizer, num_sequences=num_sequences,
        sequence_length=sequence_length,
    )  # fmt: skip
    require(
        sequence_length <= checkpoint.config.max_model_len,
        f"sequence_length={sequence_length}: {model} takes at most "
        f"{checkpoint.config.max_model_len} tokens",
    )
    form = serving_form(checkpoint.config, read_params(checkpoint), "float32")
    ranges = kv_ranges(form.model, form.params, drawn.tokens_BT)
    scales = KvScales(*(np.asarray(scales_of(one, "fp8_e4m3")) for one in ranges))
    write(dataclasses.replace(checkpoint, kv_scales=scales), target, overwrite=replace)
    for name, range_LK in zip(("keys", "values"), ranges, strict=True):
        print(f"{name}: largest magnitude {range_LK.max():.4g}", file=sys.stderr)
    print(target)
