"""How a checkpoint becomes a native one, all or nothing."""

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.disk import flush, flush_folder, remove_folder, require_space
from checkpoints_conv.native import MANIFEST, write_native
from checkpoints_conv.reading import Progress, open_checkpoint


def convert(
    source: str | PathLike[str],
    target: str | PathLike[str],
    progress: Progress | None = None,
    overwrite: bool = False,
) -> None:
    """Writes the checkpoint `source`, of any readable format, as a native one to `target`.

    `target` appears complete or not at all: everything is written to a hidden sibling folder,
    flushed to the disk and renamed. On an error or Ctrl-C the sibling is removed; what a killed
    process left is removed by the next conversion to the same target.

    Args:
      progress: is called with (done_bytes, total_bytes) after each layer.
      overwrite: replace the native checkpoint that is at `target`. Anything else there stays and is
        an error.

    Raises:
      ValueError: naming what is wrong with `source`, or what is in the way at `target`.
      OSError: the disk is full, or the target cannot be written.
    """
    check_target(target, overwrite)
    write_checkpoint(open_checkpoint(source), target, progress, overwrite)


def write_checkpoint(
    checkpoint: Checkpoint,
    target: str | PathLike[str],
    progress: Progress | None = None,
    overwrite: bool = False,
) -> None:
    """`convert` for a checkpoint that is open already, or was made: see there."""
    target = _absolute(target)
    _check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _partial_folder(target) as partial:
        require_space(target.parent, checkpoint.nbytes)
        done = 0

        def wrote(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(done, checkpoint.nbytes)

        write_native(partial, checkpoint, wrote)
        flush_folder(partial)
        # The other processes' view may have changed while this one was writing.
        _check_target(target, overwrite)
        _move_into_place(partial, target)


def check_target(target: str | PathLike[str], overwrite: bool = False) -> None:
    """Raises ValueError where a checkpoint could not be written to `target`; ask first."""
    _check_target(_absolute(target), overwrite)


def _absolute(path: str | PathLike[str]) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


def _check_target(target: Path, overwrite: bool) -> None:
    """Raises ValueError where `target` is in use and may not be replaced."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ValueError(f"{target}: exists already; choose another target, or pass overwrite")
    if target.is_symlink() or not (target / MANIFEST).is_file():
        raise ValueError(
            f"{target}: is not a native checkpoint, and only those are overwritten; remove it "
            "yourself or choose another target"
        )


@contextlib.contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    """A hidden, new sibling folder of `target`, gone afterwards whatever happens.

    Each conversion holds a shared lock on the parent folder. Whoever gets the exclusive lock knows
    that none is running there, so that leftovers of `target` belong to nobody.
    """
    prefix = f".{target.name}.partial-"
    parent = os.open(target.parent, os.O_RDONLY)
    try:
        # Some network file systems have no locks: leftovers stay there.
        with contextlib.suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in target.parent.glob(f"{glob.escape(prefix)}*"):
                remove_folder(leftover)
        with contextlib.suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_SH)
        partial = target.parent / f"{prefix}{secrets.token_hex(8)}"
        partial.mkdir()
        try:
            yield partial
        finally:
            remove_folder(partial)
    finally:
        os.close(parent)


def _move_into_place(partial: Path, target: Path) -> None:
    if os.path.lexists(target):
        replaced = partial.with_name(f"{partial.name}-replaced")
        target.rename(replaced)
        try:
            partial.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
        remove_folder(replaced)
    else:
        partial.rename(target)
    flush(target.parent)
