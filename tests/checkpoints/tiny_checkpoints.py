"""How do the tests make small models in every format, from the same weights?"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from checkpoints_conv.gguf_leaves import tensor_name as gguf_name
from checkpoints_conv.huggingface import tensor_name as huggingface_name
from checkpoints_conv.tree import expected_leaves
from helios_jax.config import ModelConfig
from helios_jax.quant import QuantTensor
from helios_jax.tokenizer.spelling import byte_alphabet

F32 = gguf.GGMLQuantizationType.F32
TOKENS = [*byte_alphabet(), "<bos>", "<eos>", *(f"<pad{i}>" for i in range(29)), "th"]
BOS, EOS = 256, 257
VOCAB_SIZE = len(TOKENS)
CONTROL, NORMAL = 3, 1


def tiny_config(architecture="llama", **changes) -> ModelConfig:
    """Four query heads, two KV heads; every size a multiple of 32, so that any Qx_y type fits."""
    fields = dict(
        architecture=architecture,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_model_len=128,
        bos_token_id=BOS,
        eos_token_ids=(EOS,),
    )
    return ModelConfig(**(fields | changes))


def random_weights(config: ModelConfig, seed=0) -> dict[tuple[str, ...], np.ndarray]:
    """float32 weights by tree path, in the sources' shapes: (out, in), rotate-half RoPE rows."""
    rng = np.random.default_rng(seed)
    return {
        path: rng.standard_normal(spec.shape).astype(np.float32)
        for path, spec in expected_leaves(config).items()
    }


def interleaved_rows(array, num_heads):
    """What llama.cpp's converter does to q and k: rows of rotate-half order to interleaved."""
    half = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def gguf_metadata(config: ModelConfig) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes."""
    architecture = "llama" if config.architecture == "mistral" else config.architecture
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_model_len,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
    }
    if config.head_dim * config.num_heads != config.hidden_size:
        values["attention.key_length"] = values["attention.value_length"] = config.head_dim
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in values.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [NORMAL] * 256 + [CONTROL] * 31 + [NORMAL],
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
    }


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[tuple[str, ...], np.ndarray],
    tensor_type=F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Writes the file that llama.cpp's converter would; matrices in `tensor_type`.

    Args:
      metadata: changes to `gguf_metadata`; None removes a key.
      extra: further float32 tensors by GGUF name; one of the model's own is replaced.
    """
    values = gguf_metadata(config) | dict(metadata or {})
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    for key, value in values.items():
        if value is not None:
            _add_value(writer, key, value)
    llama = config.architecture in ("llama", "mistral")
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    tensors = {}
    for leaf, array in weights.items():
        if llama and leaf[1:2] == ("attention",) and leaf[2] in heads:
            array = interleaved_rows(array, heads[leaf[2]])
        tensors[gguf_name(leaf)] = array
    for name, array in (tensors | dict(extra or {})).items():
        kind = tensor_type if array.ndim == 2 else F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def huggingface_json(config: ModelConfig) -> dict[str, Any]:
    """What transformers writes as config.json."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    return {
        "architectures": [names[config.architecture] + "ForCausalLM"],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.activation,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_output_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": config.sliding_window,
        "rope_theta": config.rope.theta,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_ids[0] if config.eos_token_ids else None,
        "torch_dtype": "float32",
    }


def write_huggingface(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[tuple[str, ...], np.ndarray],
    dtype=np.float32,
    num_shards=1,
    changes: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Writes the folder that save_pretrained would.

    Args:
      changes: to config.json; a key whose value is ... is removed.
      extra: further tensors by Hugging Face name; one of the model's own is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = huggingface_json(config) | dict(changes or {})
    values = {key: value for key, value in values.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(folder)
    tensors = {huggingface_name(path): array.astype(dtype) for path, array in weights.items()}
    tensors |= dict(extra or {})
    if num_shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    weight_map = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = dict(list(tensors.items())[i::num_shards])
        safetensors.numpy.save_file(shard, folder / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tokenizer(folder: Path, size: int | None = None) -> None:
    """The tokenizer of `TOKENS`; with `size`, of so few of them and no merge."""
    tokens = TOKENS if size is None else [*TOKENS[: size - 2], "<bos>", "<eos>"]
    merges = [("t", "h")] if size is None else []
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special_tokens = [token for token in tokens if token.startswith("<") and len(token) > 1]
    backend.add_special_tokens([tokenizers.AddedToken(token) for token in special_tokens])
    (folder / "tokenizer.json").write_text(backend.to_str())
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def expected_dense(path: tuple[str, ...], array: np.ndarray) -> np.ndarray:
    """The leaf that a dense source tensor becomes."""
    return array.T if path[-1] == "kernel" else array


def assert_same_leaves(found, expected) -> None:
    """Equal paths, kinds, statics, dtypes and bits."""
    found, expected = dict(found), dict(expected)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert type(found[path]) is type(leaf), path
        for name in ("packed", "scale", "zero", "offset", "perm"):
            if isinstance(leaf, QuantTensor):
                assert_same_bits(getattr(found[path], name), getattr(leaf, name))
        for name in ("bits", "group_size", "span", "implicit_zero"):
            if isinstance(leaf, QuantTensor):
                assert getattr(found[path], name) == getattr(leaf, name), (path, name)
        if not isinstance(leaf, QuantTensor):
            assert_same_bits(found[path], leaf)


def assert_same_bits(found, expected) -> None:
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
