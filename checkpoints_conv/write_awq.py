"""How does a 4-bit checkpoint become an AutoAWQ folder (version gemm) that other engines load?"""

from collections.abc import Callable
from pathlib import Path as FilePath

import numpy as np

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.packed_parts import (
    CommonForm,
    add_dense,
    dtype_name,
    engine_scale,
    is_packed_part,
    packed_names,
)
from checkpoints_conv.quant_format import (
    AWQ_ORDER,
    pack_words,
    unsigned_codes,
    unsigned_zeros,
)
from checkpoints_conv.safetensors_writer import SafetensorsWriter
from checkpoints_conv.tree import Path, expected_leaves, leaf_nbytes
from checkpoints_conv.write_folder import max_names, write_rest
from helios_jax.quant import QuantTensor

_BITS, _PER_WORD = 4, 8


def write_awq(
    folder: FilePath,
    checkpoint: Checkpoint,
    wrote: Callable[[int], None] = lambda num_bytes: None,
) -> dict[Path, str]:
    """Writes 4-bit linears packed, everything else dense, into the empty `folder`.

    Codes, zero points and scales are those of the checkpoint. `awq` describes the layout.

    Returns:
      How each leaf is stored, for `verify`.

    Raises:
      ValueError: naming the leaf that AWQ cannot hold.
    """
    form = CommonForm("AWQ", (_BITS,))
    specs = expected_leaves(checkpoint.config)
    scale_dtypes = set()
    storage = dict.fromkeys(specs, "exact")
    with SafetensorsWriter(folder, max_names(checkpoint)) as writer:
        for path, leaf in checkpoint.tensors():
            where, module = packed_names(checkpoint, path)
            if is_packed_part(path, leaf):
                assert isinstance(leaf, QuantTensor)
                form.include(where, leaf)
                if leaf.perm is not None:
                    raise ValueError(f"{where} has an act-order, which AWQ has no place for")
                if leaf.out_features % _PER_WORD:
                    raise ValueError(
                        f"{where} has {leaf.out_features} outputs: AWQ packs {_PER_WORD} into a "
                        "word"
                    )
                scale = engine_scale(where, np.asarray(leaf.scale))
                scale_dtypes.add(scale.dtype)
                writer.add_array(f"{module}.qweight", pack_awq(unsigned_codes(leaf).T))
                writer.add_array(f"{module}.qzeros", pack_awq(unsigned_zeros(leaf).T))
                writer.add_array(f"{module}.scales", np.ascontiguousarray(scale.T))
            else:
                if specs[path].kind == "linear" and path[0].startswith("layers_"):
                    form.dense_modules.append(module)
                storage[path] = add_dense(writer, path, leaf, specs[path])
            wrote(leaf_nbytes(leaf))
        form.check_used(str(checkpoint.path))
        quantization = {
            "quant_method": "awq",
            "version": "gemm",
            "bits": _BITS,
            "group_size": form.group_size,
            "zero_point": True,
            "modules_to_not_convert": [*form.dense_modules, "lm_head"],
        }
        write_rest(folder, checkpoint, writer, dtype_name(scale_dtypes), quantization)
    return storage


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """Words int32 [R, N / 8] from codes [R, N]; the inverse of `awq.unpack_awq`."""
    eights = codes.astype(np.uint8).reshape(codes.shape[0], -1, _PER_WORD)
    return pack_words(eights[..., AWQ_ORDER].reshape(codes.shape), _BITS)
