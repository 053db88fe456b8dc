"""How a checkpoint becomes one of another format, all or nothing."""

import contextlib
import fcntl
import glob
import math
import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike
from pathlib import Path

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.disk import flush, flush_folder, remove_folder, require_space
from checkpoints_conv.native import MANIFEST, write_native
from checkpoints_conv.reading import Progress, open_checkpoint
from checkpoints_conv.tree import expected_leaves

FORMATS = ("native", "huggingface", "awq", "gptq", "gguf")
QUANT_TYPES = ("F16", "Q8_0", "Q4_1", "Q4_0")
DTYPES = ("bfloat16", "float16", "float32")


def convert(
    source: str | PathLike[str],
    target: str | PathLike[str],
    progress: Progress | None = None,
    overwrite: bool = False,
    *,
    format: str = "native",
    quant_type: str | None = None,
    dtype: str | None = None,
    num_kv_heads: int | None = None,
    verify: bool = False,
) -> None:
    """Writes the checkpoint `source`, of any readable format, to `target`.

    `target` appears complete or not at all: everything is written to a hidden sibling folder,
    flushed to the disk and renamed. On an error or Ctrl-C the sibling is removed; what a killed
    process left is removed by the next conversion to the same target.

    Args:
      progress: is called with (done_bytes, total_bytes) as leaves are written.
      overwrite: replace what this function wrote to `target` before, in the same format. Anything
        else there stays and is an error.
      format: one of `FORMATS`. "huggingface" is dense; "awq" and "gptq" need weights that are
        quantised already; "gguf" is a file, the others are folders.
      quant_type: gguf only: "F16", "Q8_0", "Q4_1" or "Q4_0"; None for each matrix as it is stored.
      dtype: huggingface only: "bfloat16" (the default), "float16" or "float32".
      num_kv_heads: give the model this many KV heads, see `gqa`.
      verify: compare a sample of what was written with the source before it appears.

    Raises:
      ValueError: naming what is wrong with `source` or the options, or what is in the way at
        `target`.
      OSError: the disk is full, or the target cannot be written.
    """
    _check_options(format, quant_type, dtype)
    check_target(target, overwrite, format=format)
    checkpoint = open_checkpoint(source)
    if num_kv_heads is not None:
        from checkpoints_conv.gqa import checkpoint_with_kv_heads

        checkpoint = checkpoint_with_kv_heads(checkpoint, num_kv_heads)
    write_checkpoint(
        checkpoint,
        target,
        progress,
        overwrite,
        format=format,
        quant_type=quant_type,
        dtype=dtype,
        verify=verify,
    )


