"""How does a quantised checkpoint become a GPTQ folder that other engines load?"""

from collections.abc import Callable
from pathlib import Path as FilePath

import numpy as np

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.gptq import BITS
from checkpoints_conv.packed_parts import (
    CommonForm,
    add_dense,
    dtype_name,
    engine_scale,
    is_packed_part,
    packed_names,
)
from checkpoints_conv.quant_format import (
    MIDDLE,
    pack_words,
    unsigned_codes,
    unsigned_zeros,
)
from checkpoints_conv.safetensors_writer import SafetensorsWriter
from checkpoints_conv.tree import Path, expected_leaves, leaf_nbytes
from checkpoints_conv.write_folder import max_names, write_rest
from helios_jax.quant import QuantTensor


def write_gptq(
    folder: FilePath,
    checkpoint: Checkpoint,
    wrote: Callable[[int], None] = lambda num_bytes: None,
) -> dict[Path, str]:
    """Writes 3-, 4- or 8-bit linears packed, everything else dense, into the empty `folder`.

    Codes, zero points, scales and act-order are those of the checkpoint. `gptq` describes the
    layout. The file is of version 1, which more engines load, unless a zero point is 0: version 1
    cannot hold that one. Zero points (1 / 64 of the weights and less) stay in memory for that.

    Returns:
      How each leaf is stored, for `verify`.

    Raises:
      ValueError: naming the leaf that GPTQ cannot hold.
    """
    form = CommonForm("GPTQ", BITS)
    specs = expected_leaves(checkpoint.config)
    scale_dtypes = set()
    storage = dict.fromkeys(specs, "exact")
    zeros: dict[str, np.ndarray] = {}
    act_order = packed_head = False
    with SafetensorsWriter(folder, max_names(checkpoint)) as writer:
        for path, leaf in checkpoint.tensors():
            where, module = packed_names(checkpoint, path)
            # A head is packed where it fits: engines take it with "lm_head": true.
            fits = isinstance(leaf, QuantTensor) and form.why_not(leaf) is None
            head = path[0] == "lm_head" and form.bits is not None and fits
            if head or is_packed_part(path, leaf):
                assert isinstance(leaf, QuantTensor)
                form.include(where, leaf)
                for count, axis in ((leaf.in_features, "inputs"), (leaf.out_features, "outputs")):
                    if count * leaf.bits % 32:
                        raise ValueError(
                            f"{where} has {count} {axis}: must fill whole words of 32 bits with "
                            f"{leaf.bits}-bit codes"
                        )
                scale = engine_scale(where, np.asarray(leaf.scale))
                scale_dtypes.add(scale.dtype)
                act_order |= leaf.perm is not None
                packed_head |= head
                zeros[module] = unsigned_zeros(leaf).T
                writer.add_array(f"{module}.qweight", _qweight(leaf))
                writer.add_array(f"{module}.scales", np.ascontiguousarray(scale.T))
                writer.add_array(f"{module}.g_idx", _g_idx(leaf))
            else:
                if specs[path].kind == "linear" and path[0].startswith("layers_"):
                    form.dense_modules.append(module)
                storage[path] = add_dense(writer, path, leaf, specs[path])
            wrote(leaf_nbytes(leaf))
        form.check_used(str(checkpoint.path))
        assert form.bits is not None
        version = 2 if any((array == 0).any() for array in zeros.values()) else 1
        for module, array in zeros.items():
            stored = array if version == 2 else array - 1
            writer.add_array(f"{module}.qzeros", pack_words(stored, form.bits))
        quantization = {
            "quant_method": "gptq",
            "bits": form.bits,
            "group_size": form.group_size,
            "desc_act": act_order,
            "sym": all((array == MIDDLE[form.bits]).all() for array in zeros.values()),
            "lm_head": packed_head,
            "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
            "pack_dtype": "int32",
        }
        if form.dense_modules:  # GPTQModel's and vLLM's way to say that a linear is dense
            quantization["dynamic"] = {
                f"-:{module.replace('.', chr(92) + '.')}$": {} for module in form.dense_modules
            }
        write_rest(folder, checkpoint, writer, dtype_name(scale_dtypes), quantization)
    return storage


def _qweight(weight: QuantTensor) -> np.ndarray:
    """Words int32 [K * bits / 32, N], the input channels in their own order."""
    codes_NK = unsigned_codes(weight)
    if weight.perm is not None:
        codes_NK = codes_NK[:, np.argsort(np.asarray(weight.perm))]
    return np.ascontiguousarray(pack_words(codes_NK, weight.bits).T)


def _g_idx(weight: QuantTensor) -> np.ndarray:
    g_idx = np.arange(weight.in_features, dtype=np.int32) // np.int32(weight.group_size)
    if weight.perm is not None:
        g_idx[np.asarray(weight.perm)] = g_idx.copy()
    return g_idx
