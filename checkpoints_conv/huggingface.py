"""Which leaf of the parameters tree each tensor of a Hugging Face folder becomes."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from checkpoints_conv.awq import awq_format
from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.compressed_tensors import compressed_tensors_format
from checkpoints_conv.fp8 import METHODS as FP8_METHODS
from checkpoints_conv.fp8 import fp8_format
from checkpoints_conv.gptq import gptq_format
from checkpoints_conv.huggingface_config import huggingface_config, huggingface_generation
from checkpoints_conv.json_files import read_json
from checkpoints_conv.kv_scales import kv_scale_tensors, read_kv_scales
from checkpoints_conv.quant_format import QuantFields, QuantFormat, Stored, StoredLinear
from checkpoints_conv.tensor_files import TensorFiles, TensorInfo, open_tensor_files
from checkpoints_conv.tree import (
    Leaf,
    LeafSpec,
    Path,
    check_num_layers,
    check_tensors,
    expected_leaves,
)
from helios_jax.tokenizer import Tokenizer

DENSE_DTYPES = ("F32", "F16", "BF16")
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"  # a buffer that old checkpoints saved; config.json says it
_QUANT_FORMATS: dict[str, Callable[[QuantFields], QuantFormat]] = {
    "awq": awq_format,
    "gptq": gptq_format,
    "compressed-tensors": compressed_tensors_format,
    **dict.fromkeys(FP8_METHODS, fp8_format),
}
# Where AutoAWQ and AutoGPTQ put their configuration before config.json had a place for it.
_OLD_QUANT_FILES = {"quant_config.json": "awq", "quantize_config.json": "gptq"}
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
    """Opens a Hugging Face folder: config.json and the weight files' headers are read and checked.

    Raises:
      ValueError: naming the file and what is missing, unexpected, wrongly shaped or not supported.
    """
    config = huggingface_config(folder)
    quant = _quant_format(folder)
    files = open_tensor_files(folder)
    found = files.tensors
    check_num_layers(str(folder), config, len(found))
    leaves = expected_leaves(config)
    linears = _quantised_linears(quant, leaves, found)
    if quant is not None and quant.marker and not linears:
        raise ValueError(
            f"{folder}: config.json states quant_method={quant.name!r}, but no linear has a tensor "
            f"{quant.marker!r}; remove quantization_config, or download the quantised weights"
        )
    expected = _expected_tensors(leaves, linears, found)
    kv_tensors = kv_scale_tensors(found, config.num_layers)
    ignored = (_IGNORED_SUFFIX, *(quant.ignored if quant is not None else ()))
    read = {
        name: info
        for name, info in found.items()
        if name not in kv_tensors and (name in expected or not name.endswith(ignored))
    }
    head, embedding = _TOP_LEVEL["lm_head"], _TOP_LEVEL["embed"]
    if config.tie_word_embeddings and head in read and embedding in read:
        del read[head]
        same_form = found[head][:2] == found[embedding][:2]
        if not same_form or not files.same_bytes(head, embedding):
            raise ValueError(
                f"{folder}: tensor {head!r} differs from {embedding!r}, but config.json has "
                "tie_word_embeddings=true; set it to false to use the separate head, or remove it"
            )
    if quant is not None and quant.zero_biases:
        for name in [name for name in read if name.endswith(".bias") and name not in expected]:
            if not files.read(name).any():
                del read[name]
    check_tensors(
        str(folder),
        {name: _shape_of(stored, read.get(name)) for name, stored in expected.items()},
        {name: info.shape for name, info in read.items()},
    )
    for name, stored in expected.items():
        if found[name].dtype not in stored.dtypes:
            raise ValueError(
                f"{found[name].file}: tensor {name!r} has dtype {found[name].dtype}: must be one "
                f"of {stored.dtypes}"
            )
    paths = sorted({info.file for info in found.values()})
    return Checkpoint(
        path=folder,
        format="huggingface" if quant is None else quant.name,
        config=config,
        generation=huggingface_generation(folder),
        num_tensors=len(leaves),
        nbytes=sum(
            linears[path].nbytes if path in linears else found[tensor_name(path)].nbytes
            for path in leaves
        ),
        describe_source=lambda: {
            "format": "huggingface" if quant is None else quant.name,
            "files": [{"name": path.name, "bytes": path.stat().st_size} for path in paths],
        },
        read_leaves=lambda: _read_leaves(files, leaves, linears),
        read_tokenizer=lambda: Tokenizer.from_huggingface(folder, config.eos_token_ids),
        kv_scales=read_kv_scales(str(folder), kv_tensors, files.read, config),
    )


def tensor_name(path: Path) -> str:
    """The Hugging Face name of the tensor that the leaf at `path` comes from."""
    top, *modules, field = path
    if top in _TOP_LEVEL:
        return _TOP_LEVEL[top]
    suffix = "bias" if field == "bias" else "weight"
    layer = f"model.layers.{top.removeprefix('layers_')}"
    return f"{layer}.{_MODULES['.'.join(modules)]}.{suffix}"


def module_name(path: Path) -> str:
    """The Hugging Face name of the module that the leaf at `path` belongs to."""
    return tensor_name(path).rpartition(".")[0]


def _quant_format(folder: FilePath) -> QuantFormat | None:
    """The quantised format that the folder's JSON states; None for a dense model."""
    path = folder / "config.json"
    values: Any = read_json(path).get("quantization_config")
    if values is None:
        for name, method in _OLD_QUANT_FILES.items():
            if (folder / name).exists():
                path = folder / name
                values = {"quant_method": method} | read_json(path)
                break
        else:
            return None
    prefix = "quantization_config." if path.name == "config.json" else ""
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}: quantization_config={str(values)[:200]!r}: must be a JSON object"
        )
    fields = QuantFields(path, values, prefix)
    method = fields.text("quant_method", "")
    if method not in _QUANT_FORMATS:
        raise fields.refused(
            "quant_method",
            f"one of {tuple(_QUANT_FORMATS)}; anything else is not implemented: convert from the "
            "unquantised checkpoint",
        )
    return _QUANT_FORMATS[method](fields)


