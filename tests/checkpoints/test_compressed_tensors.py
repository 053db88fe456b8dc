"""Are compressed-tensors' settings applied to the linears they name, and the rest refused?

`test_quantised_fixtures` compares files that the library wrote.
"""

import numpy as np
import pytest

from checkpoints_conv import open_checkpoint
from tests.checkpoints.tiny_checkpoints import assert_same_bits
from tests.checkpoints.tiny_quantised import GROUP, Q_PROJ, random_linear, words, write_quantised

SHAPE = (64, 64)
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def settings(weights=None, form="pack-quantized", targets=("Linear",), **changes):
    group = {"targets": list(targets), "weights": WEIGHTS | dict(weights or {})}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    } | changes


def packed(codes, scale, zero=None, g_idx=None):
    tensors = {
        "weight_packed": words(codes),
        "weight_scale": scale,
        "weight_shape": np.array(codes.shape),
    }
    if zero is not None:
        tensors["weight_zero_point"] = np.ascontiguousarray(words(zero.T).T)
    return tensors if g_idx is None else tensors | {"weight_g_idx": np.asarray(g_idx, np.int32)}


def leaf(folder):
    return dict(open_checkpoint(folder).tensors())[Q_PROJ]


def refusal(folder, quantization, tensors):
    write_quantised(folder, quantization, tensors)
    with pytest.raises(ValueError) as error:
        list(open_checkpoint(folder).tensors())
    assert str(folder) in str(error.value)
    return str(error.value)


def test_symmetric(tmp_path):
    codes, _, scale = random_linear(SHAPE)
    found = leaf(write_quantised(tmp_path, settings(), packed(codes, scale)))
    assert found.zero is None and found.implicit_zero == 8
    np.testing.assert_array_equal(found.codes(), codes)
    assert_same_bits(found.scale, scale)


def test_asymmetric(tmp_path):
    codes, zero, scale = random_linear(SHAPE)
    zero[0] = (0, 15)
    found = leaf(
        write_quantised(tmp_path, settings({"symmetric": False}), packed(codes, scale, zero))
    )
    assert_same_bits(found.zero, zero.astype(np.int16))
    expected = (codes - zero.repeat(GROUP, 1).astype(np.float32)) * scale.repeat(GROUP, 1)
    np.testing.assert_array_equal(found.dequantize(), expected)


@pytest.mark.parametrize("unused", [True, False])
def test_activation_order(tmp_path, unused):
    codes, _, scale = random_linear(SHAPE)
    order = np.random.default_rng(1).permutation(np.arange(64) // GROUP)
    g_idx = np.full(64, -1) if unused else order
    quantization = settings({"actorder": "group"})
    found = leaf(write_quantised(tmp_path, quantization, packed(codes, scale, g_idx=g_idx)))
    assert (found.perm is None) is unused
    groups = np.arange(64) // GROUP if unused else order
    np.testing.assert_array_equal(
        found.dequantize(), (codes - np.float32(8)) * scale.astype(np.float32)[:, groups]
    )


def test_the_group_that_names_the_linear_comes_first(tmp_path):
    codes, _, scale = random_linear(SHAPE)
    quantization = settings({"group_size": 64})
    quantization["config_groups"]["group_1"] = {
        "targets": ["re:.*self_attn\\.q_proj$"],
        "weights": WEIGHTS,
    }
    assert leaf(write_quantised(tmp_path, quantization, packed(codes, scale))).group_size == 32


@pytest.mark.parametrize("shape", [(64, 1), (64,), (1,), ()])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(tmp_path, shape, symmetric):
    rng = np.random.default_rng(0)
    strategy = "channel" if 64 in shape else "tensor"
    tensors = {
        "weight": rng.integers(-128, 128, SHAPE).astype(np.int8),
        "weight_scale": rng.uniform(0.01, 0.1, shape).astype(np.float32),
    }
    if not symmetric:
        tensors["weight_zero_point"] = rng.integers(-128, 128, shape).astype(np.int8)
    quantization = settings(
        {"num_bits": 8, "strategy": strategy, "group_size": None, "symmetric": symmetric},
        form="int-quantized",
    )
    found = leaf(write_quantised(tmp_path, quantization, tensors))
    assert_same_bits(found.packed, tensors["weight"])
    zero = tensors.get("weight_zero_point", np.zeros(shape, np.int8)).astype(np.float32)
    expected = (tensors["weight"] - zero.reshape(-1, 1)) * tensors["weight_scale"].reshape(-1, 1)
    np.testing.assert_array_equal(found.dequantize(), expected)


def test_scales_of_activations_are_not_read(tmp_path):
    codes, _, scale = random_linear(SHAPE)
    tensors = packed(codes, scale) | {"input_scale": np.ones(1, np.float32)}
    np.testing.assert_array_equal(
        leaf(write_quantised(tmp_path, settings(), tensors)).codes(), codes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized': must be one of"),
        ({"format": "marlin-24"}, "format='marlin-24': must be one of"),
        ({"quantization_status": "frozen"}, "quantization_status='frozen': must be 'compressed'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not implement"),
        ({"transform_config": {"config_groups": {"u": 1}}}, "transforms are not implemented"),
        ({"config_groups": 3}, "config_groups='3': must be a JSON object"),
        ({"config_groups": {"g": {"targets": ["Embedding"]}}}, "no group of config_groups has it"),
        ({"config_groups": {"g": {"targets": ["re:("]}}}, "regular expressions"),
        ({"config_groups": {"g": {"targets": "Linear"}}}, "targets='Linear': must be a list"),
    ],
)
def test_wrong_settings(tmp_path, changes, message):
    codes, _, scale = random_linear(SHAPE)
    assert message in refusal(tmp_path, settings(**changes), packed(codes, scale))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 2}, "weights.num_bits='2': must be one of (3, 4, 8)"),
        ({"type": "float"}, "weights.type='float': must be 'int' in pack-quantized"),
        ({"strategy": "block"}, "strategy='block': must be 'group' or 'channel'"),
        ({"group_size": 48}, "linear 'model.layers.0.self_attn.q_proj': group_size=48 does not"),
        ({"symmetric": False}, "q_proj.weight_zero_point' is missing: expected shape (8, 2)"),
        ({"num_bits": 8}, "q_proj.weight_packed' has shape (64, 8): the configuration needs"),
    ],
)
def test_wrong_schemes(tmp_path, weights, message):
    codes, _, scale = random_linear(SHAPE)
    assert message in refusal(tmp_path, settings(weights), packed(codes, scale))


def test_a_shape_that_is_not_the_model_s(tmp_path):
    codes, _, scale = random_linear(SHAPE)
    tensors = packed(codes, scale) | {"weight_shape": np.array([64, 63])}
    assert "weight_shape=[64, 63]: expected [64, 64]" in refusal(tmp_path, settings(), tensors)
