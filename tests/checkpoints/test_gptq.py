"""Is a GPTQ linear read as it was packed, also where the metadata lies about it?"""

import numpy as np
import pytest

from checkpoints_conv import open_checkpoint
from checkpoints_conv.quant_format import pack_words, unpack_words
from tests.checkpoints.tiny_checkpoints import assert_same_bits
from tests.checkpoints.tiny_quantised import (
    GPTQ,
    GROUP,
    Q_PROJ,
    gptq_tensors,
    random_linear,
    words,
    write_quantised,
)

SHAPE = (64, 64)
V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
SYMMETRIC = GPTQ | {"sym": True}
IN_ORDER = np.arange(64) // GROUP
ORDER = np.random.default_rng(7).permutation(np.arange(64) // GROUP)


def leaf(folder):
    return dict(open_checkpoint(folder).tensors())[Q_PROJ]


def refusal(folder, quantization=GPTQ, **changes):
    tensors = gptq_tensors(*random_linear(SHAPE)) | changes
    tensors = {suffix: array for suffix, array in tensors.items() if array is not None}
    write_quantised(folder, quantization, tensors)
    with pytest.raises(ValueError) as error:
        list(open_checkpoint(folder).tensors())
    assert str(folder) in str(error.value)
    return str(error.value)


def weights(codes, zero, scale, g_idx=IN_ORDER):
    return (codes - zero.astype(np.float32)[:, g_idx]) * scale.astype(np.float32)[:, g_idx]


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_words_are_a_bit_stream(bits):
    """3-bit codes straddle words: code 10 has two bits in the first word and one in the second."""
    codes = np.random.default_rng(0).integers(0, 1 << bits, (5, 64)).astype(np.uint8)
    packed = pack_words(codes, bits)
    stream = packed.view(np.uint32).astype(object)
    for row in range(5):
        number = sum(int(word) << (32 * i) for i, word in enumerate(stream[row]))
        assert number == sum(int(code) << (bits * j) for j, code in enumerate(codes[row]))
    np.testing.assert_array_equal(unpack_words(packed, bits, 64), codes)


def test_order_within_a_word():
    """GPTQ's inputs 0..7 of a word from the lowest nibble up."""
    word = np.array([[0x76543210]], np.uint32).view(np.int32)
    np.testing.assert_array_equal(unpack_words(word, 4, 8), np.arange(8)[None])


@pytest.mark.parametrize("quantization", [GPTQ, V2])
def test_values(tmp_path, quantization):
    codes, zero, scale = random_linear(SHAPE)
    stored = zero if quantization is V2 else zero - 1
    found = leaf(write_quantised(tmp_path, quantization, gptq_tensors(codes, stored, scale)))
    np.testing.assert_array_equal(found.codes(), codes)
    assert_same_bits(found.zero, zero.astype(np.int16))
    assert_same_bits(found.scale, scale)
    assert found.perm is None
    np.testing.assert_array_equal(found.dequantize(), weights(codes, zero, scale))


@pytest.mark.parametrize("stated", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("nibble", [7, 8])
def test_symmetric_versions_are_told_by_their_zeros(tmp_path, stated, nibble):
    """Nibble 7 in v1 and 8 in v2 are the same weights, whichever version is stated."""
    codes, zero, scale = random_linear(SHAPE)
    quantization = SYMMETRIC | ({} if stated is None else {"checkpoint_format": stated})
    tensors = gptq_tensors(codes, np.full_like(zero, nibble), scale)
    found = leaf(write_quantised(tmp_path, quantization, tensors))
    assert found.zero is None and found.implicit_zero == 8
    np.testing.assert_array_equal(found.dequantize(), weights(codes, np.full_like(zero, 8), scale))


def test_stated_symmetry_that_is_not_true(tmp_path):
    codes, zero, scale = random_linear(SHAPE)
    found = leaf(write_quantised(tmp_path, SYMMETRIC, gptq_tensors(codes, zero - 1, scale)))
    np.testing.assert_array_equal(found.dequantize(), weights(codes, zero, scale))


def test_zero_minus_one_wraps(tmp_path):
    """Zero point 0 is stored as -1, 15 in a nibble; it is no zero point of 16."""
    codes, zero, scale = random_linear(SHAPE)
    zero[::3] = 0
    stored = (zero.astype(np.int16) - 1) & 15
    found = leaf(write_quantised(tmp_path, GPTQ, gptq_tensors(codes, stored, scale)))
    assert_same_bits(found.zero, zero.astype(np.int16))
    np.testing.assert_array_equal(found.dequantize(), weights(codes, zero, scale))


def test_gptqmodel_subtracts_from_words(tmp_path):
    """Its borrow reaches the neighbouring nibble; the file says who wrote it."""
    codes, zero, scale = random_linear(SHAPE)
    zero[::3] = 0
    tensors = gptq_tensors(codes, zero, scale)
    tensors["qzeros"] = (tensors["qzeros"].view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    quantization = GPTQ | {"meta": {"quantizer": ["gptqmodel:2.1.0"]}}
    found = leaf(write_quantised(tmp_path / "a", quantization, tensors))
    assert_same_bits(found.zero, zero.astype(np.int16))
    other = leaf(write_quantised(tmp_path / "b", GPTQ, tensors))
    assert not np.array_equal(other.zero, zero)


def test_act_order(tmp_path):
    """Columns are sorted by group; the values are where they were."""
    codes, zero, scale = random_linear(SHAPE)
    tensors = gptq_tensors(codes, zero - 1, scale, g_idx=ORDER)
    found = leaf(write_quantised(tmp_path, GPTQ | {"desc_act": True}, tensors))
    assert found.perm.dtype == np.int32
    np.testing.assert_array_equal(ORDER[found.perm], np.arange(64) // GROUP)
    np.testing.assert_array_equal(found.codes(), codes[:, found.perm])
    np.testing.assert_array_equal(found.dequantize(), weights(codes, zero, scale, ORDER))


@pytest.mark.parametrize("desc_act", [False, True])
def test_g_idx_counts_not_desc_act(tmp_path, desc_act):
    codes, zero, scale = random_linear(SHAPE)
    for name, g_idx in (("order", ORDER), ("plain", np.arange(64) // GROUP)):
        tensors = gptq_tensors(codes, zero - 1, scale, g_idx=g_idx)
        folder = write_quantised(tmp_path / name, GPTQ | {"desc_act": desc_act}, tensors)
        found = leaf(folder)
        assert (found.perm is None) is (name == "plain")
        np.testing.assert_array_equal(found.dequantize(), weights(codes, zero, scale, g_idx))


@pytest.mark.parametrize("g_idx", [None, np.zeros(64)])
def test_g_idx_that_nobody_filled_in(tmp_path, g_idx):
    codes, zero, scale = random_linear(SHAPE)
    tensors = gptq_tensors(codes, zero - 1, scale, g_idx=g_idx)
    found = leaf(write_quantised(tmp_path, GPTQ, tensors))
    np.testing.assert_array_equal(found.dequantize(), weights(codes, zero, scale))


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        (None, "desc_act=true, but tensor g_idx is missing"),
        (np.zeros(64), "must give each of its 2 groups 32 input channels; found values 0..0"),
        (np.arange(64) % 3, "found values 0..2, in counts of [21, 22]"),
        (-np.arange(64), "found values -63..0"),
        (np.r_[np.zeros(33), np.ones(31)], "found values 0..1, in counts of [31, 33]"),
    ],
)
def test_act_order_that_cannot_be(tmp_path, g_idx, message):
    codes, zero, scale = random_linear(SHAPE)
    tensors = gptq_tensors(codes, zero, scale, g_idx=g_idx)
    found = refusal(tmp_path, GPTQ | {"desc_act": True}, **tensors)
    assert (
        message in found and "model.safetensors: linear 'model.layers.0.self_attn.q_proj'" in found
    )


def test_eight_bits(tmp_path):
    codes, zero, scale = random_linear(SHAPE, bits=8)
    tensors = {
        "qweight": np.ascontiguousarray(words(codes, 4, 8).T),
        "qzeros": words((zero - 1).T, 4, 8),
        "scales": np.ascontiguousarray(scale.T),
    }
    found = leaf(write_quantised(tmp_path, GPTQ | {"bits": 8}, tensors))
    np.testing.assert_array_equal(found.dequantize(), weights(codes, zero, scale))


def test_linears_with_bits_and_groups_of_their_own(tmp_path):
    """GPTQModel's `dynamic`: shapes say what the other linears' settings do not."""
    codes, zero, scale = random_linear(SHAPE, bits=8)
    tensors = {
        "qweight": np.ascontiguousarray(words(codes, 4, 8).T),
        "qzeros": words((zero[:, :1] - 1).T, 4, 8),
        "scales": np.ascontiguousarray(scale[:, :1].T),
    }
    dynamic = {"+:.*q_proj": {"bits": 8, "group_size": 64}}
    found = leaf(write_quantised(tmp_path / "a", GPTQ | {"dynamic": dynamic}, tensors))
    assert (found.bits, found.group_size) == (8, 64)
    write_quantised(tmp_path / "b", GPTQ, tensors)
    with pytest.raises(ValueError, match=r"q_proj\.qweight' has shape \(16, 64\): .* \(8, 64\)"):
        open_checkpoint(tmp_path / "b")


def test_biases_of_zeros(tmp_path):
    """Old AutoGPTQ gives every linear a bias; one that is not zero has no place."""
    tensors = gptq_tensors(*random_linear(SHAPE)) | {"bias": np.zeros(64, np.float16)}
    leaf(write_quantised(tmp_path, GPTQ, tensors))
    assert "unexpected tensor 'model.layers.0.self_attn.q_proj.bias'" in refusal(
        tmp_path, bias=np.full(64, 0.5, np.float16)
    )


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"bits": 2}, "quantization_config.bits='2': must be one of (3, 4, 8)"),
        ({"bits": None}, "quantization_config.bits is missing"),
        ({"group_size": 48}, "q_proj': group_size=48 does not divide its 64 input channels"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin': must be one of ('gptq', "),
        ({"checkpoint_format": "gptq_v3"}, "checkpoint_format='gptq_v3': must be one of"),
        ({"is_marlin_format": True}, "is_marlin_format='True'"),
        ({"pack_dtype": "int16"}, "pack_dtype='int16': must be 'int32'"),
        ({"desc_act": "yes"}, "desc_act='yes': must be true or false"),
    ],
)
def test_wrong_settings(tmp_path, quantization, message):
    assert message in refusal(tmp_path, GPTQ | quantization)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qweight": None}, "q_proj.qweight' is missing: expected shape (8, 64)"),
        ({"qzeros": np.zeros((2, 7), np.int32)}, "q_proj.qzeros' has shape (2, 7): the configur"),
        ({"g_idx": np.zeros(63, np.int32)}, "q_proj.g_idx' has shape (63,)"),
        ({"g_idx": np.zeros(64, np.float32)}, "g_idx' has dtype F32: must be one of ('I32',)"),
    ],
)
def test_wrong_tensors(tmp_path, changes, message):
    assert message in refusal(tmp_path, **changes)
