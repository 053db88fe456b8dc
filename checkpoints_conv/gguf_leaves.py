"""Which leaf of the parameters tree each GGUF tensor becomes, bit for bit where it can be.

    Q4_0, Q4_1, Q8_0   QuantTensor of the same bits (matrices; a vector is dequantised)
    F32, F16, BF16     dense, as they are
    Q5_0 ... Q6_K      dense float32 by the gguf package's dequantiser

GGUF's llama files store the rows of q and k for interleaved RoPE; they are put back into the
rotate-half order, rows of packed codes, scales and offsets alike, which is exact. qwen2 and qwen3
files have the rotate-half order already.
"""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.gguf_config import gguf_config, gguf_generation
from checkpoints_conv.gguf_reader import GgufFile, GgufTensor, read_gguf
from checkpoints_conv.tree import (
    Leaf,
    LeafSpec,
    Path,
    check_num_layers,
    check_tensors,
    expected_leaves,
)
from helios_jax.config import ModelConfig
from helios_jax.quant import QuantTensor
from helios_jax.tokenizer import Tokenizer

_T = GGMLQuantizationType
DENSE_TYPES = {_T.F32: np.float32, _T.F16: np.float16, _T.BF16: ml_dtypes.bfloat16}
QUANT_TYPES = (_T.Q4_0, _T.Q4_1, _T.Q8_0)
DEQUANTIZED_TYPES = (_T.Q5_0, _T.Q5_1, _T.Q2_K, _T.Q3_K, _T.Q4_K, _T.Q5_K, _T.Q6_K)

_GROUP = 32  # codes per block of Q4_0, Q4_1 and Q8_0
_IGNORED = ("rope_freqs.weight",)  # gguf_config turns it into RopeConfig
_COMPARE_BYTES = 1 << 20
_MODULES = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.down": "ffn_down",
}
_TOP_LEVEL = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}


def open_gguf(path: FilePath) -> Checkpoint:
    """Opens a GGUF file: the header is read and checked, the tensors are not read yet.

    Raises:
      ValueError: naming the file and the metadata or tensors that are wrong, missing, unexpected or
        of a type that is not implemented.
    """
    gguf = read_gguf(path)
    tied = "output.weight" not in gguf.tensors or _head_repeats_embedding(gguf)
    config = gguf_config(gguf, tied)
    check_num_layers(str(path), config, len(gguf.tensors))
    leaves = expected_leaves(config)
    ignored = (*_IGNORED, "output.weight") if tied else _IGNORED
    check_tensors(
        str(path),
        {tensor_name(leaf): spec.shape for leaf, spec in leaves.items()},
        {name: tensor.shape for name, tensor in gguf.tensors.items() if name not in ignored},
    )
    return Checkpoint(
        path=path,
        format="gguf",
        config=config,
        generation=gguf_generation(gguf.metadata),
        num_tensors=len(leaves),
        nbytes=sum(
            _leaf_nbytes(gguf, gguf.tensors[tensor_name(leaf)], spec)
            for leaf, spec in leaves.items()
        ),
        describe_source=lambda: _describe_source(path),
        read_leaves=lambda: _read_leaves(gguf, config, leaves),
        read_tokenizer=lambda: Tokenizer.from_gguf_metadata(gguf.metadata),
    )


def tensor_name(path: Path) -> str:
    """The GGUF name of the tensor that the leaf at `path` comes from."""
    top, *modules, field = path
    if top in _TOP_LEVEL:
        return _TOP_LEVEL[top]
    suffix = "bias" if field == "bias" else "weight"
    return f"blk.{top.removeprefix('layers_')}.{_MODULES['.'.join(modules)]}.{suffix}"


def permute_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleaved -> rotate-half order of the rows [num_heads * H, ...] of q or k.

    GGUF keeps the two halves of a head's dimension pair side by side, row 2 j + s; rotate-half
    RoPE wants row s * H / 2 + j.
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _read_leaves(
    gguf: GgufFile, config: ModelConfig, leaves: dict[Path, LeafSpec]
) -> Iterator[tuple[Path, Leaf]]:
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    for path, spec in leaves.items():
        name = tensor_name(path)
        permuted = config.architecture == "llama" and path[1:2] == ("attention",)
        num_heads = heads.get(path[2]) if permuted else None
        yield path, _leaf(gguf.read(name), gguf.tensors[name], spec, num_heads)


