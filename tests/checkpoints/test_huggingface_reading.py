"""Is every tensor and every setting of a Hugging Face folder what it should be afterwards?"""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from checkpoints_conv import open_checkpoint, read_params
from helios_jax.config import RopeConfig
from tests.checkpoints.tiny_checkpoints import (
    BOS,
    EOS,
    expected_dense,
    random_weights,
    tiny_config,
    write_gguf,
    write_huggingface,
)


def config_of(folder, changes, generation=None, architecture="llama", **fields):
    """The ModelConfig of a tiny model whose config.json has these changes."""
    config = tiny_config(architecture, **fields)
    write_huggingface(
        folder, config, random_weights(config), changes=changes, generation=generation
    )
    return open_checkpoint(folder).config


def refusal(folder, changes, **options):
    with pytest.raises(ValueError) as error:
        config_of(folder, changes, **options)
    assert str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {}),
        ("llama", dict(qkv_bias=True, attention_output_bias=True, mlp_bias=True)),
        ("mistral", dict(sliding_window=64)),
        ("qwen2", dict(qkv_bias=True)),
        ("qwen3", dict(qk_norm=True, head_dim=32)),
        ("qwen3", dict(qk_norm=True, qkv_bias=True, attention_output_bias=True)),
        ("llama", dict(tie_word_embeddings=True, activation="gelu_tanh")),
    ],
)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_weights_and_config_come_back_exactly(tmp_path, architecture, fields, num_shards):
    config = tiny_config(architecture, **fields)
    weights = random_weights(config)
    changes = {"hidden_act": "gelu_pytorch_tanh"} if config.activation == "gelu_tanh" else {}
    folder = write_huggingface(tmp_path, config, weights, num_shards=num_shards, changes=changes)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == config
    assert checkpoint.format == "huggingface"
    leaves = dict(checkpoint.tensors())
    assert list(leaves) == list(weights)
    for path, array in weights.items():
        np.testing.assert_array_equal(leaves[path], expected_dense(path, array))
    assert checkpoint.num_tensors == len(weights)
    assert checkpoint.nbytes == sum(array.nbytes for array in weights.values())
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("thé")) == "thé"
    assert checkpoint.tokenizer.eos_token_ids == (EOS,)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes_are_kept(tmp_path, dtype):
    config = tiny_config()
    weights = random_weights(config)
    write_huggingface(tmp_path, config, weights, dtype)
    for path, leaf in open_checkpoint(tmp_path).tensors():
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(leaf, expected_dense(path, weights[path].astype(dtype)))


def test_a_gguf_of_the_same_weights_gives_the_same_tree(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    write_huggingface(tmp_path / "hf", config, weights)
    theirs = read_params(open_checkpoint(tmp_path / "hf"))["params"]
    path = write_gguf(tmp_path / "m.gguf", config, weights)
    ours = read_params(open_checkpoint(path))["params"]
    attention = "layers_0", "attention"
    for name in "qkvo":
        pair = [tree[attention[0]][attention[1]][name]["kernel"] for tree in (ours, theirs)]
        np.testing.assert_array_equal(*pair)


def test_tied_head(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    weights = random_weights(config)
    embedding = weights["embed", "embedding"]
    write_huggingface(tmp_path, config, weights, extra={"lm_head.weight": embedding})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == config
    assert "lm_head" not in read_params(checkpoint)["params"]
    write_huggingface(tmp_path, config, weights, extra={"lm_head.weight": embedding + 1})
    with pytest.raises(ValueError, match=r"'lm_head\.weight' differs from .*set it to false"):
        open_checkpoint(tmp_path)


def test_missing_head_of_an_untied_model(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    del weights["lm_head", "kernel"]
    write_huggingface(tmp_path, config, weights)
    with pytest.raises(ValueError, match=r"tensor 'lm_head\.weight' is missing"):
        open_checkpoint(tmp_path)


def test_end_tokens_are_the_union(tmp_path):
    assert config_of(
        tmp_path, {"eos_token_id": 2}, generation={"eos_token_id": [2, 7]}
    ).eos_token_ids == (2, 7)
    assert config_of(
        tmp_path, {"eos_token_id": [9, 2]}, generation={"eos_token_id": 7}
    ).eos_token_ids == (9, 2, 7)
    config = config_of(tmp_path, {"eos_token_id": ..., "bos_token_id": ...}, generation={})
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)
    assert "eos_token_id='[1.5]'" in refusal(tmp_path, {"eos_token_id": [1.5]})


def test_generation_config(tmp_path):
    stated = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "max_new_tokens": 100,
        "do_sample": True,
        "min_p": None,
        "_from_model_config": True,
    }
    config_of(tmp_path, {}, generation=stated)
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 100}
    assert open_checkpoint(tmp_path).generation == expected
    message = refusal(tmp_path, {}, generation={"temperature": "hot"})
    assert "generation_config.json: temperature='hot'" in message


