"""Do pooled and repeated KV heads compute what they should?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from checkpoints_conv import convert, open_checkpoint, read_params, with_kv_heads
from checkpoints_conv.gqa import checkpoint_with_kv_heads
from helios_jax.model import Transformer
from helios_jax.quant import QuantTensor
from tests.checkpoints.tiny_checkpoints import (
    random_weights,
    tiny_config,
    write_gguf,
    write_huggingface,
)
from tests.checkpoints.tiny_quantised import copy_fixture

TOKENS = jnp.asarray([[3, 14, 15, 9, 2, 6]])


def logits(params, config):
    params = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, QuantTensor) else jnp.asarray(leaf, jnp.float32),
        params,
        is_leaf=lambda leaf: isinstance(leaf, QuantTensor),
    )
    return np.asarray(Transformer(config, jnp.float32).apply(params, TOKENS))


def model(folder, **fields):
    config = tiny_config(**fields)
    write_huggingface(folder, config, random_weights(config))
    return read_params(open_checkpoint(folder)), open_checkpoint(folder).config


@pytest.mark.parametrize("fields", [{}, dict(qkv_bias=True, attention_output_bias=True)])
def test_repeated_heads_are_the_same_function(tmp_path, fields):
    params, config = model(tmp_path, **fields)
    repeated, changed = with_kv_heads(params, config, 4)
    assert changed == dataclasses.replace(config, num_kv_heads=4)
    assert repeated["params"]["layers_0"]["attention"]["k"]["kernel"].shape == (64, 64)
    np.testing.assert_allclose(
        logits(repeated, changed), logits(params, config), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("fields", [{}, dict(qkv_bias=True, attention_output_bias=True)])
def test_pooling_undoes_repeating(tmp_path, fields):
    params, config = model(tmp_path, **fields)
    back, changed = with_kv_heads(*with_kv_heads(params, config, 4), 2)
    assert changed == config
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_pooled_heads_are_means_of_neighbours(tmp_path):
    params, config = model(tmp_path, num_kv_heads=4, num_heads=4)
    pooled, changed = with_kv_heads(params, config, 2)
    before = params["params"]["layers_1"]["attention"]
    after = pooled["params"]["layers_1"]["attention"]
    for name in ("k", "v"):
        heads = before[name]["kernel"].reshape(64, 4, 16)
        expected = np.stack([heads[:, :2].mean(1), heads[:, 2:].mean(1)], axis=1).reshape(64, 32)
        np.testing.assert_allclose(after[name]["kernel"], expected, rtol=1e-6)
    np.testing.assert_array_equal(after["q"]["kernel"], before["q"]["kernel"])
    assert logits(pooled, changed).shape == (1, 6, config.vocab_size)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
def test_quantised_heads_are_repeated_as_they_are(tmp_path, kind):
    config = tiny_config()
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), kind)
    params = read_params(open_checkpoint(path))
    repeated, changed = with_kv_heads(params, config, 4)
    old, new = (
        tree["params"]["layers_0"]["attention"]["v"]["kernel"] for tree in (params, repeated)
    )
    assert isinstance(new, QuantTensor) and new.bits == old.bits
    expected = np.asarray(old.dequantize()).reshape(2, 1, 16, 64).repeat(2, axis=1).reshape(64, 64)
    np.testing.assert_array_equal(new.dequantize(), expected)
    np.testing.assert_allclose(
        logits(repeated, changed), logits(params, config), rtol=1e-4, atol=1e-3
    )
    pooled, _ = with_kv_heads(params, config, 1)
    kernel = pooled["params"]["layers_0"]["attention"]["v"]["kernel"]
    mean = np.asarray(old.dequantize()).reshape(2, 16, 64).mean(axis=0)
    np.testing.assert_allclose(kernel, mean.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("format", ["native", "huggingface"])
def test_converted(tmp_path, num_kv_heads, format):
    params, config = model(tmp_path / "a")
    convert(
        tmp_path / "a", tmp_path / "b", format=format, num_kv_heads=num_kv_heads, verify=True,
        dtype="float32" if format == "huggingface" else None,
    )  # fmt: skip
    found = open_checkpoint(tmp_path / "b")
    expected, changed = with_kv_heads(params, config, num_kv_heads)
    assert found.config == changed
    jax.tree.map(np.testing.assert_array_equal, read_params(found), expected)


def test_kv_scales_go_with_their_heads(tmp_path):
    checkpoint = open_checkpoint(copy_fixture("compressed_fp8", tmp_path))
    scales = checkpoint.kv_scales
    scales.k_LK[0] = (0.5, 0.25)
    assert checkpoint_with_kv_heads(checkpoint, 1).kv_scales.k_LK[0].tolist() == [0.5]
    repeated = checkpoint_with_kv_heads(checkpoint, 4).kv_scales
    assert repeated.k_LK[0].tolist() == [0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("num_kv_heads", [0, -1, 3, 8, 6])
def test_numbers_that_cannot_be(tmp_path, num_kv_heads):
    params, config = model(tmp_path)
    with pytest.raises(ValueError, match=rf"num_kv_heads={num_kv_heads}: must"):
        with_kv_heads(params, config, num_kv_heads)