def _leaf(raw: np.ndarray, tensor: GgufTensor, spec: LeafSpec, num_heads: int | None) -> Leaf:
    """The leaf of `spec` from the bytes `raw`; with `num_heads`, rows are un-permuted first."""
    if num_heads is not None and spec.kind == "linear":
        raw = permute_rows(raw, num_heads)
    if tensor.type in QUANT_TYPES and spec.kind != "vector":
        return quant_tensor(raw, tensor.type)
    if tensor.type in DENSE_TYPES:
        dense = raw.reshape(-1).view(DENSE_TYPES[tensor.type]).reshape(tensor.shape)
    else:
        with np.errstate(all="ignore"):  # scales that are infinite or NaN stay so
            dense = dequantize(raw, tensor.type).reshape(tensor.shape)
    if spec.kind == "linear":
        return np.ascontiguousarray(dense.T)
    return permute_rows(dense, num_heads) if num_heads is not None else dense


def quant_tensor(raw: np.ndarray, tensor_type: GGMLQuantizationType) -> QuantTensor:
    """Blocks of Q4_0, Q4_1 or Q8_0 (uint8 [N, bytes per row]) as the QuantTensor of equal bits.

    A block holds the scale (float16), for Q4_1 the minimum (float16), then the codes of 32 weights:
    16 bytes in the order of `pallas_kernels.packing` with span 32, or 32 signed bytes.
    """
    header = 4 if tensor_type == _T.Q4_1 else 2
    codes = 32 if tensor_type == _T.Q8_0 else 16
    rows = raw.shape[0]
    blocks = raw.reshape(rows, -1, header + codes)
    halves = np.ascontiguousarray(blocks[..., :header]).view(np.float16)
    packed = np.ascontiguousarray(blocks[..., header:]).reshape(rows, -1)
    arrays: dict[str, Any] = {"packed": packed, "scale": np.ascontiguousarray(halves[..., 0])}
    if tensor_type == _T.Q8_0:
        arrays["packed"] = packed.view(np.int8)
        return QuantTensor(**arrays, bits=8, group_size=_GROUP, implicit_zero=0)
    if tensor_type == _T.Q4_1:
        arrays["offset"] = np.ascontiguousarray(halves[..., 1])
    return QuantTensor(**arrays, bits=4, group_size=_GROUP, span=32, implicit_zero=8)


def _leaf_nbytes(gguf: GgufFile, tensor: GgufTensor, spec: LeafSpec) -> int:
    """Bytes of the leaf; a ValueError for a tensor type that is not implemented."""
    if tensor.type in DENSE_TYPES or (tensor.type in QUANT_TYPES and spec.kind != "vector"):
        return tensor.nbytes
    if tensor.type in QUANT_TYPES or tensor.type in DEQUANTIZED_TYPES:
        return math.prod(tensor.shape) * 4
    known = [known.name for known in (*DENSE_TYPES, *QUANT_TYPES, *DEQUANTIZED_TYPES)]
    raise ValueError(
        f"{gguf.path}: tensor {tensor.name!r} has type {tensor.type.name}: must be one of {known}; "
        "requantise the model to one of these"
    )


def _describe_source(path: FilePath) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "format": "gguf",
        "files": [{"name": path.name, "bytes": path.stat().st_size, "sha256": digest}],
    }


def _head_repeats_embedding(gguf: GgufFile) -> bool:
    """Whether output.weight holds the same bytes as token_embd.weight: a tied head, written out."""
    embedding, head = gguf.tensors.get("token_embd.weight"), gguf.tensors["output.weight"]
    if embedding is None or (embedding.type, embedding.shape) != (head.type, head.shape):
        return False
    with gguf.path.open("rb") as file:
        for start in range(0, head.nbytes, _COMPARE_BYTES):
            count = min(_COMPARE_BYTES, head.nbytes - start)
            file.seek(embedding.offset + start)
            expected = file.read(count)
            file.seek(head.offset + start)
            if file.read(count) != expected:
                return False
    return True
