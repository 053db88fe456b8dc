"""How a folder gets onto the disk whole, and off it again."""

import errno
import os
import shutil
from pathlib import Path

_SPARE_BYTES = 16 << 20  # JSON, the tokenizer, Orbax's own files, blocks half filled


def require_space(folder: Path, num_bytes: int) -> None:
    """Raises OSError (ENOSPC) where the disk of `folder` has no room for `num_bytes` more."""
    needed, free = num_bytes + _SPARE_BYTES, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"the disk is full: {needed / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free",
            str(folder),
        )


def flush_folder(folder: Path) -> None:
    """Returns once the disk holds every file and directory entry in and below `folder`."""
    for directory, _, files in os.walk(folder):
        for name in files:
            flush(Path(directory, name))
        flush(Path(directory))


def flush(path: Path) -> None:
    """Returns once the disk holds the file's contents, or the directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Removes a folder as far as possible, without an error: one would hide what led here.

    A second Ctrl-C does not end it.
    """
    interrupted = True
    while interrupted:
        interrupted = False
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except KeyboardInterrupt:
            interrupted = True
