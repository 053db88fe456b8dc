"""Do the notebooks run? Executes them without a browser: python -m notebooks.run [NAME ...]

All, or those whose names begin as given, each in its own folder and process, on a CPU. The files
stay as they are: outputs go nowhere, unless --out FOLDER keeps executed copies. --strip takes
outputs out of the files instead, which is how they are committed.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TIMEOUT_SECONDS = 600


def find(names: list[str]) -> list[Path]:
    """The notebooks whose names begin with one of `names`; all if there are none."""
    paths = sorted(FOLDER.glob("*.ipynb"))
    found = [path for path in paths if not names or path.name.startswith(tuple(names))]
    if not found:
        raise ValueError(f"notebooks={names}: none begins so; there are {[p.name for p in paths]}")
    return found


def run(path: Path, out: Path | None = None) -> float:
    """Executes one and returns the seconds it took.

    Raises:
      nbclient's CellExecutionError: a cell failed; it shows which, and why.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook: Any = nbformat.read(path, as_version=4)
    root = str(FOLDER.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    started = time.perf_counter()
    NotebookClient(
        notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()  # fmt: skip
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, out / path.name)
    return time.perf_counter() - started


def strip(notebook: Any) -> Any:
    """The notebook without outputs and what running it leaves."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--strip", action="store_true")
    options = parser.parse_args(arguments)
    for path in find(options.names):
        if options.strip:
            import nbformat

            nbformat.write(strip(nbformat.read(path, as_version=4)), path)
            continue
        print(f"{path.name} …", end=" ", flush=True)
        print(f"{run(path, options.out):.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
