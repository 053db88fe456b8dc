"""Do 3-bit, FP8 and act-order weights, and joined ones, stand for the values they should?"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helios_jax.model.params import fuse_params
from helios_jax.quant import FLOAT8, QuantTensor, join_outputs, matmul
from pallas_kernels.packing import pack_int3, pack_int4, unpack_int3

K, N, GROUP = 64, 6, 32
RNG = np.random.default_rng(0)
CODES = RNG.integers(0, 8, (N, K)).astype(np.uint8)
SCALE = RNG.uniform(0.01, 0.1, (N, K // GROUP)).astype(np.float16)
PERM = RNG.permutation(K).astype(np.int32)


def weight(codes=CODES, bits=4, **fields):
    pack = {3: pack_int3, 4: pack_int4, 8: np.asarray}[bits]
    implicit = {3: 4, 4: 8, 8: 0}[bits]
    made = dict(packed=pack(codes), scale=SCALE, bits=bits, group_size=GROUP)
    return QuantTensor(**(made | {"implicit_zero": implicit} | fields))


def dense(codes, zero=8.0, scale=SCALE):
    zero = np.repeat(zero, GROUP, axis=-1) if np.ndim(zero) else zero
    return (codes.astype(np.float32) - zero) * scale.astype(np.float32).repeat(GROUP, 1)


@pytest.mark.parametrize("xp", [np, jnp])
def test_three_bits(xp):
    codes = xp.asarray(RNG.integers(0, 8, (2, 3, 96)).astype(np.uint8))
    packed = pack_int3(codes)
    assert packed.shape == (2, 3, 36) and packed.dtype == np.uint8
    assert isinstance(packed, np.ndarray) is (xp is np)
    np.testing.assert_array_equal(unpack_int3(packed), codes)


def test_three_bits_lie_as_documented():
    """Code j of a span: two low bits in byte j % 8, the high bit in byte 8 + j % 4."""
    for j in range(32):
        codes = np.zeros((1, 32), np.uint8)
        codes[0, j] = 7
        expected = np.zeros(12, np.uint8)
        expected[j % 8] = 3 << (2 * (j // 8))
        expected[8 + j % 4] = 1 << (j // 4)
        np.testing.assert_array_equal(pack_int3(codes)[0], expected)
    with pytest.raises(ValueError, match="multiple of span=32"):
        pack_int3(np.zeros((1, 31), np.uint8))
    with pytest.raises(ValueError, match="multiple of 12 bytes"):
        unpack_int3(np.zeros((1, 13), np.uint8))


def test_three_bit_weights():
    stored = weight(bits=3)
    assert stored.in_features == K and stored.packed.nbytes == N * K * 3 // 8
    stored.validate("w")
    np.testing.assert_array_equal(stored.dequantize(), dense(CODES, 4.0))


def test_float8_weights():
    codes = np.arange(N * K, dtype=np.uint8).reshape(N, K) % 127
    codes = codes.view(ml_dtypes.float8_e4m3fn)
    stored = weight(codes, bits=8)
    stored.validate("w")
    assert stored.codes().dtype == FLOAT8
    np.testing.assert_array_equal(stored.dequantize(), dense(codes, 0.0))
    inputs = RNG.standard_normal((3, K)).astype(np.float32)
    np.testing.assert_allclose(
        matmul(jnp.asarray(inputs), stored), inputs @ dense(codes, 0.0).T, rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_act_order(dtype):
    """Column j is input channel perm[j]; dequantised and multiplied alike."""
    stored = weight(perm=PERM)
    stored.validate("w")
    expected = np.empty((N, K), np.float32)
    expected[:, PERM] = dense(CODES)
    np.testing.assert_array_equal(stored.dequantize(), expected)
    np.testing.assert_array_equal(stored.in_stored_order().dequantize(), dense(CODES))
    inputs = jnp.asarray(RNG.standard_normal((2, 3, K)), dtype)
    plain = jnp.asarray(expected.T, dtype)
    np.testing.assert_allclose(
        jax.jit(matmul)(inputs, stored).astype(jnp.float32),
        matmul(inputs, plain).astype(jnp.float32),
        rtol=0.02, atol=1e-5 if dtype == jnp.float32 else 0.05,
    )  # fmt: skip


def test_stacked_act_order():
    stack = jax.tree.map(
        lambda *parts: jnp.stack(parts), weight(perm=PERM), weight(perm=PERM[::-1].copy())
    )
    for i, perm in enumerate((PERM, PERM[::-1])):
        expected = np.empty((N, K), np.float32)
        expected[:, perm] = dense(CODES)
        np.testing.assert_array_equal(stack.dequantize()[i], expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(perm=PERM[:-1]), "perm has shape (63,) and dtype int32: must be (64,)"),
        (dict(perm=PERM.astype(np.int16)), "dtype int16: must be (64,) and int32"),
        (dict(bits=3), "packed has 32 bytes a row: 3-bit codes come in spans of 12 bytes"),
        (dict(bits=2), "bits=2: must be one of (3, 4, 8)"),
        (dict(bits=8), "packed has dtype uint8: 8-bit codes are stored as int8 or float8_e4m3fn"),
    ],
)
def test_contradictions(changes, message):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(weight(), **changes).validate("layer q")
    assert message in str(error.value) and str(error.value).startswith("layer q: ")


def test_sums_are_float32():
    """float16 weights and inputs whose sum is beyond float16's 65504."""
    stored = weight(np.full((N, K), 15, np.uint8), scale=np.full_like(SCALE, 100))
    inputs = jnp.full((1, K), 2.0, jnp.bfloat16)
    np.testing.assert_allclose(
        np.asarray(matmul(inputs, stored), np.float32), 2.0 * 700 * K, rtol=2**-7
    )


