"""Does QuantTensor stand for the weights that its codes, scales and zeros define?"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helios_jax.quant import QuantTensor, embedding_lookup, float32_matmul, matmul, weight_shape
from pallas_kernels import packing

N, K = 6, 128
GROUPS = (32, 64, 128)
# (scale dtype, kind): every way in which a group can say which value a code stands for.
ZEROS = ("implicit", "zero", "offset")
SCALES = (np.float16, ml_dtypes.bfloat16, np.float32)


def make(bits=4, group_size=32, span=32, zeros="zero", scale_dtype=np.float16, stack=(), seed=0):
    """A random QuantTensor of numpy arrays and its weights in float64."""
    random = np.random.default_rng(seed)
    groups = (*stack, N, K // group_size)
    if bits == 4:
        codes = random.integers(0, 16, (*stack, N, K), dtype=np.uint8)
        packed = packing.pack_int4(codes, span)
    else:
        packed = codes = random.integers(-128, 128, (*stack, N, K), dtype=np.int8)
    scale = random.uniform(0.5, 2.0, groups).astype(scale_dtype)
    zero = offset = None
    implicit_zero = 8 if bits == 4 else 0
    q = codes.astype(np.float64).reshape(*groups, group_size)
    s = scale.astype(np.float64)[..., None]
    if zeros == "zero":
        zero = random.integers(-1, 17, groups).astype(np.int16)
        exact = s * (q - zero[..., None])
    elif zeros == "offset":
        offset = random.standard_normal(groups).astype(scale_dtype)
        exact = s * q + offset.astype(np.float64)[..., None]
    else:
        exact = s * (q - implicit_zero)
    tensor = QuantTensor(packed, scale, zero, offset, bits, group_size, span, implicit_zero)
    return tensor, exact.reshape(*stack, N, K)


@pytest.mark.parametrize("stack", [(), (2,), (2, 3)])
@pytest.mark.parametrize(
    "bits, span, zeros", [*itertools.product([4], packing.SPANS, ZEROS), (8, 32, "implicit"),
                          (8, 32, "zero"), (8, 32, "offset")],
)  # fmt: skip
def test_dequantize(bits, span, zeros, stack):
    for group_size, scale_dtype in itertools.product(GROUPS, SCALES):
        tensor, exact = make(bits, group_size, span, zeros, scale_dtype, stack)
        tensor.validate("w")
        assert (tensor.out_features, tensor.in_features) == weight_shape(tensor)[::-1] == (N, K)
        weights = jax.tree.map(jnp.asarray, tensor).dequantize()
        assert weights.dtype == jnp.float32
        # One rounding of the product and one of the sum, of terms up to 600.
        np.testing.assert_allclose(weights, exact, rtol=2e-7, atol=1e-4)
        # float16 and bfloat16 scales of few bits times small integers: exact without offsets.
        if zeros != "offset" and scale_dtype != np.float32:
            np.testing.assert_array_equal(weights, exact)


def test_dequantize_rounds_once():
    tensor, exact = make(zeros="offset")
    actual = tensor.dequantize(jnp.bfloat16)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        actual, np.asarray(tensor.dequantize()).astype(ml_dtypes.bfloat16)
    )


def test_stack_maps_and_scans():
    """Leading axes are ordinary ones: vmap and indexing agree with the whole."""
    tensor, exact = make(stack=(3,))
    tensor = jax.tree.map(jnp.asarray, tensor)
    np.testing.assert_array_equal(jax.vmap(lambda t: t.dequantize())(tensor), exact)
    _, scanned = jax.lax.scan(lambda carry, t: (carry, t.dequantize()), None, tensor)
    np.testing.assert_array_equal(scanned, exact)


def test_nbytes_counts_every_array():
    tensor, _ = make(bits=4, group_size=32, zeros="zero")
    assert tensor.nbytes == N * K // 2 + 2 * N * K // 32 + 2 * N * K // 32
    tensor, _ = make(bits=8, group_size=K, zeros="implicit", scale_dtype=np.float32)
    assert tensor.nbytes == N * K + 4 * N


def test_statics_reach_the_tree_structure():
    """Two tensors that decode differently never share a compiled program."""
    tensor, _ = make()
    structures = {
        jax.tree.structure(dataclasses.replace(tensor, **change))
        for change in ({}, {"span": 64}, {"group_size": 64}, {"bits": 8}, {"implicit_zero": 7})
    }
    assert len(structures) == 5


GROUP_ARRAY = np.ones((N, K // 32), np.float16)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bits": 5}, "bits=5: must be one of"),
        ({"packed": np.zeros((N, K // 2), np.int8)}, "packed has dtype int8: 4-bit .* uint8"),
        ({"bits": 8}, "packed has dtype uint8: 8-bit .* int8"),
        ({"span": 48}, r"span=48: must be one of \(32, 64\) and divide the 128"),
        ({"packed": np.zeros((N, 48), np.uint8), "span": 64}, "span=64: .* divide the 96"),
        ({"group_size": 48}, "group_size=48 does not divide the 128 input channels"),
        ({"group_size": 0}, "group_size=0 does not divide"),
        ({"group_size": -1}, "group_size=-1 does not divide"),
        ({"offset": GROUP_ARRAY}, "has zero points and offsets; keep one"),
        ({"scale": GROUP_ARRAY[:-1]}, r"scale has shape \(5, 4\): .* needs \(6, 4\)"),
        ({"zero": GROUP_ARRAY[:, :-1]}, r"zero has shape \(6, 3\): .* needs \(6, 4\)"),
        ({"zero": None, "offset": GROUP_ARRAY[None]}, r"offset has shape \(1, 6, 4\)"),
    ],
)
def test_validate_names_the_fault(change, message):
    tensor, _ = make()
    with pytest.raises(ValueError, match=rf"^layer\.w: {message}"):
        dataclasses.replace(tensor, **change).validate("layer.w")


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("bits", [4, 8])
def test_matmul(bits, zeros):
    tensor, exact = make(bits, zeros=zeros)
    tensor = jax.tree.map(jnp.asarray, tensor)
    inputs = np.random.default_rng(1).standard_normal((2, 5, K)).astype(np.float32)
    expected = inputs.astype(np.float64) @ exact.T
    actual = matmul(jnp.asarray(inputs), tensor)
    assert actual.dtype == jnp.float32 and actual.shape == (2, 5, N)
    scale = np.abs(inputs).astype(np.float64) @ np.abs(exact).T
    assert np.max(np.abs(actual - expected) / scale) < 1e-6
    # bfloat16 activations: weights and inputs rounded to 8 bits, the sum in float32.
    rounded = jnp.asarray(inputs, jnp.bfloat16)
    actual = float32_matmul(rounded, tensor)
    assert actual.dtype == jnp.float32
    weights = np.asarray(exact, ml_dtypes.bfloat16).astype(np.float64)
    expected = np.asarray(rounded, np.float64) @ weights.T
    assert np.max(np.abs(actual - expected) / scale) < 1e-6
    assert matmul(rounded, tensor).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "inputs, weight, narrow",
    [
        ("float32", "float32", "float32"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float16", "float16"),
    ],
)
def test_dense_matmul_dtypes(inputs, weight, narrow):
    """Operands in the narrower dtype, sums in float32, the result in the inputs' dtype."""
    random = np.random.default_rng(2)
    x = jnp.asarray(random.standard_normal((3, 300)), inputs)
    w = jnp.asarray(random.standard_normal((300, 7)), weight)
    expected = np.asarray(x.astype(narrow), np.float64) @ np.asarray(w.astype(narrow), np.float64)
    actual = float32_matmul(x, w)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=5e-5)
    assert matmul(x, w).dtype == inputs


