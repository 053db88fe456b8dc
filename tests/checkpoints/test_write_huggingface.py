"""Is a written Hugging Face folder the same model, in the dtype asked for?"""

import json

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors import safe_open

from checkpoints_conv import convert, open_checkpoint, safetensors_writer
from helios_jax.config import RopeConfig
from helios_jax.quant import QuantTensor
from tests.checkpoints.tiny_checkpoints import (
    expected_dense,
    random_weights,
    tiny_config,
    write_gguf,
    write_huggingface,
)

CONFIGS = {
    "llama": {},
    "llama biases": dict(qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "llama3": dict(
        rope=RopeConfig(5e5, "llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    ),
    "linear": dict(rope=RopeConfig(rope_type="linear", factor=2.0, original_max_position=64)),
    "dynamic": dict(rope=RopeConfig(rope_type="dynamic", factor=2.0, original_max_position=64)),
    "yarn": dict(
        rope=RopeConfig(
            rope_type="yarn", factor=4.0, original_max_position=32, beta_fast=16.0,
            attention_factor=1.25, mscale=1.0, mscale_all_dim=0.5, truncate=False,
        ),
    ),
    "mistral": dict(architecture="mistral", sliding_window=64),
    "qwen2": dict(architecture="qwen2", qkv_bias=True, sliding_window=32),
    "qwen3": dict(architecture="qwen3", qk_norm=True, head_dim=32, tie_word_embeddings=True),
    "eos": dict(eos_token_ids=(257, 258), activation="gelu_tanh"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration_and_tokenizer_come_back(tmp_path, name):
    config = tiny_config(**CONFIGS[name])
    weights = random_weights(config)
    changes = json.loads(json.dumps(_huggingface_changes(config)))
    generation = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99}
    source = write_huggingface(
        tmp_path / "a", config, weights, changes=changes, generation=generation
    )
    convert(source, tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "b", format="huggingface", dtype="float32", verify=True)
    found, native = open_checkpoint(tmp_path / "b"), open_checkpoint(tmp_path / "native")
    assert found.config == native.config == config
    assert found.generation == native.generation
    for path, leaf in found.tensors():
        np.testing.assert_array_equal(leaf, expected_dense(path, weights[path]))
    assert found.tokenizer.fingerprint() == native.tokenizer.fingerprint()
    assert found.tokenizer.eos_token_ids == native.tokenizer.eos_token_ids
    assert found.tokenizer.encode("thé <eos>") == native.tokenizer.encode("thé <eos>")


def _huggingface_changes(config):
    """What the tests' own config.json does not say of these configurations."""
    rope = config.rope
    changes = {}
    if rope.rope_type != "default":
        scaling = {"rope_type": rope.rope_type, "factor": rope.factor}
        if rope.original_max_position:
            scaling["original_max_position_embeddings"] = rope.original_max_position
        if rope.rope_type == "llama3":
            scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        if rope.rope_type == "yarn":
            scaling |= {"beta_fast": 16.0, "attention_factor": 1.25, "mscale": 1.0}
            scaling |= {"mscale_all_dim": 0.5, "truncate": False}
        changes["rope_scaling"] = scaling
        if rope.rope_type in ("linear", "dynamic"):
            changes["max_position_embeddings"] = 64
    if config.architecture == "qwen2":
        changes |= {"use_sliding_window": True, "max_window_layers": 0}
    if len(config.eos_token_ids) > 1:
        changes |= {"eos_token_id": list(config.eos_token_ids), "hidden_act": "gelu_pytorch_tanh"}
    return changes


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [(None, ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)],
)
@pytest.mark.parametrize("tensor_type", [Type.F32, Type.Q4_1, Type.Q8_0])
def test_values_are_rounded_once(tmp_path, dtype, numpy_dtype, tensor_type):
    config = tiny_config()
    source = write_gguf(tmp_path / "m.gguf", config, random_weights(config), tensor_type)
    convert(source, tmp_path / "out", format="huggingface", dtype=dtype, verify=True)
    leaves = dict(open_checkpoint(source).tensors())
    for path, leaf in open_checkpoint(tmp_path / "out").tensors():
        expected = leaves[path]
        if isinstance(expected, QuantTensor):
            expected = np.asarray(expected.dequantize())
            expected = expected.T if path[-1] == "kernel" else expected
        assert leaf.dtype == numpy_dtype
        np.testing.assert_array_equal(leaf, expected.astype(numpy_dtype))
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"]
    assert stated == np.dtype(numpy_dtype).name


def test_float16_that_overflows(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    weights["layers_1", "ffn", "down", "kernel"][3, 4] = 1e5
    source = write_huggingface(tmp_path / "a", config, weights)
    with pytest.raises(ValueError, match=r"layers_1/ffn/down/kernel': a value of 100000\.0 is too"):
        convert(source, tmp_path / "b", format="huggingface", dtype="float16")
    assert not (tmp_path / "b").exists()


def test_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_writer, "MAX_SHARD_BYTES", 100_000)
    config = tiny_config()
    weights = random_weights(config)
    source = write_huggingface(tmp_path / "a", config, weights)
    convert(source, tmp_path / "b", format="huggingface", dtype="float32", verify=True)
    files = sorted(path.name for path in (tmp_path / "b").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        with safe_open(tmp_path / "b" / file, "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
    for path, leaf in open_checkpoint(tmp_path / "b").tensors():
        np.testing.assert_array_equal(leaf, expected_dense(path, weights[path]))


def test_a_tokenizer_that_begins_texts_with_bos(tmp_path):
    """From GGUF, whose metadata says so; in Hugging Face's files it is a post-processor."""
    config = tiny_config()
    metadata = {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    source = write_gguf(tmp_path / "m.gguf", config, random_weights(config), metadata=metadata)
    convert(source, tmp_path / "out", format="huggingface")
    before, after = open_checkpoint(source).tokenizer, open_checkpoint(tmp_path / "out").tokenizer
    assert after.add_bos and after.encode("th") == before.encode("th") == [256, 287]
    message = [{"role": "user", "content": "th"}]
    assert after.apply_chat_template(message) == before.apply_chat_template(message)
    assert after.backend.encode("th").ids == [256, 287]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(qkv_bias=True), "qkv_bias, attention_output_bias=(True, False): Hugging Face's llam"),
        (dict(architecture="qwen2", qkv_bias=True, mlp_bias=True), "mlp_bias=True: Hugging Face's"),
    ],
)
def test_what_hugging_face_cannot_express(tmp_path, fields, message):
    config = tiny_config(**fields)
    source = write_gguf(tmp_path / "m.gguf", config, random_weights(config))
    with pytest.raises(ValueError) as error:
        convert(source, tmp_path / "out", format="huggingface")
    assert message in str(error.value) and not (tmp_path / "out").exists()
