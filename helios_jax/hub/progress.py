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
    from rich.console import Console

    console = Console(file=sys.stderr)
    with _drawn_bar(console) if console.is_terminal else _printed_lines() as progress:
        yield progress


@contextmanager
def _drawn_bar(console) -> Iterator[Progress]:
    from rich import progress

    columns = progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeElapsedColumn(),
        console=console,
    )
    tasks: dict[str, progress.TaskID] = {}

    def draw(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            for task in tasks.values():
                columns.stop_task(task)
            tasks[stage] = columns.add_task(stage, total=None)
        columns.update(tasks[stage], completed=done, total=total or None)

    with columns:
        yield draw


@contextmanager
def _printed_lines() -> Iterator[Progress]:
    # The total may still grow (files of a repository are found one by one), so a stage is known to
    # be over only when the next one starts.
    stage, done_bytes, started = "", 0, time.monotonic()

    def finish() -> None:
        if done_bytes:
            seconds = time.monotonic() - started
            print(f"{stage}: {done_bytes / 1e6:.1f} MB, {seconds:.1f} s", file=sys.stderr)

    def note(new_stage: str, done: int, total: int) -> None:
        nonlocal stage, done_bytes, started
        if new_stage != stage:
            finish()
            stage, started = new_stage, time.monotonic()
            if not total:
                print(stage, file=sys.stderr)
        done_bytes = done

    yield note
    finish()
