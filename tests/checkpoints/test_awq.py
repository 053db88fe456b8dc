"""Is an AutoAWQ linear read as it was packed, and everything else about it refused by name?"""

import json

import numpy as np
import pytest

from checkpoints_conv import open_checkpoint
from checkpoints_conv.awq import unpack_awq
from checkpoints_conv.write_awq import pack_awq
from tests.checkpoints.tiny_checkpoints import assert_same_bits, tiny_config
from tests.checkpoints.tiny_quantised import (
    AWQ,
    GROUP,
    Q_PROJ,
    awq_tensors,
    random_linear,
    write_quantised,
)

SHAPE = (64, 64)


def leaf(folder):
    return dict(open_checkpoint(folder).tensors())[Q_PROJ]


def refusal(folder, quantization=AWQ, **changes):
    tensors = awq_tensors(*random_linear(SHAPE)) | changes
    tensors = {suffix: array for suffix, array in tensors.items() if array is not None}
    write_quantised(folder, quantization, tensors)
    with pytest.raises(ValueError) as error:
        list(open_checkpoint(folder).tensors())
    assert str(folder) in str(error.value)
    return str(error.value)


def test_order_within_a_word():
    """AutoAWQ's packing of outputs 0..7: nibbles 0, 2, 4, 6, 1, 3, 5, 7 from the lowest up."""
    word = np.array([[0x75316420]], np.uint32).view(np.int32)
    np.testing.assert_array_equal(unpack_awq(word), np.arange(8)[None])
    np.testing.assert_array_equal(pack_awq(np.arange(8)[None]), word)


def test_packing_is_undone_exactly():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (32, 12)).astype(np.int32)
    assert_same_bits(pack_awq(unpack_awq(words)), words)


@pytest.mark.parametrize("scale_dtype", [np.float16, np.float32])
def test_values(tmp_path, scale_dtype):
    codes, zero, scale = random_linear(SHAPE)
    zero[0] = (0, 15)  # the ends of the range are zero points like any other
    scale = scale.astype(scale_dtype)
    found = leaf(write_quantised(tmp_path, AWQ, awq_tensors(codes, zero, scale)))
    np.testing.assert_array_equal(found.codes(), codes)
    assert_same_bits(found.zero, zero.astype(np.int16))
    assert_same_bits(found.scale, scale)
    expected = (codes - zero.repeat(GROUP, 1).astype(np.float32)) * scale.repeat(GROUP, 1)
    np.testing.assert_array_equal(found.dequantize(), expected)


def test_one_group(tmp_path):
    codes, zero, scale = random_linear(SHAPE)
    tensors = awq_tensors(codes, zero[:, :1], scale[:, :1])
    assert leaf(write_quantised(tmp_path, AWQ | {"group_size": -1}, tensors)).group_size == 64


def test_old_names_of_the_settings(tmp_path):
    """AutoAWQ's own quant_config.json, from before config.json had the settings."""
    codes, zero, scale = random_linear(SHAPE)
    folder = write_quantised(tmp_path, {}, awq_tensors(codes, zero, scale))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    old = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old))
    assert open_checkpoint(folder).format == "awq"
    np.testing.assert_array_equal(leaf(folder).codes(), codes)
    (folder / "quant_config.json").write_text(json.dumps(old | {"version": "GEMV"}))
    with pytest.raises(ValueError, match=r"quant_config\.json: version='GEMV': must be 'gemm'"):
        open_checkpoint(folder)


@pytest.mark.parametrize("version", ["gemv", "gemv_fast", "marlin", "exllama", "llm-awq", "ipex"])
def test_other_versions_are_refused_by_name(tmp_path, version):
    message = refusal(tmp_path, AWQ | {"version": version})
    assert f"quantization_config.version='{version}': must be 'gemm'" in message


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"bits": 3}, "quantization_config.bits='3': must be 4"),
        ({"bits": "4"}, "quantization_config.bits='4': must be an integer"),
        ({"group_size": 48}, "linear 'model.layers.0.self_attn.q_proj': group_size=48 does not"),
        ({"group_size": 0}, "group_size=0 does not divide its 64 input channels"),
        ({"quant_method": "quip"}, "quant_method='quip': must be one of ('awq', 'gptq'"),
    ],
)
def test_wrong_settings(tmp_path, quantization, message):
    assert message in refusal(tmp_path, AWQ | quantization)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qzeros": None}, "q_proj.qzeros' is missing: expected shape (2, 8)"),
        ({"qweight": None}, "q_proj.qweight' is missing: expected shape (64, 8)"),
        ({"scales": np.ones((2, 32), np.float16)}, "q_proj.scales' has shape (2, 32): the config"),
        (
            {"qweight": np.zeros((64, 8), np.int64)},
            "model.safetensors: tensor 'model.layers.0.self_attn.q_proj.qweight' has dtype I64: "
            "must be one of ('I32',)",
        ),
        ({"weight": np.ones((64, 64), np.float16)}, "unexpected tensor"),
        ({"g_idx": np.zeros(64, np.int32)}, "unexpected tensor"),
    ],
)
def test_wrong_tensors(tmp_path, changes, message):
    assert message in refusal(tmp_path, **changes)


def test_outputs_that_fill_no_word(tmp_path):
    config = tiny_config(num_layers=1, head_dim=6, num_heads=2, num_kv_heads=1)
    codes, zero, scale = random_linear((12, 64))
    tensors = {"qweight": np.zeros((64, 1), np.int32), "qzeros": np.zeros((2, 1), np.int32)}
    write_quantised(tmp_path, AWQ, tensors | {"scales": scale.T.copy()}, config=config)
    with pytest.raises(ValueError, match=r"q_proj': has 12 outputs: AWQ packs 8 into a word"):
        open_checkpoint(tmp_path)