def test_parts_are_joined_with_their_codes():
    zero = RNG.integers(0, 16, SCALE.shape).astype(np.int16)
    parts = [weight(), weight(15 - CODES, zero=zero)]
    joined = join_outputs(parts)
    joined.validate("w")
    assert joined.zero.dtype == np.int16 and joined.out_features == 2 * N
    expected = np.concatenate([part.dequantize() for part in parts])
    np.testing.assert_array_equal(joined.dequantize(), expected)
    assert join_outputs([weight(), weight()]).zero is None


def test_joined_act_order():
    joined = join_outputs([weight(perm=PERM), weight(15 - CODES, perm=PERM.copy())])
    np.testing.assert_array_equal(joined.perm, PERM)
    expected = [weight(perm=PERM).dequantize(), weight(15 - CODES, perm=PERM).dequantize()]
    np.testing.assert_array_equal(joined.dequantize(), np.concatenate(expected))


@pytest.mark.parametrize(
    "other",
    [
        weight(perm=PERM[::-1].copy()),
        weight(),
        weight(bits=3, perm=PERM),
        weight(perm=PERM, scale=SCALE.astype(np.float32)),
        weight(perm=PERM, offset=SCALE),
        weight(perm=PERM, scale=SCALE[:, :1], group_size=64),
    ],
)
def test_fusing_parts_of_different_form_makes_them_dense(other):
    first = weight(perm=PERM)
    assert join_outputs([first, other]) is None
    layer = {
        "attention": {name: {"kernel": first} for name in "qkvo"},
        "ffn": {"gate": {"kernel": first}, "up": {"kernel": other}, "down": {"kernel": first}},
    }
    fused = fuse_params({"params": {"layers_0": layer}})["params"]["layers_0"]
    assert isinstance(fused["attention"]["qkv"]["kernel"], QuantTensor)
    kernel = fused["ffn"]["gate_up"]["kernel"]
    assert kernel.dtype == jnp.float32
    expected = np.concatenate([first.dequantize(), other.dequantize()]).T
    np.testing.assert_array_equal(kernel, expected)
