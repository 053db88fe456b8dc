"""What does a written Hugging Face folder hold beside its weights?

config.json, generation_config.json    the model's configuration, quantization_config included
tokenizer.json, tokenizer_config.json  and the source's other tokenizer files, where it has some
helios_manifest.json                   {"format", "source", "tensors"}: dtype, shape and sha256
                                       of every tensor, and where the weights came from
kv_scales                              as tensors self_attn.{k,v}_scale, as vLLM reads them
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.huggingface import module_name, tensor_name
from checkpoints_conv.huggingface_json import generation_json, huggingface_json
from checkpoints_conv.json_files import write_json
from checkpoints_conv.kv_scales import KvScales
from checkpoints_conv.safetensors_writer import SafetensorsWriter
from checkpoints_conv.tree import expected_leaves
from helios_jax.tokenizer import Tokenizer

MANIFEST = "helios_manifest.json"
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
_TEMPLATES = "additional_chat_templates"
_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


def max_names(checkpoint: Checkpoint) -> Iterator[str]:
    """All names that any writer may give the checkpoint's tensors."""
    for path in expected_leaves(checkpoint.config):
        yield tensor_name(path)
        yield from (f"{module_name(path)}.{suffix}" for suffix in _SUFFIXES)
    for i in range(checkpoint.config.num_layers):
        yield from (f"model.layers.{i}.self_attn.{kind}_scale" for kind in "kv")


def write_rest(
    folder: FilePath,
    checkpoint: Checkpoint,
    writer: SafetensorsWriter,
    dtype: str,
    quantization: dict[str, Any] | None = None,
) -> None:
    """Completes the weights in `writer`, and writes everything beside them."""
    if checkpoint.kv_scales is not None:
        _add_kv_scales(writer, checkpoint.kv_scales)
    writer.finish()
    config = huggingface_json(checkpoint.config, dtype)
    extra = {} if quantization is None else {"quantization_config": quantization}
    write_json(folder / "config.json", config | extra)
    write_json(
        folder / "generation_config.json",
        generation_json(checkpoint.config, checkpoint.generation),
    )
    write_tokenizer(folder, checkpoint)
    manifest = {
        "format": "huggingface" if quantization is None else quantization["quant_method"],
        "source": checkpoint.describe_source(),
        "tensors": writer.described,
    }
    write_json(folder / MANIFEST, manifest)


def _add_kv_scales(writer: SafetensorsWriter, scales: KvScales) -> None:
    """One number per layer where all heads agree, else one per head."""
    for kind, array_LK in (("k", scales.k_LK), ("v", scales.v_LK)):
        for layer, heads in enumerate(array_LK):
            same = bool((heads == heads[0]).all())
            value = heads[:1] if same else heads
            writer.add_array(f"model.layers.{layer}.self_attn.{kind}_scale", value)


def write_tokenizer(folder: FilePath, checkpoint: Checkpoint) -> None:
    """The source's own tokenizer files, or the same tokenizer in Hugging Face's files."""
    if (checkpoint.path / "tokenizer.json").is_file():
        for name in _TOKENIZER_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
        if (checkpoint.path / _TEMPLATES).is_dir():
            shutil.copytree(checkpoint.path / _TEMPLATES, folder / _TEMPLATES)
        return
    tokenizer = checkpoint.tokenizer
    text = _with_framing(tokenizer).to_str(pretty=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.config.max_model_len,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
    }
    for name, token_id in (
        ("bos_token", tokenizer.bos_token_id),
        ("eos_token", next(iter(tokenizer.eos_token_ids), None)),
    ):
        if token_id is not None:
            values[name] = tokenizer.id_to_token(token_id)
    template = tokenizer.chat_template
    if isinstance(template, str):
        values["chat_template"] = template
    elif template is not None:
        values["chat_template"] = [
            {"name": name, "template": source} for name, source in template.items()
        ]
    text = json.dumps(values, ensure_ascii=False, indent=1)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _with_framing(tokenizer: Tokenizer) -> Backend:
    """The backend, with the rule that puts BOS and EOS around a text: transformers wants one."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    if backend.post_processor is not None or not (tokenizer.add_bos or tokenizer.add_eos):
        return backend
    special = {}
    template = ["$A"]
    if tokenizer.add_bos:
        assert tokenizer.bos_token_id is not None, "Tokenizer's own rule"
        special[tokenizer.id_to_token(tokenizer.bos_token_id)] = tokenizer.bos_token_id
        template.insert(0, next(iter(special)))
    if tokenizer.add_eos:
        token = tokenizer.id_to_token(tokenizer.eos_token_ids[0])
        special[token] = tokenizer.eos_token_ids[0]
        template.append(str(token))
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(special.items())
    )
    return backend