def test_absent_keys_take_the_defaults_of_transformers(tmp_path):
    """As LlamaConfig, MistralConfig and Qwen3Config have them."""
    absent = dict.fromkeys(
        ["rope_theta", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings"], ...
    )
    absent |= {"rms_norm_eps": ..., "head_dim": None, "num_key_value_heads": ...}
    config = config_of(tmp_path, absent, num_kv_heads=4)
    assert config == tiny_config(num_kv_heads=4, rms_norm_eps=1e-6)
    mistral = config_of(tmp_path, {"sliding_window": ...}, architecture="mistral")
    assert mistral.sliding_window == 4096
    none = config_of(tmp_path, {"sliding_window": None}, architecture="mistral")
    assert none.sliding_window is None
    qwen3 = config_of(tmp_path, {"head_dim": ...}, architecture="qwen3", qk_norm=True, head_dim=128)
    assert qwen3.head_dim == 128


def test_architecture_from_model_type(tmp_path):
    config = config_of(tmp_path, {"architectures": ...}, architecture="mistral")
    assert config.architecture == "mistral"
    message = refusal(tmp_path, {"architectures": ..., "model_type": "gpt2"})
    assert "model_type='gpt2': must be one of" in message
    message = refusal(tmp_path, {"architectures": ["LlamaModel"]})
    assert "architectures=\"['LlamaModel']\": must be one of" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, None),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "sliding_attention"],
            },
            64,
        ),
    ],
)
def test_sliding_window_of_qwen(tmp_path, changes, expected):
    config = config_of(tmp_path, changes, architecture="qwen2", qkv_bias=True)
    assert config.sliding_window == expected