def _quantised_linears(
    quant: QuantFormat | None, leaves: dict[Path, LeafSpec], found: Mapping[str, TensorInfo]
) -> dict[Path, StoredLinear]:
    """How the linears that are quantised are stored, by the path of their kernel."""
    if quant is None:
        return {}
    by_module: dict[str, dict[str, TensorInfo]] = {}
    for name, info in found.items():
        module, _, suffix = name.rpartition(".")
        by_module.setdefault(module, {})[suffix] = info
    linears = {}
    for path, spec in leaves.items():
        if spec.kind == "linear":
            module = module_name(path)
            num_out, num_in = spec.shape
            linear = quant.linear(module, (num_out, num_in), by_module.get(module, {}))
            if linear is not None:
                linears[path] = linear
    return linears


def _expected_tensors(
    leaves: dict[Path, LeafSpec],
    linears: Mapping[Path, StoredLinear],
    found: Mapping[str, TensorInfo],
) -> dict[str, Stored]:
    """What must be in the files, by name; optional tensors only where they are there."""
    expected: dict[str, Stored] = {}
    for path, spec in leaves.items():
        if path not in linears:
            expected[tensor_name(path)] = Stored((spec.shape,), DENSE_DTYPES)
            continue
        module = module_name(path)
        for suffix, stored in linears[path].tensors.items():
            if not stored.optional or f"{module}.{suffix}" in found:
                expected[f"{module}.{suffix}"] = stored
    return expected


def _shape_of(stored: Stored, info: TensorInfo | None) -> tuple[int, ...]:
    """The found shape where it is allowed, else the first of those that are."""
    return info.shape if info is not None and info.shape in stored.shapes else stored.shapes[0]


def _read_leaves(
    files: TensorFiles, leaves: dict[Path, LeafSpec], linears: Mapping[Path, StoredLinear]
) -> Iterator[tuple[Path, Leaf]]:
    for path, spec in leaves.items():
        if path in linears:
            module = module_name(path)
            arrays = {
                suffix: files.read(f"{module}.{suffix}")
                for suffix in linears[path].tensors
                if f"{module}.{suffix}" in files.tensors
            }
            file = next(files.tensors[f"{module}.{suffix}"].file for suffix in arrays)
            yield path, linears[path].build(f"{file}: linear {module!r}", arrays)
        else:
            tensor = files.read(tensor_name(path))
            yield path, np.ascontiguousarray(tensor.T) if spec.kind == "linear" else tensor
