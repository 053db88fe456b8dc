"""What survives when quantising is interrupted?

A folder beside the target holds, for one recipe, source and calibration:

    recipe.json         what all of it belongs to
    GROUP.npz           the finished parameters of embed, layers_0, …
    hidden_{i}.npy      the activations that enter layer i; only the newest

Each file appears complete or not at all. Work resumes at the last layer whose parameters and
activations are both there, and goes on with the same bits.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from helios_jax.calibrate.folders import LOCK, claim, locked
from helios_jax.quant import FLOAT8, QuantTensor

Tree = dict[str, Any]

_RECIPE, _META = "recipe.json", "leaves"
_ARRAYS = ("packed", "scale", "zero", "offset", "perm")
_STATICS = ("bits", "group_size", "span", "implicit_zero")
_DTYPES = {
    dtype.name: dtype for dtype in (np.dtype(ml_dtypes.bfloat16), FLOAT8)
}  # what numpy has no name for


class Workspace:
    """The folder of one run, see the module."""

    def __init__(self, folder: Path, fresh: bool):
        self.folder = folder
        self.resumed = not fresh

    def save_group(self, name: str, tree: Tree) -> None:
        """Keeps the parameters below `name`; leaves are numpy or jax arrays and QuantTensors."""
        described, arrays = {}, {}
        for path, leaf in flatten(tree):
            if isinstance(leaf, QuantTensor):
                fields = {field: getattr(leaf, field) for field in _ARRAYS}
                statics = {field: getattr(leaf, field) for field in _STATICS}
            else:
                fields, statics = {"value": leaf}, None
            dtypes = {}
            for field, array in fields.items():
                if array is not None:
                    array = np.asarray(array)
                    dtypes[field] = array.dtype.name
                    is_known = array.dtype.name not in _DTYPES
                    arrays[f"{path}/{field}"] = array if is_known else array.view(np.uint8)
            described[path] = {"statics": statics, "dtypes": dtypes}
        arrays[_META] = np.array(json.dumps(described))
        with self._written(f"{name}.npz") as file:
            np.savez(file, **arrays)

    def load_group(self, name: str) -> Tree:
        """The parameters that `save_group` kept, as numpy arrays."""
        tree: Tree = {}
        with np.load(self.folder / f"{name}.npz", allow_pickle=False) as stored:
            for path, entry in json.loads(str(stored[_META])).items():
                fields = {
                    field: stored[f"{path}/{field}"].view(_DTYPES.get(dtype, dtype))
                    for field, dtype in entry["dtypes"].items()
                }
                is_quant = entry["statics"] is not None
                leaf = QuantTensor(**fields, **entry["statics"]) if is_quant else fields["value"]
                *parents, last = path.split("/")
                node = tree
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[last] = leaf
        return tree

    def has_group(self, name: str) -> bool:
        return (self.folder / f"{name}.npz").exists()

    def save_hidden(self, layer: int, hidden: np.ndarray) -> None:
        """Keeps the activations that enter `layer` and forgets earlier ones."""
        with self._written(f"hidden_{layer}.npy") as file:
            np.save(file, hidden)
        for earlier in self.folder.glob("hidden_*.npy"):
            if earlier.name != f"hidden_{layer}.npy":
                earlier.unlink()

    def load_hidden(self) -> tuple[int, np.ndarray] | None:
        """The newest (layer, activations that enter it); None where there are none."""
        found = [int(path.stem.removeprefix("hidden_")) for path in self._hidden_files()]
        if not found:
            return None
        return max(found), np.load(self.folder / f"hidden_{max(found)}.npy", allow_pickle=False)

    def _hidden_files(self) -> list[Path]:
        return list(self.folder.glob("hidden_*.npy"))

    @contextlib.contextmanager
    def _written(self, name: str) -> Iterator[Any]:
        partial = self.folder / f"{name}.partial"
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.folder / name)


@contextlib.contextmanager
def workspace(folder: Path, identity: dict[str, Any]) -> Iterator[Workspace]:
    """The workspace at `folder`, locked; only `discard` removes it.

    Args:
      identity: JSON-ready; a folder that was begun with another one is emptied first.

    Raises:
      ValueError: another process works there.
    """
    with locked(folder, "quantising"):
        recipe = folder / _RECIPE
        fresh = not recipe.exists() or not claim(recipe, identity)
        if fresh:
            for path in folder.iterdir():
                if path.name != LOCK:
                    path.unlink()
            claim(recipe, identity)
        yield Workspace(folder, fresh)


def discard(folder: Path) -> None:
    """Removes a workspace that is of no more use."""
    shutil.rmtree(folder, ignore_errors=True)


def flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested dicts with its path, joined by slashes."""
    for name, node in tree.items():
        if isinstance(node, dict):
            yield from flatten(node, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", node
