"""With what was it compiled? Versions, and the state of the source."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

# Relative to a package's folder: what decides the compiled code.
SOURCES = (":(glob)**/*.py", ":(glob)**/tuned/*.json")


def versions() -> dict[str, str]:
    """Of Python, jax and the compiler."""
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit(*folders: Path) -> str | None:
    """The commit of the checkout of these packages, with + where their sources have changes."""

    def git(folder: Path, *arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        # An installed package may lie inside some other project's checkout.
        for folder in folders:
            git(folder, "ls-files", "--error-unmatch", "__init__.py")
        changed = any(git(folder, "status", "--porcelain", "--", *SOURCES) for folder in folders)
        return git(folders[0], "rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
