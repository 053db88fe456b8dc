"""`helios convert`: any readable checkpoint -> another format, as `python -m checkpoints_conv`."""

from pathlib import Path
from typing import Annotated

import typer

from helios_jax.cli.options import Debug


def convert(
    source: Annotated[
        str,
        typer.Argument(help="A .gguf file, a checkpoint folder, or a name as for --model."),
    ],
    target: Annotated[Path, typer.Argument(help="What to make; must not exist.")],
    format: Annotated[
        str,
        typer.Option(
            help="native (loads fastest), huggingface, awq, gptq: folders; gguf: a file. awq and "
            "gptq need weights that are quantised already."
        ),
    ] = "native",
    quant_type: Annotated[
        str | None,
        typer.Option(help="gguf: F16, Q8_0, Q4_1 or Q4_0; by default as each matrix is stored."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="huggingface: bfloat16 (the default), float16 or float32."),
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            help="Give the model this many KV heads: fewer are means of the present ones (train it "
            "further), more are copies of them (the same function)."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Compare samples of what was written with the source."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier conversion to this format.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Convert a checkpoint to another format."""
    from helios_jax import hub
    from helios_jax.hub.progress import bar

    path = hub.resolve(source)

    from checkpoints_conv import convert as convert_checkpoint

    with bar() as progress:
        convert_checkpoint(
            path,
            target,
            progress=lambda done, total: progress("converting", done, total),
            overwrite=overwrite,
            format=format,
            quant_type=quant_type,
            dtype=dtype,
            num_kv_heads=kv_heads,
            verify=verify,
        )
    print(target)