def test_sums_do_not_overflow_float16():
    """Sixteen-bit sums would overflow at 65,504; ours are float32."""
    ones = jnp.full((1, 4096), 8.0, jnp.float16)
    assert float32_matmul(ones, ones.T)[0, 0] == 4096 * 64


@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("bits", [4, 8])
def test_embedding_lookup(bits, zeros):
    tensor, exact = make(bits, zeros=zeros, scale_dtype=np.float16)
    tensor = jax.tree.map(jnp.asarray, tensor)
    tokens = jnp.array([[0, 5, 5], [2, 1, 0]])
    rows = embedding_lookup(tensor, tokens, jnp.float32)
    np.testing.assert_allclose(rows, exact[np.asarray(tokens)], rtol=2e-7, atol=1e-4)
    np.testing.assert_array_equal(rows, tensor.dequantize()[tokens])
    assert embedding_lookup(tensor, tokens, jnp.bfloat16).dtype == jnp.bfloat16
    dense = jnp.asarray(exact, jnp.float32)
    np.testing.assert_array_equal(embedding_lookup(dense, tokens, jnp.float32), dense[tokens])


def test_embedding_lookup_dequantises_only_its_rows():
    table, _ = make(stack=(), group_size=32)
    tokens = jnp.array([1])
    text = jax.jit(lambda table: embedding_lookup(table, tokens, jnp.float32)).lower(table)
    assert f"{N}x{K}xf32" not in text.as_text()
    assert f"1x{K}xf32" in text.as_text()
