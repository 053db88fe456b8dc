"""How do files get into the cache whole or not at all?

Work happens in a scratch folder on the cache's own file system and is renamed into place when it is
finished. One lock per model makes concurrent pulls wait for each other, so whoever holds the lock
knows that a scratch folder found there was left by a killed run.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helios_jax.hub.progress import Progress


class PullError(OSError):
    """A model could not be fetched; the message names the cause and the remedy."""


def cache_dir() -> Path:
    """The folder for everything that can be fetched or computed again; it may not exist yet.

    `HELIOS_CACHE` if set, else `$XDG_CACHE_HOME/helios`, else `~/.cache/helios`. (The XDG
    specification says to ignore a relative XDG_CACHE_HOME.)
    """
    if chosen := os.environ.get("HELIOS_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "helios"


@contextmanager
def scratch_folder(name: str, progress: Progress) -> Iterator[Path]:
    """An empty folder that only this process uses, removed at the end, however it ends.

    Waits while another process pulls `name`. File-system errors inside become `PullError`s.
    """
    from filelock import FileLock, Timeout

    with explained_os_errors(name, cache_dir(), "HELIOS_CACHE"):
        root = cache_dir() / "partial"
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f"{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("waiting for another pull", 0, 0)
            lock.acquire()
        try:
            for abandoned in root.glob(f"{name}.*.d"):
                _remove(abandoned)
            # A name of its own: a pip that outlived its killed parent may still write to the old.
            folder = Path(tempfile.mkdtemp(prefix=f"{name}.", suffix=".d", dir=root))
            try:
                yield folder
            finally:
                _remove(folder)
        finally:
            lock.release()


@contextmanager
def explained_os_errors(name: str, cache: Path, variable: str) -> Iterator[None]:
    """Turns a full disk, a read-only cache and their like into a `PullError` with a remedy.

    Args:
      name: what is pulled.
      cache: where to.
      variable: the environment variable that moves that.
    """
    try:
        yield
    except PullError:
        raise
    except OSError as error:
        remedy = f"set {variable} to a folder with room that you may write to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"no space left while pulling {name!r} into {cache}: free some, or {remedy}"
        else:
            message = f"cannot pull {name!r} into {cache}: {error}; {remedy}"
        raise PullError(message) from error


def require_space(folder: Path, num_bytes: int) -> None:
    """Raises OSError(ENOSPC) unless `folder`'s file system has `num_bytes` free."""
    if shutil.disk_usage(folder).free < num_bytes:
        raise OSError(errno.ENOSPC, f"{num_bytes / 1e6:.0f} MB needed", str(folder))


def publish(finished: Path, target: Path) -> None:
    """Renames a finished file or folder to its final name; afterwards it survives a crash."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if finished.is_file():
        with open(finished, "rb") as file:
            os.fsync(file.fileno())
    os.replace(finished, target)
    if os.name == "posix":
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove(folder: Path) -> None:
    # What cannot go now, because somebody still writes to it, goes at the next pull.
    shutil.rmtree(folder, ignore_errors=True)
