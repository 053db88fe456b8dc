"""What `python -m checkpoints_conv` and `helios convert` do: convert, shown on a terminal."""

import sys
import traceback
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from checkpoints_conv.converting import convert

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


def run_convert(
    source: str, target: str, overwrite: bool = False, debug: bool = False, **options: Any
) -> int:
    """Converts with a progress bar on stderr and returns the exit status.

    Args:
      options: what else `convert` takes.

    Returns:
      0; 1 after an error, which is printed in one line (after its traceback where `debug`); 130
      after Ctrl-C. Nothing is left at `target` in the latter two.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("converting", total=None)
            convert(
                source,
                target,
                lambda done, total: bar.update(task, completed=done, total=total),
                overwrite,
                **options,
            )
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError) as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"wrote {target}")
    return EXIT_OK
