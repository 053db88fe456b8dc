"""How does a checkpoint become a Hugging Face folder of dense weights?"""

from collections.abc import Callable
from pathlib import Path as FilePath

import ml_dtypes
import numpy as np

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.dense_rows import dense_chunks
from checkpoints_conv.huggingface import tensor_name
from checkpoints_conv.safetensors_writer import SafetensorsWriter
from checkpoints_conv.tree import Path, expected_leaves, leaf_nbytes
from checkpoints_conv.write_folder import max_names, write_rest

_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


def write_huggingface(
    folder: FilePath,
    checkpoint: Checkpoint,
    wrote: Callable[[int], None] = lambda num_bytes: None,
    dtype: str = "bfloat16",
) -> dict[Path, str]:
    """Writes the dense values of every leaf in `dtype` into the empty `folder`.

    Not atomic by itself: `convert` is. `wrote` is told the bytes of each leaf of the source.

    Returns:
      `dtype` for each leaf, for `verify`.

    Raises:
      ValueError: naming the leaf, or what of the configuration Hugging Face cannot express.
    """
    stored = _DTYPES[dtype]
    specs = expected_leaves(checkpoint.config)
    with SafetensorsWriter(folder, max_names(checkpoint)) as writer:
        for path, leaf in checkpoint.tensors():
            spec = specs[path]
            try:
                writer.add(tensor_name(path), spec.shape, stored, dense_chunks(leaf, spec, stored))
            except ValueError as error:
                raise ValueError(
                    f"{checkpoint.path}: parameter {'/'.join(path)!r}: {error}"
                ) from None
            wrote(leaf_nbytes(leaf))
        write_rest(folder, checkpoint, writer, dtype)
    return dict.fromkeys(specs, dtype)
