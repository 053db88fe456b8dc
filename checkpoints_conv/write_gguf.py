"""How does a checkpoint become a GGUF file that llama.cpp loads?"""

import json
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import quantize

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.dense_rows import dense_rows, row_chunks
from checkpoints_conv.gguf_config import gguf_metadata, llama3_frequency_factors
from checkpoints_conv.gguf_leaves import tensor_name
from checkpoints_conv.gguf_tokenizer import gguf_tokenizer
from checkpoints_conv.tree import Leaf, LeafSpec, Path, expected_leaves, leaf_nbytes
from helios_jax.config import ModelConfig
from helios_jax.quant import FLOAT8, QuantTensor
from pallas_kernels.packing import pack_int4

_T = GGMLQuantizationType
_FILE_TYPES = {
    "F16": LlamaFileType.MOSTLY_F16,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
}
_DENSE = {_T.F32: np.dtype(np.float32), _T.F16: np.dtype(np.float16)}
_BLOCK = 32
_ROPE_FACTORS = "rope_freqs.weight"


def write_gguf(
    path: FilePath,
    checkpoint: Checkpoint,
    wrote: Callable[[int], None] = lambda num_bytes: None,
    quant_type: str | None = None,
) -> dict[Path, str]:
    """Writes the checkpoint to the file `path`, one tensor in memory at a time.

    Args:
      quant_type: of every matrix, one of F16, Q8_0, Q4_1, Q4_0; rows that are no multiple of 32
        long get F16. Codes and scales that the type can hold are kept, other values are quantised
        anew. None writes each matrix as it is stored where a GGUF type holds that exactly, else
        F16; the checkpoint is then read twice.

    Vectors are float32. KV scales have no place in GGUF.

    Returns:
      The name of the type of each leaf, for `verify`.

    Raises:
      ValueError: naming what GGUF cannot express.
    """
    config = checkpoint.config
    specs = expected_leaves(config)
    types = _types(checkpoint, specs, quant_type)
    writer = GGUFWriter(path, _architecture(config))
    try:
        metadata = gguf_metadata(config, _architecture(config), checkpoint.generation)
        try:
            metadata |= gguf_tokenizer(checkpoint.tokenizer, config.vocab_size)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {error}") from None
        if config.bos_token_id is not None:
            metadata.setdefault("tokenizer.ggml.bos_token_id", config.bos_token_id)
        metadata["general.name"] = checkpoint.path.stem
        metadata["general.quantization_version"] = 2
        metadata["general.file_type"] = int(_FILE_TYPES[quant_type or _most_common(types)])
        metadata["helios.source"] = json.dumps(checkpoint.describe_source())
        for key, value in metadata.items():
            _add_value(writer, key, value)
        factors = _rope_factors(config)
        if factors is not None:
            writer.add_tensor_info(_ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
        for leaf_path, spec in specs.items():
            _add_info(writer, tensor_name(leaf_path), spec, types[leaf_path])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for leaf_path, leaf in checkpoint.tensors():
            spec = specs[leaf_path]
            encoded = encode(leaf, spec, types[leaf_path])
            heads = _permuted_heads(config, leaf_path)
            writer.write_tensor_data(encoded if heads is None else interleave(encoded, heads))
            wrote(leaf_nbytes(leaf))
    finally:
        writer.close()
    return {leaf_path: tensor_type.name for leaf_path, tensor_type in types.items()}


def encode(leaf: Leaf, spec: LeafSpec, tensor_type: GGMLQuantizationType) -> np.ndarray:
    """The leaf in its source's shape as GGUF stores it: [N, bytes per row], or dense floats."""
    kept = kept_blocks(leaf, tensor_type) if isinstance(leaf, QuantTensor) else None
    if kept is not None:
        return kept
    width = spec.shape[-1]
    if tensor_type in _DENSE:
        encoded = np.empty(spec.shape, _DENSE[tensor_type])
    elif tensor_type == _T.BF16:
        encoded = np.empty((*spec.shape[:-1], 2 * width), np.uint8)
    else:
        block, block_bytes = GGML_QUANT_SIZES[tensor_type]
        encoded = np.empty((spec.shape[0], width // block * block_bytes), np.uint8)
    for start, stop in row_chunks(spec):
        rows = dense_rows(leaf, spec, slice(start, stop))
        if tensor_type in _DENSE:
            with np.errstate(over="ignore"):
                encoded[start:stop] = rows
            if not np.isfinite(encoded[start:stop]).all() and np.isfinite(rows).all():
                raise ValueError(f"a value of {np.abs(rows).max()} is too large for float16")
        elif tensor_type == _T.BF16:
            encoded[start:stop] = rows.astype(ml_dtypes.bfloat16).view(np.uint8)
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                encoded[start:stop] = quantize(rows, tensor_type)
    return encoded


def kept_blocks(weight: QuantTensor, tensor_type: GGMLQuantizationType) -> np.ndarray | None:
    """Blocks uint8 [N, bytes per row] with the weight's own codes and scales; None if impossible.

    A group may span several blocks. Only Q4_1 rounds something: an integer zero point becomes a
    minimum, -scale * zero in float16, which is exact for zero points of few bits.
    """
    size = weight.group_size
    if weight.perm is not None or weight.packed.dtype == FLOAT8 or size % _BLOCK:
        return None
    scale = _half(weight.scale)
    if scale is None or tensor_type not in (_T.Q4_0, _T.Q4_1, _T.Q8_0):
        return None
    num_out, num_in = weight.out_features, weight.in_features
    codes = np.asarray(weight.codes()).astype(np.int16).reshape(num_out, -1, size)
    header = [scale]
    if tensor_type == _T.Q4_1:
        minimum = _minimum(weight)
        if weight.bits == 8 or minimum is None:
            return None
        header.append(minimum)
    elif weight.offset is not None:
        return None
    else:
        codes = codes - _zeros(weight)[..., None]
        low, high = (-8, 7) if tensor_type == _T.Q4_0 else (-128, 127)
        if codes.min() < low or codes.max() > high:
            return None
        codes = codes + 8 if tensor_type == _T.Q4_0 else codes
    rows = codes.reshape(num_out, num_in)
    if tensor_type == _T.Q8_0:
        body = rows.astype(np.int8).view(np.uint8)
    else:
        body = pack_int4(rows.astype(np.uint8), _BLOCK)
    blocks = [
        np.repeat(part, size // _BLOCK, axis=1).reshape(num_out, -1, 1).view(np.uint8)
        for part in header
    ]
    codes_part = np.asarray(body).reshape(num_out, num_in // _BLOCK, -1)
    return np.concatenate([*blocks, codes_part], axis=-1).reshape(num_out, -1)


def interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rotate-half -> interleaved order of the rows of q or k: undoes `gguf_leaves.permute_rows`."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def _zeros(weight: QuantTensor) -> np.ndarray:
    if weight.zero is None:
        return np.full(weight.scale.shape, weight.implicit_zero, np.int16)
    return np.asarray(weight.zero)


def _half(array: Any) -> np.ndarray | None:
    """The array in float16; None where that would change it."""
    array = np.asarray(array)
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    same = np.array_equal(half.astype(np.float32), array.astype(np.float32))
    return np.ascontiguousarray(half) if same else None


def _minimum(weight: QuantTensor) -> np.ndarray | None:
    """Q4_1's minimum per group, float16; None where it is out of range."""
    if weight.offset is not None:
        return _half(weight.offset)
    with np.errstate(over="ignore"):
        exact = -np.asarray(weight.scale).astype(np.float32) * _zeros(weight)
        minimum = exact.astype(np.float16)
    return minimum if np.isfinite(minimum).all() else None


def _types(
    checkpoint: Checkpoint, specs: dict[Path, LeafSpec], quant_type: str | None
) -> dict[Path, GGMLQuantizationType]:
    if quant_type is None:
        return {path: _stored_type(leaf, specs[path]) for path, leaf in checkpoint.tensors()}
    wanted = _T[quant_type]
    return {
        path: _T.F32
        if spec.kind == "vector"
        else wanted
        if spec.shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0
        else _T.F16
        for path, spec in specs.items()
    }


def _stored_type(leaf: Leaf, spec: LeafSpec) -> GGMLQuantizationType:
    """The smallest type that holds the leaf exactly, F16 for a matrix without one."""
    if spec.kind == "vector":
        return _T.F32
    if not isinstance(leaf, QuantTensor):
        return {np.dtype(np.float32): _T.F32, np.dtype(np.float16): _T.F16}.get(leaf.dtype, _T.BF16)
    candidates = (_T.Q4_1,) if leaf.offset is not None else (_T.Q4_0, _T.Q8_0)
    for candidate in candidates:
        if kept_blocks(leaf, candidate) is not None:
            return candidate
    return _T.F16


def _most_common(types: dict[Path, GGMLQuantizationType]) -> str:
    """The name of the type of most matrices, among those that a file may be named after."""
    names = [kind.name for kind in types.values()]
    return max(_FILE_TYPES, key=names.count)


def _architecture(config: ModelConfig) -> str:
    return "llama" if config.architecture == "mistral" else config.architecture


def _permuted_heads(config: ModelConfig, path: Path) -> int | None:
    """Heads whose rows GGUF's llama files interleave; None where rows stay as they are."""
    if _architecture(config) != "llama" or path[1:2] != ("attention",):
        return None
    return {"q": config.num_heads, "k": config.num_kv_heads}.get(path[2])


def _rope_factors(config: ModelConfig) -> np.ndarray | None:
    if config.rope.rope_type != "llama3":
        return None
    return llama3_frequency_factors(config.rope, config.head_dim // 2).astype(np.float32)


def _add_info(
    writer: GGUFWriter, name: str, spec: LeafSpec, tensor_type: GGMLQuantizationType
) -> None:
    if tensor_type in _DENSE:
        dtype = _DENSE[tensor_type]
        writer.add_tensor_info(name, spec.shape, dtype, int(np.prod(spec.shape)) * dtype.itemsize)
        return
    block, block_bytes = GGML_QUANT_SIZES[tensor_type]
    shape = (*spec.shape[:-1], spec.shape[-1] // block * block_bytes)
    nbytes = int(np.prod(shape))
    writer.add_tensor_info(name, shape, np.dtype(np.uint8), nbytes, raw_dtype=tensor_type)


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)
