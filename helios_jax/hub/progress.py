"""How is a long pull shown?

A progress is any `callable(stage: str, done: int, total: int)`, both counts in bytes and total 0
where it is unknown. `bar` is what people see; `no_progress` shows nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Shows nothing."""


@contextmanager
def shown(progress: Progress | None) -> Iterator[Progress]:
    """`progress` itself, or where it is None a bar on standard error for as long as this lasts."""
    if progress is not None:
        yield progress
        return
    with bar() as drawn:
        yield drawn


@contextmanager
def bar() -> Iterator[Progress]:
    """A rich bar on standard error; where that is not a terminal, one line per finished stage."""
    from rich import progress as rich_progress
    from rich.console import Console

    console = Console(file=sys.stderr)
    columns = rich_progress.Progress(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    tasks: dict[str, rich_progress.TaskID] = {}
    started: dict[str, float] = {}

    def draw(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = columns.add_task(stage, total=None)
            started[stage] = time.monotonic()
        columns.update(tasks[stage], completed=done, total=total or None)
        if not console.is_terminal and stage in started and (done >= total or not total):
            seconds = time.monotonic() - started.pop(stage)
            size = f": {total / 1e6:.0f} MB, {seconds:.1f} s" if total else ""
            print(f"{stage}{size}", file=sys.stderr, flush=True)

    with columns:
        yield draw
