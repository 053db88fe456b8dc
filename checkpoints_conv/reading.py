"""Which format a path holds, and how all of its parameters come into memory."""

from collections.abc import Callable
from os import PathLike
from pathlib import Path as FilePath
from typing import Any

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.tree import leaf_nbytes

Progress = Callable[[int, int], None]


def open_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Opens a .gguf file, a Hugging Face folder or a native checkpoint folder.

    Only headers and JSON files are read. What they say is checked for completeness, so that a model
    that cannot be read is refused before any of its weights are.

    Raises:
      ValueError: naming what was found instead, or what is wrong with it.
    """
    path = FilePath(path).expanduser()
    if path.is_file():
        from checkpoints_conv.gguf_leaves import open_gguf

        with path.open("rb") as file:
            magic = file.read(4)
        if magic == b"GGUF" or path.suffix == ".gguf":
            return open_gguf(path)
        raise ValueError(
            f"{path}: neither a GGUF file (it starts with {magic!r}) nor a folder; give a .gguf "
            "file, a Hugging Face folder or a native checkpoint folder"
        )
    if not path.is_dir():
        raise ValueError(f"{path}: does not exist; give a .gguf file or a checkpoint folder")
    from checkpoints_conv.native import MANIFEST, PARAMS, open_native

    if (path / MANIFEST).exists() or (path / PARAMS).is_dir():
        return open_native(path)
    if (path / "config.json").exists():
        from checkpoints_conv.huggingface import open_huggingface

        return open_huggingface(path)
    found = sorted(entry.name for entry in path.iterdir())
    ggufs = [name for name in found if name.endswith(".gguf")]
    hint = f"; give the file itself: {path / ggufs[0]}" if ggufs else ""
    raise ValueError(
        f"{path}: holds neither {MANIFEST} (a native checkpoint) nor config.json (a Hugging Face "
        f"model), but {found[:8] or 'nothing'}{hint}"
    )


def read_params(checkpoint: Checkpoint, progress: Progress | None = None) -> dict[str, Any]:
    """Reads all parameters.

    Args:
      progress: is called with (done_bytes, total_bytes) after each leaf.

    Returns:
      {"params": tree}, the Linen variables, with numpy arrays and QuantTensors of numpy arrays as
      leaves (`checkpoints_conv.tree` lists them).

    Raises:
      ValueError: naming the leaf that is damaged, missing, unexpected or of wrong shape or dtype.
    """
    tree: dict[str, Any] = {}
    done = 0
    for path, leaf in checkpoint.tensors():
        *parents, last = path
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
        done += leaf_nbytes(leaf)
        if progress is not None:
            progress(done, checkpoint.nbytes)
    return {"params": tree}
