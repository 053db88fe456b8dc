"""`helios evidence`: the source articles' tables, with this machine's numbers beside theirs."""

from pathlib import Path
from typing import Annotated

import typer

from helios_jax.cli import options
from helios_jax.cli.options import Debug


def evidence(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The report's folder; one that is there goes on.")
    ] = Path("evidence"),
    model: options.Model = options.DEFAULT_MODEL,
    trace: Annotated[
        Path | None, typer.Option(help="Azure, BurstGPT or Mooncake. Default: generated.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            "--prompts",
            help="What prompts are cut from and precision is measured on. Default: Python's own "
            "reference.",
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A draft model. Default: prompt lookup.")
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="Run only these parts; others stay as they are; repeatable."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Less of everything: 709 s in all on two cores.",
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Instead: compute three cells, drawn at random, again."),
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="With --check: of the draw. Default: another each time.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Make the report: Markdown, one HTML file with pictures, and the JSON behind every number.

    Each part is a command of helios in a process of its own. What is done is kept, so that the same
    command goes on after an interruption.
    """
    from rich.console import Console

    from helios_jax import evidence as report
    from helios_jax.config import require

    out.mkdir(parents=True, exist_ok=True)
    status = Console(stderr=True)

    def say(words: str) -> None:
        status.print(words, highlight=False)

    if check:
        inputs = report.kept_inputs(out)
        kept = report.kept_parts(out, [each.name for each in report.parts_of(inputs, False)])
        tables = report.tables_of(list(kept))
        results = report.recheck(tables, kept, out, seed=seed, say=say)
        for result in results:
            verdict = "agrees" if result.agrees else "DIFFERS"
            shown = "nothing" if result.found is None else f"{result.found:.6g}"
            print(
                f"{result.cell.part}: {result.cell.row}, {result.cell.column}: reported "
                f"{result.reported:.6g}, now {shown}: {verdict}"
            )
        if not all(result.agrees for result in results):
            raise typer.Exit(1)
        return
    inputs = report.make_inputs(
        out, model=model, trace=trace, text=text, draft=draft, as_before=bool(part)
    )
    parts = report.parts_of(inputs, quick)
    known = [each.name for each in parts]
    for name in part or ():
        require(name in known, f"part={name!r}: must be one of {', '.join(known)}")
    for each in parts:
        if not part or each.name in part:
            report.run_part(each, out, say)
    # Beside those that ran, the others that are there, of either size.
    names = [each.name for each in report.parts_of(inputs, False)] if part else known
    kept = report.kept_parts(out, names)
    markdown, page = report.write_pages(out, report.tables_of(list(kept)), kept, inputs)
    print(f"{markdown}\n{page}")
