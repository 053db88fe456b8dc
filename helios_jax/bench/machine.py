"""On what was it measured? Hardware, software and the state of the source."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """The processor, the threads engines get, the system and Helios' version and commit."""
    cpu = _cpu()
    return {
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu_family": cpu.get("cpu family"),
        "vector_extensions": _vector_extensions(cpu.get("flags", "").split()),
        "num_threads": num_threads(),
        "memory_gib": _memory_gib(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "helios_jax": _version(),
        "commit": _commit(),
    }


def num_threads() -> int:
    """Cores this process may use: what every engine gets (`taskset` limits them)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; {} where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _vector_extensions(flags: list[str]) -> list[str]:
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve")
    return [flag for flag in wanted if flag in flags]


def _memory_gib() -> float | None:
    if not hasattr(os, "sysconf"):
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _version() -> str | None:
    try:
        return version("helios-jax")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return None


def _commit() -> str | None:
    """The commit of the checkout that this file is in, with + where it has changes."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        # An installed package may lie inside some other project's checkout.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None
