"""Are FP8 weights and KV scales read as they are, with scales per tensor, output and block?"""

import ml_dtypes
import numpy as np
import pytest

from checkpoints_conv import convert, open_checkpoint
from helios_jax.quant import FLOAT8
from tests.checkpoints.tiny_checkpoints import (
    assert_same_bits,
    random_weights,
    tiny_config,
    write_huggingface,
)
from tests.checkpoints.tiny_quantised import Q_PROJ, write_quantised

SHAPE = (64, 64)
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
# All 256 codes, NaN's two made 448.
CODES = np.arange(256, dtype=np.uint8).repeat(16).reshape(SHAPE)
CODES = np.where((CODES & 127) == 127, 126, CODES).astype(np.uint8)
WEIGHT = CODES.view(ml_dtypes.float8_e4m3fn)


def leaf(folder):
    return dict(open_checkpoint(folder).tensors())[Q_PROJ]


@pytest.mark.parametrize("shape", [(64, 1), (64,), (1,), ()])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_scales_per_tensor_and_output(tmp_path, shape, method):
    scale = np.random.default_rng(0).uniform(0.01, 0.1, shape).astype(np.float32)
    tensors = {"weight": WEIGHT, "weight_scale": scale, "input_scale": np.ones(1, np.float32)}
    found = leaf(write_quantised(tmp_path, FP8 | {"quant_method": method}, tensors))
    assert found.packed.dtype == FLOAT8 and found.group_size == 64 and found.implicit_zero == 0
    assert_same_bits(found.packed.view(np.uint8), CODES)
    expected = WEIGHT.astype(np.float32) * scale.reshape(-1, 1)
    np.testing.assert_array_equal(found.dequantize(), expected)


def test_scales_per_block(tmp_path):
    """weight_scale_inv multiplies too; a block of outputs may be cut off at the end."""
    scale = np.arange(1, 7, dtype=np.float32).reshape(3, 2) / 8
    blocks = FP8 | {"activation_scheme": "dynamic", "weight_block_size": [24, 32]}
    found = leaf(write_quantised(tmp_path, blocks, {"weight": WEIGHT, "weight_scale_inv": scale}))
    assert found.group_size == 32
    expected = WEIGHT.astype(np.float32) * scale.repeat(24, 0)[:64].repeat(32, 1)
    np.testing.assert_array_equal(found.dequantize(), expected)


def test_modelopt(tmp_path):
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8"}
    tensors = {"weight": WEIGHT, "weight_scale": np.array(0.5, np.float32)}
    assert leaf(write_quantised(tmp_path, quantization, tensors)).packed.dtype == FLOAT8
    write_quantised(tmp_path / "b", quantization | {"quant_algo": "NVFP4"}, tensors)
    with pytest.raises(ValueError, match=r"quant_algo='NVFP4': must be 'FP8'"):
        open_checkpoint(tmp_path / "b")


@pytest.mark.parametrize(
    ("quantization", "tensors", "message"),
    [
        ({}, {}, "q_proj.weight_scale' is missing: expected shape (64, 1)"),
        ({}, {"weight_scale": np.ones(3, np.float32)}, "weight_scale' has shape (3,)"),
        ({"weight_block_size": [0, 1]}, {}, "weight_block_size='[0, 1]': must be two integers"),
        ({"weight_block_size": [16, 24]}, {}, "blocks of 24 inputs do not divide its 64"),
        ({"weight_block_size": 128}, {}, "weight_block_size='128': must be two integers"),
    ],
)
def test_wrong_files(tmp_path, quantization, tensors, message):
    write_quantised(tmp_path, FP8 | quantization, {"weight": WEIGHT} | tensors)
    with pytest.raises(ValueError) as error:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(error.value) and message in str(error.value)


K0, V0 = "model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"


def kv(folder, **extra):
    config = tiny_config(num_layers=1)
    extra = {name: np.asarray(value, np.float32) for name, value in extra.items()}
    write_huggingface(folder, config, random_weights(config), extra=extra)
    return open_checkpoint(folder).kv_scales


@pytest.mark.parametrize(
    ("names", "k", "v"),
    [
        ({K0: [0.5], V0: [0.25]}, [0.5, 0.5], [0.25, 0.25]),
        ({K0: 0.5, V0: 0.25}, [0.5, 0.5], [0.25, 0.25]),
        ({K0: [[[0.5]], [[0.75]]], V0: [0.25, 2]}, [0.5, 0.75], [0.25, 2]),
        ({K0.replace("k_scale", "kv_scale"): 0.5}, [0.5, 0.5], [0.5, 0.5]),
        (
            {
                "model.layers.0.self_attn.k_proj.output_scale": 0.5,
                "model.layers.0.self_attn.v_proj.output_scale": 0.25,
            },
            [0.5, 0.5],
            [0.25, 0.25],
        ),
        (
            {
                "model.layers.0.self_attn.k_proj.k_scale": 0.5,
                "model.layers.0.self_attn.v_proj.v_scale": 0.25,
            },
            [0.5, 0.5],
            [0.25, 0.25],
        ),
        ({}, None, None),
    ],
)
def test_kv_scales(tmp_path, names, k, v):
    """v_scale is v's own: it never falls back to k_scale."""
    scales = kv(tmp_path / "source", **names)
    if k is None:
        assert scales is None
        return
    assert scales.k_LK.tolist() == [k] and scales.v_LK.tolist() == [v]
    convert(tmp_path / "source", tmp_path / "native")
    native = open_checkpoint(tmp_path / "native").kv_scales
    assert_same_bits(native.k_LK, scales.k_LK)
    assert_same_bits(native.v_LK, scales.v_LK)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({K0: 0.5}, "layer 0 has no v_scale"),
        ({K0: 0.0, V0: 1}, "k_scale' holds [0.0]: scales must be finite and above 0"),
        ({K0: np.nan, V0: 1}, "scales must be finite"),
        ({K0: [1, 2, 3], V0: 1}, "has 3 values: expected 1, or one for each of the 2 KV heads"),
        ({K0: 1, V0: 1, K0.replace("k_scale", "kv_scale"): 1}, "a second k scale of its layer"),
    ],
)
def test_wrong_kv_scales(tmp_path, names, message):
    with pytest.raises(ValueError) as error:
        kv(tmp_path, **names)
    assert str(tmp_path) in str(error.value) and message in str(error.value)


def test_damaged_native_kv_scales(tmp_path):
    kv(tmp_path / "source", **{K0: 0.5, V0: 0.25})
    convert(tmp_path / "source", tmp_path / "native")
    (tmp_path / "native" / "kv_scales.json").write_text('{"k": [[1, 1]], "v": [[1, 1]]}')
    with pytest.raises(ValueError, match=r"kv_scales\.json: does not match its sum"):
        open_checkpoint(tmp_path / "native")
