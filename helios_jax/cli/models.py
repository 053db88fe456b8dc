"""`helios models`: what is there, and what can be pulled by name."""

import dataclasses
import json
from typing import Annotated

import typer

from helios_jax.cli.options import Debug


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    debug: Debug = False,
) -> None:
    """List the models that are in the caches, and the known ones that are not."""
    from helios_jax import hub

    found = hub.list_models()
    if as_json:
        print(json.dumps([dataclasses.asdict(model) for model in found], default=str, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("name", overflow="fold")
    table.add_column("size", justify="right")
    for column in ("format", "licence", "source", "where"):
        table.add_column(column, overflow="fold")
    for model in found:
        # A tilde: the download's size, which the finished checkpoint's differs from a little.
        size = f"{'' if model.path else '~'}{model.size_bytes / 1e6:,.0f} MB"
        where = str(model.path) if model.path else "not pulled"
        table.add_row(model.name, size, model.format, model.licence or "?", model.source, where)
    console = Console()
    if not console.is_terminal:  # for grep: every model is one line, however long
        console = Console(width=10_000)
    console.print(table)
