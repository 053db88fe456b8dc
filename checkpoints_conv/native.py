"""How the native checkpoint lies in a folder, and how each part of it is checked when it is read.

    config.json       {"format", "format_version", "model": ModelConfig.to_dict()}
    generation.json   recommended sampling values, under SamplingParams' names
    kv_scales.json    {"k", "v"}: scales of an FP8 KV cache, [layer][KV head]; where there are any
    vocabulary.npz    ids_U, nearest_V: of a draft that has few of its target's tokens
    tokenizer/        Tokenizer.save
    manifest.json     {"format", "format_version", "source", "files", "leaves"}
    params/GROUP/     one Orbax checkpoint per group: embed, layers_0, ..., final_norm, lm_head

Orbax holds plain nested dicts of arrays: a dense leaf is an array, a QuantTensor a dict of its
arrays. The manifest says which it is and records what Orbax cannot: a leaf's statics, and a sum
over the leaf's description (kind, statics, dtypes, shapes) followed by its arrays' bytes, so that
neither can change alone. `files` holds the sums of all files outside params/.

One group at a time is written and restored, so that memory stays bounded by a layer. Measured for
SmolLM2 (693 arrays, 98 MB, two cores, files cached): importing Orbax 0.17 s, restoring 0.28 s,
sums 0.05 s. Orbax's compression is off: it saves 8% of a quantised model and costs 0.1 s.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.disk import require_space
from checkpoints_conv.errors import about
from checkpoints_conv.json_files import read_json, write_json
from checkpoints_conv.kv_scales import load_kv_scales
from checkpoints_conv.tree import (
    DENSE_DTYPES,
    Leaf,
    Path,
    check_leaf,
    check_num_layers,
    expected_leaves,
    leaf_nbytes,
)
from helios_jax.config import ModelConfig
from helios_jax.quant import FLOAT8, QuantTensor
from helios_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from helios_jax.speculative import DraftVocabulary

FORMAT = "helios-jax"
FORMAT_VERSION = 1
MANIFEST, PARAMS = "manifest.json", "params"

_CONFIG, _GENERATION, _TOKENIZER = "config.json", "generation.json", "tokenizer"
_KV_SCALES, _VOCABULARY = "kv_scales.json", "vocabulary.npz"
_ARRAYS = ("packed", "scale", "zero", "offset", "perm")
_STATICS = ("bits", "group_size", "span", "implicit_zero")
_SETTLE_SECONDS = 0.5
_DTYPES = {
    dtype.name: dtype
    for dtype in (*DENSE_DTYPES, FLOAT8, *map(np.dtype, (np.uint8, np.int8, np.int16, np.int32)))
}


def write_native(
    folder: FilePath, checkpoint: Checkpoint, wrote: Callable[[int], None] = lambda num_bytes: None
) -> None:
    """Writes `checkpoint` into the empty `folder`; `wrote` is told the bytes of each group.

    Not atomic by itself: `convert` is.
    """
    leaves: dict[str, Any] = {}
    (folder / PARAMS).mkdir()
    for group, items in groupby(checkpoint.tensors(), key=lambda item: item[0][0]):
        tree: dict[str, Any] = {}
        num_bytes = 0
        for path, leaf in items:
            num_bytes += leaf_nbytes(leaf)
            arrays = _arrays(leaf)
            leaves["/".join(path)] = _describe(leaf, arrays)
            _insert(tree, path[1:], arrays["value"] if "value" in arrays else arrays)
        require_space(folder, num_bytes)
        _save_group(folder / PARAMS / group, tree)
        wrote(num_bytes)
    write_json(folder / _CONFIG, _headed({"model": checkpoint.config.to_dict()}))
    write_json(folder / _GENERATION, checkpoint.generation)
    if checkpoint.kv_scales is not None:
        write_json(folder / _KV_SCALES, checkpoint.kv_scales.to_json())
    if checkpoint.draft_vocabulary is not None:
        vocabulary = checkpoint.draft_vocabulary
        np.savez_compressed(
            folder / _VOCABULARY, ids_U=vocabulary.ids_U, nearest_V=vocabulary.nearest_V
        )
    checkpoint.tokenizer.save(folder / _TOKENIZER)
    manifest = {
        "source": checkpoint.describe_source(),
        "files": {name: _file_sum(folder / name) for name in _small_files(folder)},
        "leaves": leaves,
    }
    write_json(folder / MANIFEST, _headed(manifest))


def open_native(folder: FilePath) -> Checkpoint:
    """Opens a native checkpoint: everything but the parameters is read and checked.

    Raises:
      ValueError: naming the file, leaf or static that is missing, damaged or not of this version.
    """
    manifest = _read_headed(folder / MANIFEST)
    files = _section(folder, manifest, "files")
    for name in (_CONFIG, _GENERATION, *files):
        if name not in files:
            raise ValueError(f"{folder / MANIFEST}: has no sum for the file {name!r}")
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name}: the file is missing; convert the model again")
        if _file_sum(folder / name) != files[name]:
            raise ValueError(
                f"{folder / name}: does not match its sum in {MANIFEST}: it was changed or "
                "damaged; convert the model again"
            )
    fields = _read_headed(folder / _CONFIG).get("model")
    try:
        config = ModelConfig.from_dict(fields if isinstance(fields, dict) else {})
    except (TypeError, ValueError) as error:
        raise about(folder / _CONFIG, error) from None
    leaves = _section(folder, manifest, "leaves")
    check_num_layers(str(folder / _CONFIG), config, len(leaves))
    nbytes = _check_leaves(folder / MANIFEST, leaves, config)
    return Checkpoint(
        path=folder,
        format="native",
        config=config,
        generation=read_json(folder / _GENERATION),
        num_tensors=len(leaves),
        nbytes=nbytes,
        read_leaves=lambda: _read_leaves(folder, leaves, list(expected_leaves(config))),
        read_tokenizer=lambda: Tokenizer.load(folder / _TOKENIZER),
        describe_source=lambda: manifest.get("source", {}),
        kv_scales=load_kv_scales(folder / _KV_SCALES, config) if _KV_SCALES in files else None,
        draft_vocabulary=_load_vocabulary(folder / _VOCABULARY, config)
        if _VOCABULARY in files
        else None,
    )


def _load_vocabulary(path: FilePath, config: ModelConfig) -> "DraftVocabulary":
    """A draft's vocabulary; a ValueError names the file."""
    # Most checkpoints have none, and it brings the model with it.
    from helios_jax.speculative import DraftVocabulary

    try:
        with np.load(path, allow_pickle=False) as arrays:
            vocabulary = DraftVocabulary(arrays["ids_U"], arrays["nearest_V"])
    except (KeyError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise about(path, ValueError(str(error))) from None
    if len(vocabulary.ids_U) != config.vocab_size:
        raise ValueError(
            f"{path}: holds {len(vocabulary.ids_U)} tokens, but the model has vocab_size="
            f"{config.vocab_size}"
        )
    return vocabulary


def _read_leaves(
    folder: FilePath, leaves: dict[str, Any], paths: list[Path]
) -> Iterator[tuple[Path, Leaf]]:
    for group, members in groupby(paths, key=lambda path: path[0]):
        where = folder / PARAMS / group
        tree = _restore_group(where)
        for path in members:
            name = "/".join(path)
            yield path, _rebuild(f"{where}: parameter {name!r}", leaves[name], _pop(tree, path[1:]))
        if tree:
            raise ValueError(f"{where}: holds parameters that {MANIFEST} does not list: {[*tree]}")


def _arrays(leaf: Leaf) -> dict[str, np.ndarray]:
    if not isinstance(leaf, QuantTensor):
        return {"value": np.asarray(leaf)}
    fields = {name: getattr(leaf, name) for name in _ARRAYS}
    return {name: np.asarray(array) for name, array in fields.items() if array is not None}


def _describe(leaf: Leaf, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """The manifest's entry for a leaf, sum included."""
    entry: dict[str, Any] = {"kind": "quant" if isinstance(leaf, QuantTensor) else "array"}
    if isinstance(leaf, QuantTensor):
        entry["statics"] = {name: getattr(leaf, name) for name in _STATICS}
    entry["arrays"] = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in arrays.items()
    }
    return entry | {"sha256": _leaf_sum(entry, arrays)}


def _leaf_sum(entry: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    """sha256 over the entry without its sum, as sorted JSON, and the arrays' bytes by name."""
    described = {key: value for key, value in entry.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _rebuild(where: str, entry: dict[str, Any], stored: Any) -> Leaf:
    """The leaf from what Orbax restored, checked against its entry: structure, then sum."""
    if entry["kind"] == "array":
        stored = {"value": stored}
    found = {
        name: {"dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in (stored.items() if isinstance(stored, dict) else ())
        if isinstance(array, np.ndarray)
    }
    if found != entry["arrays"]:
        raise ValueError(f"{where} is stored as {found}, but {MANIFEST} says {entry['arrays']}")
    if _leaf_sum(entry, stored) != entry["sha256"]:
        raise ValueError(
            f"{where}: does not match its sum in {MANIFEST}: its values or statics were changed or "
            "damaged; convert the model again"
        )
    if entry["kind"] == "array":
        return stored["value"]
    return QuantTensor(**stored, **entry["statics"])


def _check_leaves(manifest: FilePath, leaves: dict[str, Any], config: ModelConfig) -> int:
    """Checks the manifest's entries against the tree of `config`; returns the bytes of all."""
    expected = {"/".join(path): spec for path, spec in expected_leaves(config).items()}
    for name in (*expected, *leaves):
        if name not in leaves or name not in expected:
            state = "is missing" if name not in leaves else "is not part of the configured model"
            raise ValueError(f"{manifest}: parameter {name!r} {state}")
    nbytes = 0
    for name, spec in expected.items():
        where = f"{manifest}: parameter {name!r}"
        placeholder = _placeholder(where, leaves[name])
        check_leaf(where, placeholder, spec)
        nbytes += leaf_nbytes(placeholder)
    return nbytes


def _placeholder(where: str, entry: Any) -> Leaf:
    """A leaf of the entry's kind, statics, dtypes and shapes that takes no memory."""
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind not in ("array", "quant"):
        raise ValueError(f"{where}: kind={kind!r}: must be 'array' or 'quant'")
    described, names = entry.get("arrays"), ("value",) if kind == "array" else _ARRAYS
    if not isinstance(described, dict) or not set(names[:2]) <= set(described) <= set(names):
        raise ValueError(f"{where}: arrays={described!r}: must be some of {names}")
    arrays = {}
    for field, array in described.items():
        dtype = array.get("dtype") if isinstance(array, dict) else None
        shape = array.get("shape") if isinstance(array, dict) else None
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise ValueError(f"{where}: {field} has dtype {dtype!r}: must be in {[*_DTYPES]}")
        if not isinstance(shape, list) or not all(type(n) is int and 0 < n < 2**31 for n in shape):
            raise ValueError(f"{where}: {field} has shape {shape!r}: must be a list of lengths")
        try:
            arrays[field] = np.broadcast_to(np.zeros((), _DTYPES[dtype]), shape)
        except ValueError as error:
            raise ValueError(f"{where}: {field} has shape {shape!r}: {error}") from None
    if kind == "array":
        return arrays["value"]
    statics = entry.get("statics")
    if not isinstance(statics, dict) or statics.keys() != set(_STATICS):
        raise ValueError(f"{where}: statics={statics!r}: must be {_STATICS}")
    for static, value in statics.items():
        if type(value) is not int:
            raise ValueError(f"{where}: {static}={value!r}: must be an integer")
    if any(array.ndim < 2 for name, array in arrays.items() if name != "perm"):
        raise ValueError(f"{where}: a quantised parameter needs arrays of two axes")
    return QuantTensor(**arrays, **statics)


def _headed(content: dict[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "format_version": FORMAT_VERSION} | content


def _read_headed(path: FilePath) -> dict[str, Any]:
    content = read_json(path)
    for key, expected in _headed({}).items():
        if content.get(key) != expected:
            raise ValueError(
                f"{path}: {key}={content.get(key)!r}: this version reads {expected!r}; convert the "
                "model again"
            )
    return content


def _section(folder: FilePath, manifest: dict[str, Any], name: str) -> dict[str, Any]:
    section = manifest.get(name)
    if not isinstance(section, dict):
        raise ValueError(f"{folder / MANIFEST}: {name}={section!r}: must be an object")
    return section


def _small_files(folder: FilePath) -> list[str]:
    """The files outside params/, by their path within the folder; the manifest excepted."""
    paths = [folder / _CONFIG, folder / _GENERATION, *sorted((folder / _TOKENIZER).glob("*"))]
    paths += [folder / name for name in (_KV_SCALES, _VOCABULARY) if (folder / name).exists()]
    return [path.relative_to(folder).as_posix() for path in paths]


def _file_sum(path: FilePath) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _insert(tree: dict[str, Any], path: Iterable[str], value: Any) -> None:
    *parents, last = path
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def _pop(tree: Any, path: Path) -> Any:
    """Removes and returns what lies at `path`, emptied dicts too; None where nothing lies there."""
    if not isinstance(tree, dict) or path[0] not in tree:
        return None
    if len(path) == 1:
        return tree.pop(path[0])
    value = _pop(tree[path[0]], path[1:])
    if not tree[path[0]]:
        del tree[path[0]]
    return value


def _save_group(folder: FilePath, tree: dict[str, Any]) -> None:
    try:
        _with_orbax(lambda checkpointer: checkpointer.save(folder.absolute(), tree))
    except Exception as error:  # Orbax and TensorStore document no errors of their own
        if os.strerror(errno.ENOSPC) in str(error):
            raise OSError(errno.ENOSPC, "the disk is full", str(folder)) from error
        raise OSError(f"{folder}: cannot be written: {error}") from error


def _restore_group(folder: FilePath) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: the parameters are missing; convert the model again")
    try:
        tree = _with_orbax(lambda checkpointer: checkpointer.restore(folder.absolute()))
    except Exception as error:  # Orbax and TensorStore document no errors of their own
        raise ValueError(
            f"{folder}: the parameters are damaged, Orbax cannot restore them: {error}; convert "
            "the model again"
        ) from error
    if not isinstance(tree, dict):
        raise ValueError(f"{folder}: must hold a dict of arrays, not {type(tree).__name__}")
    return tree


def _with_orbax(call: Callable[[Any], Any]) -> Any:
    """The result of `call(checkpointer)`, run to its end in a thread of its own.

    Ctrl-C waits for that end (a layer's worth of work): inside Orbax's event loop it would leave
    TensorStore writing into a folder that is being removed. For the same reason an error waits a
    moment: Orbax gives up at the first array that fails, TensorStore still ends the others.
    """
    outcome: list[Any] = []
    ended = threading.Event()

    def run() -> None:
        try:
            import orbax.checkpoint

            with orbax.checkpoint.PyTreeCheckpointer(
                use_ocdbt=True, use_compression=False
            ) as checkpointer:
                outcome.append(call(checkpointer))
        except Exception as error:
            time.sleep(_SETTLE_SECONDS)
            outcome.append(error)
        finally:
            ended.set()

    interrupted = False
    with _quiet_orbax():
        threading.Thread(target=run, name="orbax").start()
        while not ended.is_set():
            try:
                ended.wait()
            except KeyboardInterrupt:
                interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Silences what is printed about an error besides raising it.

    Orbax logs a traceback in each of its threads that fails. TensorStore reports each array that
    ends after Orbax has closed its event loop.
    """

    def report(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    log, hook = logging.getLogger("absl"), sys.unraisablehook
    log.addFilter(_drop_record)
    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = hook
        log.removeFilter(_drop_record)


def _drop_record(record: logging.LogRecord) -> bool:
    return False
