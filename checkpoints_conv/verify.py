"""Does a written checkpoint hold its source's weights, as exactly as its format can?

A sample of rows of every leaf is dequantised on both sides. What may differ, per value, with b the
values of its block of 32 in the source:

    native, awq, gptq            nothing (a leaf that was made dense: float16's rounding)
    huggingface                  the rounding of its dtype
    gguf F16, BF16               their rounding
    gguf Q8_0                    max |b| / 127 / 2 and the rounding of a float16 scale
    gguf Q4_1                    (max b - min b) / 15 / 2, likewise
    gguf Q4_0                    max |b| / 8: its range is -8..7, so that the far end is cut by one
"""

from collections.abc import Mapping

import numpy as np

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.dense_rows import dense_rows
from checkpoints_conv.tree import Path, expected_leaves

MAX_ROWS = 64
_BLOCK = 32
# Half a unit in the last place, and half of the smallest subnormal.
_ROUNDING = {
    "exact": (0.0, 0.0),
    "F32": (0.0, 0.0),
    "float32": (0.0, 0.0),
    "float16": (2.0**-11, 2.0**-25),
    "F16": (2.0**-11, 2.0**-25),
    "bfloat16": (2.0**-8, 2.0**-133),
    "BF16": (2.0**-8, 2.0**-133),
}
_HALF_SCALE = 2.0**-10  # scale and minimum are float16; twice its rounding


def verify(
    source: Checkpoint, written: Checkpoint, storage: Mapping[Path, str], seed: int = 0
) -> None:
    """Compares up to `MAX_ROWS` rows of each leaf.

    Args:
      storage: how each leaf was written: "exact", a dtype, or a GGUF type.

    Raises:
      ValueError: naming the leaf whose difference is larger than its storage explains.
    """
    rng = np.random.default_rng(seed)
    specs = expected_leaves(source.config)
    pairs = zip(source.tensors(), written.tensors(), strict=True)
    for (path, leaf), (other_path, other) in pairs:
        assert path == other_path, "both iterate over expected_leaves"
        spec = specs[path]
        rows = np.sort(rng.permutation(spec.shape[0])[:MAX_ROWS])
        expected = dense_rows(leaf, spec, rows)
        found = dense_rows(other, spec, rows)
        with np.errstate(invalid="ignore"):  # infinities and NaN are compared as such
            allowed = tolerance(expected, storage[path])
            difference = np.abs(found - expected)
        wrong = ~((difference <= allowed) | (found == expected) | _both_nan(found, expected))
        if wrong.any():
            where = tuple(int(index) for index in np.argwhere(wrong)[0])
            raise ValueError(
                f"{written.path}: parameter {'/'.join(path)!r} is not what was written: value "
                f"{found[where]} of row {rows[where[0]]} should be {expected[where]} within "
                f"{allowed[where]} ({storage[path]}); the disk or the writer is at fault"
            )


def tolerance(values: np.ndarray, storage: str) -> np.ndarray:
    """The largest difference per value that `storage` explains; `values` [R, ...], whole rows."""
    if storage in _ROUNDING:
        relative, absolute = _ROUNDING[storage]
        return relative * np.abs(values) + absolute
    blocks = values.reshape(values.shape[0], -1, _BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    step = {
        "Q8_0": largest / 127 / 2,
        "Q4_1": (blocks.max(axis=-1, keepdims=True) - blocks.min(axis=-1, keepdims=True)) / 15 / 2,
        "Q4_0": largest / 8,
    }[storage]
    allowed = step + _HALF_SCALE * largest + 2.0**-20
    return np.broadcast_to(allowed, blocks.shape).reshape(values.shape)


def _both_nan(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return np.isnan(found) & np.isnan(expected)
