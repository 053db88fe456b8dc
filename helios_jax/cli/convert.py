"""`helios convert`: any readable checkpoint -> a native one, as `python -m checkpoints_conv`."""

from pathlib import Path
from typing import Annotated

import typer

from helios_jax.cli.options import Debug


def convert(
    source: Annotated[
        str,
        typer.Argument(help="A .gguf file, a checkpoint folder, or a name as for --model."),
    ],
    target: Annotated[Path, typer.Argument(help="The folder to make; must not exist.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing native checkpoint.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Convert a checkpoint to the native format, which loads fastest."""
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
        )
    print(target)
