"""`helios pull`: fetch a model now instead of on first use."""

from typing import Annotated

import typer

from helios_jax.cli.options import Debug


def pull(
    model: Annotated[
        str,
        typer.Argument(help="A known name, hf:org/name[@revision] or hf:org/name/file.gguf."),
    ],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Make it anew although it is there, as when damaged.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Fetch a model into the cache and print its path.

    A Hugging Face repository is brought up to date; what is there already is not fetched again.
    """
    from helios_jax import hub

    print(hub.pull(model, hub.no_progress if quiet else None, force))