def write_checkpoint(
    checkpoint: Checkpoint,
    target: str | PathLike[str],
    progress: Progress | None = None,
    overwrite: bool = False,
    *,
    format: str = "native",
    quant_type: str | None = None,
    dtype: str | None = None,
    verify: bool = False,
) -> None:
    """`convert` for a checkpoint that is open already, or was made: see there."""
    _check_options(format, quant_type, dtype)
    is_draft = checkpoint.draft_vocabulary is not None or checkpoint.config.is_draft_head
    if is_draft and format != "native":
        raise ValueError(
            f"{checkpoint.path}: is a draft head, or a draft with a vocabulary of its own, which "
            f"format={format!r} cannot hold; leave it in the native format"
        )
    target = _absolute(target)
    _check_target(target, overwrite, format)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _partial_folder(target) as folder:
        require_space(target.parent, _space(checkpoint, format, quant_type, dtype))
        done = 0

        def wrote(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if progress is not None:
                progress(min(done, checkpoint.nbytes), checkpoint.nbytes)

        written = folder / target.name if format == "gguf" else folder
        storage = _writer(format, quant_type, dtype)(written, checkpoint, wrote)
        if verify:
            from checkpoints_conv.verify import verify as verify_written

            verify_written(checkpoint, open_checkpoint(written), storage)
        flush_folder(folder)
        # Another process may have put something there meanwhile.
        _check_target(target, overwrite, format)
        if format == "gguf":
            written.replace(target)
            flush(target.parent)
        else:
            _move_into_place(folder, target)


def check_target(
    target: str | PathLike[str], overwrite: bool = False, *, format: str = "native"
) -> None:
    """Raises ValueError where a checkpoint could not be written to `target`; ask first."""
    _check_target(_absolute(target), overwrite, format)


def _absolute(path: str | PathLike[str]) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


def _check_options(format: str, quant_type: str | None, dtype: str | None) -> None:
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: must be one of {FORMATS}")
    for name, value, owner in (("quant_type", quant_type, "gguf"), ("dtype", dtype, "huggingface")):
        if value is not None and format != owner:
            raise ValueError(
                f"{name}={value!r} with format={format!r}: only {owner!r} has that choice; leave "
                "it away"
            )
    if quant_type is not None and quant_type not in QUANT_TYPES:
        raise ValueError(f"quant_type={quant_type!r}: must be one of {QUANT_TYPES}")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {DTYPES}")


def _writer(
    format: str, quant_type: str | None, dtype: str | None
) -> Callable[[Path, Checkpoint, Callable[[int], None]], dict[tuple[str, ...], str]]:
    """What writes the format to a path and says how each leaf is stored there."""
    if format == "huggingface":
        from checkpoints_conv.write_huggingface import write_huggingface

        return partial(write_huggingface, dtype=dtype or "bfloat16")
    if format == "awq":
        from checkpoints_conv.write_awq import write_awq

        return write_awq
    if format == "gptq":
        from checkpoints_conv.write_gptq import write_gptq

        return write_gptq
    if format == "gguf":
        from checkpoints_conv.write_gguf import write_gguf

        return partial(write_gguf, quant_type=quant_type)

    def write(folder: Path, checkpoint: Checkpoint, wrote: Callable[[int], None]):
        write_native(folder, checkpoint, wrote)
        return dict.fromkeys(expected_leaves(checkpoint.config), "exact")

    return write


def _space(checkpoint: Checkpoint, format: str, quant_type: str | None, dtype: str | None) -> int:
    """Bytes that the weights take at the target, or a little more."""
    bits = {"huggingface": 32 if dtype == "float32" else 16, "gguf": 16}.get(format)
    if quant_type in ("Q8_0", "Q4_1", "Q4_0"):
        bits = 9 if quant_type == "Q8_0" else 5
    if bits is None or (format == "gguf" and quant_type is None):
        return checkpoint.nbytes
    sizes = (spec.shape for spec in expected_leaves(checkpoint.config).values())
    return sum(math.prod(shape) for shape in sizes) * bits // 8


def _check_target(target: Path, overwrite: bool, format: str) -> None:
    """Raises ValueError where `target` is in use and may not be replaced."""
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise ValueError(f"{target}: exists already; choose another target, or pass overwrite")
    if not target.is_symlink() and _is_ours(target, format):
        return
    kind = {"native": "a native checkpoint", "gguf": "a GGUF file"}.get(
        format, f"a {format} checkpoint that was written here"
    )
    raise ValueError(
        f"{target}: is not {kind}, and only those are overwritten; remove it yourself or choose "
        "another target"
    )


def _is_ours(target: Path, format: str) -> bool:
    """Whether `target` is what a conversion to this format leaves."""
    if format == "gguf":
        if not target.is_file():
            return False
        with target.open("rb") as file:
            return file.read(4) == b"GGUF"
    if format == "native":
        return (target / MANIFEST).is_file()
    from checkpoints_conv.write_folder import MANIFEST as FOLDER_MANIFEST

    return (target / FOLDER_MANIFEST).is_file()


@contextlib.contextmanager
def _partial_folder(target: Path) -> Iterator[Path]:
    """A hidden, new sibling folder of `target`, gone afterwards whatever happens.

    Each conversion holds a shared lock on the parent folder. Whoever gets the exclusive lock knows
    that none is running there, so that leftovers of `target` belong to nobody.
    """
    prefix = f".{target.name}.partial-"
    parent = os.open(target.parent, os.O_RDONLY)
    try:
        # Some network file systems have no locks: leftovers stay there.
        with contextlib.suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for leftover in target.parent.glob(f"{glob.escape(prefix)}*"):
                remove_folder(leftover)
        with contextlib.suppress(OSError):
            fcntl.flock(parent, fcntl.LOCK_SH)
        partial = target.parent / f"{prefix}{secrets.token_hex(8)}"
        partial.mkdir()
        try:
            yield partial
        finally:
            remove_folder(partial)
    finally:
        os.close(parent)


def _move_into_place(partial: Path, target: Path) -> None:
    if os.path.lexists(target):
        replaced = partial.with_name(f"{partial.name}-replaced")
        target.rename(replaced)
        try:
            partial.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
        remove_folder(replaced)
    else:
        partial.rename(target)
    flush(target.parent)
