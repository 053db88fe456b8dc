"""What does `helios` offer, and how does it end when something goes wrong?

Exit codes: 0 done, 1 it failed while running, 2 it was asked for something that cannot be, 130
Ctrl-C. An error is one message on standard error; `--debug` shows the traceback. Verbs import jax
and the rest inside their functions, so that `--help` is quick.
"""

import importlib.metadata
import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from helios_jax.cli import bench, client
from helios_jax.cli.calibrate_kv import calibrate_kv
from helios_jax.cli.chat import chat
from helios_jax.cli.convert import convert
from helios_jax.cli.distill import distill
from helios_jax.cli.evaluate import evaluate
from helios_jax.cli.evidence import evidence
from helios_jax.cli.generate import generate
from helios_jax.cli.models import models
from helios_jax.cli.options import Debug
from helios_jax.cli.profile import profile
from helios_jax.cli.pull import pull
from helios_jax.cli.quantize import quantize
from helios_jax.cli.replay import replay
from helios_jax.cli.serve import serve
from helios_jax.cli.simulate import simulate

app = typer.Typer(
    name="helios",
    help="LLM inference in JAX: generate text with a model, on a CPU or an NVIDIA GPU.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    generate,
    chat,
    serve,
    pull,
    models,
    convert,
    quantize,
    evaluate,
    calibrate_kv,
    distill,
    profile,
    replay,
    simulate,
    evidence,
):
    app.command()(verb)
app.add_typer(client.app)
app.add_typer(bench.app)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("helios-jax"))
        raise typer.Exit()


@app.callback()
def _global_options(
    debug: Debug = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options that stand before the verb."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line (`sys.argv` without arguments) and exits with its code."""
    # A terminal that cannot show a character gets a question mark, not the end of the answer.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    switches: dict[str, bool] = {}
    try:
        typer.main.get_command(app).main(arguments, prog_name="helios", obj=switches)
    except Exception as error:
        if switches.get("debug"):
            raise
        # What users cause is ValueError, what a backend lacks NotImplementedError; both are said in
        # full by whoever raises them. OSError: a full disk, no network.
        expected = isinstance(error, (ValueError, NotImplementedError, OSError))
        text = str(error) or type(error).__name__
        if not expected:
            text = f"{type(error).__name__}: {text} (--debug shows the traceback)"
        print(f"helios: error: {text}", file=sys.stderr)
        sys.exit(2 if isinstance(error, (ValueError, NotImplementedError)) else 1)


if __name__ == "__main__":
    main()
