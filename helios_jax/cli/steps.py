"""How is long work of known length shown, with the time that is left?"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Off a terminal a line appears at most this often.
_SECONDS_PER_LINE = 15.0

Progress = Callable[[str, int, int], None]


@contextmanager
def steps(unit: str) -> Iterator[Progress]:
    """Gives `progress(what, done, total)`, drawn on standard error as a bar, or as lines."""
    from rich.console import Console

    console = Console(file=sys.stderr)
    with _bar(console, unit) if console.is_terminal else _lines(unit) as progress:
        yield progress


@contextmanager
def _bar(console, unit: str) -> Iterator[Progress]:
    from rich import progress

    columns = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=console,
    )
    with columns:
        task = columns.add_task("", total=None)
        yield lambda what, done, total: columns.update(
            task, description=what, completed=done, total=total
        )


@contextmanager
def _lines(unit: str) -> Iterator[Progress]:
    # The first call says where the work starts: what a resumed run finds done took no time now.
    started, first_done = time.monotonic(), None
    next_line = started

    def note(what: str, done: int, total: int) -> None:
        nonlocal first_done, next_line
        now = time.monotonic()
        if first_done is None:
            first_done = done
        if now < next_line and done < total:
            return
        next_line = now + _SECONDS_PER_LINE
        left = ""
        if done > first_done:
            left = f", {(now - started) * (total - done) / (done - first_done):.0f} s left"
        print(f"{what}: {done}/{total} {unit}, {now - started:.0f} s{left}", file=sys.stderr)

    yield note
