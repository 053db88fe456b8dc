"""Are the forms that a CPU computes with the weights they came from?"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from helios_jax.quant import ExpandedWeight, expand, expanded, float32_matmul, matmul, weight_shape
from helios_jax.quant.expanded import MAX_INT8_ROWS, row_matmul


def random_weight(K, N, seed=0):
    return np.random.default_rng(seed).standard_normal((K, N)).astype(np.float32)


def _most_rows(num_outputs):
    """How many rows run on int8 codes: one, or two on old jax, where no tiles fit."""
    return MAX_INT8_ROWS if num_outputs % 64 == 0 else expanded._MAX_VECTOR_ROWS


def test_forms():
    weight = random_weight(64, 10)
    weight[:, 3] = 0
    form = expand(jnp.asarray(weight))
    assert weight_shape(form) == (64, 10)
    np.testing.assert_array_equal(form.dense_KN, weight.astype(ml_dtypes.bfloat16))
    np.testing.assert_allclose(form.scale_N, np.abs(weight).max(axis=0) / 127, rtol=1e-6)
    codes = np.asarray(form.int8_KN, np.int32)
    assert codes.min() >= -127 and np.all(np.abs(codes).max(axis=0)[weight.any(axis=0)] == 127)
    assert np.max(np.abs(codes * np.asarray(form.scale_N) - weight) / form.scale_N.max()) <= 0.5001
    assert not codes[:, 3].any() and form.scale_N[3] == 0


@pytest.mark.parametrize(
    ("num_rows", "num_outputs"),
    [(rows, width) for rows in (1, 2, 3, 5, 12) for width in (33, 192)
     if rows <= _most_rows(width)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_row_matmul(num_rows, num_outputs, dtype):
    weight = random_weight(96, num_outputs)
    weight[:, 5] = 0
    form = expand(jnp.asarray(weight))
    inputs = jnp.asarray(random_weight(num_rows, 96, seed=1), dtype)
    exact = np.asarray(form.int8_KN, np.float64) * np.asarray(form.scale_N, np.float64)
    expected = np.asarray(inputs, np.float64) @ exact
    actual = jax.jit(row_matmul)(inputs, form)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert not np.any(actual[:, 5])


@pytest.mark.skipif(MAX_INT8_ROWS == 2, reason="this jax's tiles are slow, and not used")
def test_tiles_and_vectors_sum_alike():
    """How many rows share a pass changes none of them by a bit."""
    form = expand(jnp.asarray(random_weight(96, 192)))
    inputs = jnp.asarray(random_weight(5, 96, seed=1))
    together = jax.jit(expanded._sum_in_tiles)(inputs, form.int8_KN)
    alone = [jax.jit(expanded._sum_in_vectors)(row[None], form.int8_KN)[0] for row in inputs]
    np.testing.assert_array_equal(together, np.stack(alone))


@pytest.mark.parametrize("num_outputs", [16, 128])
@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 2, 96), (3, 96), (3, 4, 96), (13, 96)])
def test_rows_choose_the_form(shape, num_outputs):
    """Few rows run on int8 codes, more on bfloat16; the result keeps the inputs' shape."""
    weight = random_weight(96, num_outputs)
    form = expand(jnp.asarray(weight))
    num_rows = int(np.prod(shape[:-1]))
    few = num_rows <= _most_rows(num_outputs)
    assert form.serves_rows(num_rows) == few
    inputs = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    int8 = np.asarray(form.int8_KN, np.float64) * np.asarray(form.scale_N, np.float64)
    dense = np.asarray(form.dense_KN, np.float64)
    rounded = inputs.astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = inputs @ int8 if few else rounded @ dense
    actual = float32_matmul(jnp.asarray(inputs), form)
    assert actual.shape == (*shape[:-1], num_outputs)
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert matmul(jnp.asarray(inputs, jnp.bfloat16), form).dtype == jnp.bfloat16


def test_odd_widths_fall_back():
    """The int8 loop takes whole blocks of inputs; any other width runs on bfloat16."""
    num_inputs = 3 * expanded._ROW_BLOCK + 1
    weight = random_weight(num_inputs, 8)
    form = expand(jnp.asarray(weight))
    assert not form.serves_rows(1)
    inputs = random_weight(1, num_inputs, seed=3)
    expected = inputs.astype(ml_dtypes.bfloat16).astype(np.float64) @ np.asarray(
        form.dense_KN, np.float64
    )
    np.testing.assert_allclose(float32_matmul(jnp.asarray(inputs), form), expected, atol=2e-5)


def test_is_a_pytree():
    form = expand(jnp.asarray(random_weight(32, 8)))
    leaves, structure = jax.tree.flatten(form)
    assert len(leaves) == 3 and isinstance(structure.unflatten(leaves), ExpandedWeight)
