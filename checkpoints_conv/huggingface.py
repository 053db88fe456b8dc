"""Which leaf of the parameters tree each safetensors tensor of a Hugging Face folder becomes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.huggingface_config import huggingface_config, huggingface_generation
from checkpoints_conv.json_files import read_json
from checkpoints_conv.tree import (
    Leaf,
    LeafSpec,
    Path,
    check_num_layers,
    check_tensors,
    expected_leaves,
)
from helios_jax.tokenizer import Tokenizer

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that old checkpoints saved; config.json says it
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COMPARE_ROWS = 1024
_MODULES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_TOP_LEVEL = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}


def open_huggingface(folder: FilePath) -> Checkpoint:
    """Opens a Hugging Face folder: config.json and the safetensors headers are read and checked.

    Raises:
      ValueError: naming the file and what is missing, unexpected, wrongly shaped or not supported.
    """
    config = huggingface_config(folder)
    shards = _shards(folder)
    where = str(folder)
    found = {
        name: described
        for shard in sorted(set(shards.values()))
        for name, described in _describe(shard).items()
    }
    check_num_layers(where, config, len(found))
    leaves = expected_leaves(config)
    shapes = {
        name: shape for name, (shape, _) in found.items() if not name.endswith(_IGNORED_SUFFIX)
    }
    head, embedding = _TOP_LEVEL["lm_head"], _TOP_LEVEL["embed"]
    tied = config.vocab_size, config.hidden_size
    if config.tie_word_embeddings and shapes.get(head) == shapes.get(embedding) == tied:
        del shapes[head]
        if not _equal(shards, found, head, embedding):
            raise ValueError(
                f"{folder}: tensor {head!r} differs from {embedding!r}, but config.json has "
                "tie_word_embeddings=true; set it to false to use the separate head, or remove it"
            )
    check_tensors(where, {tensor_name(path): spec.shape for path, spec in leaves.items()}, shapes)
    return Checkpoint(
        path=folder,
        format="huggingface",
        config=config,
        generation=huggingface_generation(folder),
        num_tensors=len(leaves),
        nbytes=sum(
            int(np.prod(spec.shape)) * np.dtype(found[tensor_name(path)][1]).itemsize
            for path, spec in leaves.items()
        ),
        describe_source=lambda: {
            "format": "huggingface",
            "files": [
                {"name": shard.name, "bytes": shard.stat().st_size}
                for shard in sorted(set(shards.values()))
            ],
        },
        read_leaves=lambda: _read_leaves(shards, leaves),
        read_tokenizer=lambda: Tokenizer.from_huggingface(folder, config.eos_token_ids),
    )


def tensor_name(path: Path) -> str:
    """The Hugging Face name of the tensor that the leaf at `path` comes from."""
    top, *modules, field = path
    if top in _TOP_LEVEL:
        return _TOP_LEVEL[top]
    suffix = "bias" if field == "bias" else "weight"
    layer = f"model.layers.{top.removeprefix('layers_')}"
    return f"{layer}.{_MODULES['.'.join(modules)]}.{suffix}"


def _read_leaves(
    shards: dict[str, FilePath], leaves: dict[Path, LeafSpec]
) -> Iterator[tuple[Path, Leaf]]:
    for path, spec in leaves.items():
        name = tensor_name(path)
        with _opened(shards[name]) as file:
            tensor = file.get_tensor(name)
        yield path, np.ascontiguousarray(tensor.T) if spec.kind == "linear" else tensor


def _shards(folder: FilePath) -> dict[str, FilePath]:
    """The file that holds each tensor, as the files themselves and the index agree."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists():
        return dict.fromkeys(_names(single), single)
    if not index.exists():
        raise ValueError(_no_weights(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map={weight_map!r}: must map tensor names to files")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or FilePath(file_name).name != file_name:
            raise ValueError(
                f"{index}: tensor {name!r} is mapped to {file_name!r}: must be a file name within "
                "the folder"
            )
    shards: dict[str, FilePath] = {}
    for file_name in sorted(set(weight_map.values())):
        shard = folder / file_name
        if not shard.exists():
            raise ValueError(
                f"{index}: names the file {file_name!r}, which is missing; download it"
            )
        indexed = {name for name, mapped in weight_map.items() if mapped == file_name}
        for name in indexed.symmetric_difference(_names(shard)):
            states = "is missing from" if name in indexed else "is not mapped by the index to"
            raise ValueError(f"{index}: tensor {name!r} {states} {file_name!r}")
        shards |= dict.fromkeys(indexed, shard)
    return shards


def _no_weights(folder: FilePath) -> str:
    pickled = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")
    )
    if pickled:
        return (
            f"{folder}: the weights are in {pickled[0]!r}, a pickle, which can run code when it is "
            "read; write them as safetensors with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return f"{folder}: neither {_SINGLE} nor {_INDEX} is there; download the model's weights"


def _names(path: FilePath) -> list[str]:
    with _opened(path) as file:
        return list(file.keys())


def _describe(path: FilePath) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shape and numpy dtype of every tensor; a ValueError for a dtype that is not implemented."""
    described = {}
    with _opened(path) as file:
        for name in file.keys():
            view = file.get_slice(name)
            dtype = str(view.get_dtype())
            if dtype not in _DTYPES:
                raise ValueError(
                    f"{path}: tensor {name!r} has dtype {dtype}: must be one of {tuple(_DTYPES)}"
                )
            described[name] = tuple(view.get_shape()), _DTYPES[dtype]
    return described


def _equal(
    shards: dict[str, FilePath], found: dict[str, tuple[tuple[int, ...], Any]], *names: str
) -> bool:
    """Whether the two tensors `names` are the same bits, without holding either in memory."""
    first, second = names
    if found[first] != found[second]:
        return False
    with _opened(shards[first]) as file, _opened(shards[second]) as other:
        views = file.get_slice(first), other.get_slice(second)
        num_rows = found[first][0][0]
        for start in range(0, num_rows, _COMPARE_ROWS):
            end = min(start + _COMPARE_ROWS, num_rows)
            rows = [view[start:end].tobytes() for view in views]
            if rows[0] != rows[1]:
                return False
    return True


@contextmanager
def _opened(path: FilePath) -> Iterator[Any]:
    """The opened safetensors file; its errors become ValueErrors that name it."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or damaged safetensors file: {error}") from None