def test_layers_of_both_kinds_are_refused(tmp_path):
    changes = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    message = refusal(tmp_path, changes, architecture="qwen2", qkv_bias=True)
    assert "sliding_window='64': must be the same in every layer" in message


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("scaling", "expected", "max_model_len"),
    [
        ({"type": "linear", "factor": 2.0}, RopeConfig(5e5, "linear", 2.0, 128), 256),
        ({"type": "dynamic", "factor": 2.0}, RopeConfig(5e5, "dynamic", 2.0, 128), 256),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            RopeConfig(5e5, "yarn", 4.0, 64),
            256,
        ),
        (
            {"type": "yarn", "factor": 4, "attention_factor": 1.5, "truncate": False},
            RopeConfig(5e5, "yarn", 4.0, 128, attention_factor=1.5, truncate=False),
            512,
        ),
        ({"rope_type": "llama3", **LLAMA3}, RopeConfig(5e5, "llama3", 8.0, 8192), 128),
        ({"rope_type": "default"}, RopeConfig(5e5), 128),
        (None, RopeConfig(5e5), 128),
    ],
)
@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_rope(tmp_path, scaling, expected, max_model_len, style):
    if style == "rope_scaling":
        changes = {"rope_theta": 5e5, "rope_scaling": scaling}
    else:
        changes = {"rope_theta": ..., "rope_parameters": {**(scaling or {}), "rope_theta": 5e5}}
    config = config_of(tmp_path, changes)
    assert config.rope == expected
    assert config.max_model_len == max_model_len


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope factor=0.5"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor='None': must be given"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "rope_scaling.factor='4'"),
        ({"rope_scaling": {"type": "yarn", "twist": 1}}, "rope_scaling.twist='1': must be absent"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "original_max_position"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear': must be a JSON object"),
        ({"rope_theta": float("nan")}, "rope_theta='nan': must be a finite number"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": {}}, "equal to rope_parameters"),
        ({"hidden_act": "relu"}, "hidden_act='relu': must be one of"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor='0.5': must be 1.0"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method='bitsandbytes': must be one of",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "no linear has a tensor 'qweight'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "288"}, "vocab_size='288': must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers='True': must be an integer"),
        ({"num_hidden_layers": 10**12}, "1000000000000 layers, but there are only"),
        ({"head_dim": None, "num_attention_heads": 0}, "must be a multiple of num_attention_heads"),
        ({"bos_token_id": 10**6}, "bos_token_id=1000000: must be in"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings='1': must be true or false"),
    ],
)
def test_what_is_not_implemented_is_named(tmp_path, changes, message):
    assert message in refusal(tmp_path, changes)


def write_changed(folder, change):
    """A tiny model whose tensors `change` was applied to, by name."""
    config = tiny_config()
    write_huggingface(folder, config, random_weights(config))
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "tensor 'model.layers.1.mlp.up_proj.weight' is missing: expected shape (96, 64)",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(63, np.float32)}),
            "tensor 'model.norm.weight' has shape (63,): the configuration needs (64,)",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.gate.weight": np.zeros(3, np.float32)}),
            "unexpected tensor 'model.layers.0.mlp.gate.weight' of shape (3,)",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(64, np.int8)}),
            "tensor 'model.norm.weight' has dtype I8: must be one of ('F32', 'F16', 'BF16')",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    with pytest.raises(ValueError) as error:
        open_checkpoint(write_changed(tmp_path, change))
    assert message in str(error.value) and str(tmp_path) in str(error.value)


def test_saved_rope_buffers_are_passed_over(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_changed(tmp_path, lambda t: t.update({name: np.zeros(8, np.float32)}))
    assert open_checkpoint(tmp_path).num_tensors == 21


def test_damaged_index(tmp_path):
    config = tiny_config()
    weights = random_weights(config)
    write_huggingface(tmp_path, config, weights, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def message(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError) as error:
            open_checkpoint(tmp_path)
        return str(error.value)

    weight_map = good["weight_map"]
    first = "model.embed_tokens.weight"
    others = {name: file for name, file in weight_map.items() if name != first}
    assert f"tensor '{first}' is not mapped by the index to 'model-00001-of" in message(others)
    assert f"tensor '{first}' is mapped to '../x'" in message(weight_map | {first: "../x"})
    assert "'gone.safetensors', which is missing" in message(
        weight_map | {first: "gone.safetensors"}
    )
    swapped = weight_map | {first: "model-00002-of-00002.safetensors"}
    assert f"tensor '{first}' is" in message(swapped)
    assert "weight_map=None" in message(None)


def test_pickled_weights_are_refused_with_the_remedy(tmp_path):
    config = tiny_config()
    write_huggingface(tmp_path, config, random_weights(config))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .* download"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match=r"'pytorch_model\.bin', a pickle.*save_pretrained"):
        open_checkpoint(tmp_path)


def test_damaged_json(tmp_path):
    config = tiny_config()
    write_huggingface(tmp_path, config, random_weights(config))
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(ValueError, match=r"config\.json: is not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json: must hold a JSON object, not list"):
        open_checkpoint(tmp_path)


def test_missing_tokenizer_is_named_when_it_is_asked_for(tmp_path):
    config = tiny_config()
    write_huggingface(tmp_path, config, random_weights(config))
    (tmp_path / "tokenizer.json").unlink()
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        _ = checkpoint.tokenizer


def test_bos_token(tmp_path):
    assert config_of(tmp_path, {}).bos_token_id == BOS
