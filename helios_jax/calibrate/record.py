"""Under which circumstances was something measured?"""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("helios-jax", "jax", "jaxlib", "flax", "numpy")


def circumstances() -> dict[str, Any]:
    """Command, commit, versions, machine and date, JSON-ready; None for what cannot be found."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "versions": {"python": platform.python_version()}
        | {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "machine": {"cpu": _cpu(), "cores": os.cpu_count()},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout this file is in, with "+" where files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        described = subprocess.run(
            [*git, "describe", "--always", "--abbrev=12", "--dirty=+"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), None)
