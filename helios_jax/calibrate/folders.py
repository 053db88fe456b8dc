"""Whose is a working folder? One process's at a time, and one piece of work's.

Work that takes hours keeps what it has done in a folder. Two commands must not write there at once,
nor may one take up what another one with other options left.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

LOCK = "lock"


@contextlib.contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Holds `folder`, which is made where there is none, for this process alone.

    Args:
      doing: what is done there, for the message: "quantising".

    Raises:
      ValueError: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / LOCK, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"{folder}: another process is {doing} there; wait for it") from None
    try:
        yield
    finally:
        lock.release()


def claim(path: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the file at `path` names this piece of work; written where there is none.

    Args:
      identity: JSON-ready, all that the work depends on.
    """
    wanted = json.dumps(identity, indent=2, sort_keys=True)
    if path.exists():
        return path.read_text(encoding="utf-8") == wanted
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(wanted, encoding="utf-8")
    partial.replace(path)
    return True
