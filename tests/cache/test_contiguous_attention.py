"""Is attention over contiguous keys the float64 softmax, in every form it can take?"""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.cache import attention as attend

# The package exports the function under the module's name.
module = importlib.import_module("helios_jax.cache.attention")

B, N, K, H = 3, 6, 2, 8


def reference(query, key, value, query_positions, key_positions, window):
    """One query at a time, float64."""
    rows, num_queries, num_heads, head_dim = query.shape
    group = num_heads // key.shape[1]
    output = np.zeros(query.shape)
    for b in range(rows):
        for t in range(num_queries):
            position = query_positions[b, t]
            seen = (key_positions[b] >= 0) & (key_positions[b] <= position)
            if window is not None:
                seen &= key_positions[b] > position - window
            if not seen.any():
                continue
            for n in range(num_heads):
                scores = key[b, n // group, seen] @ query[b, t, n] / np.sqrt(head_dim)
                weights = np.exp(scores - scores.max())
                output[b, t, n] = weights @ value[b, n // group, seen] / weights.sum()
    return output


def inputs(num_queries, num_keys, batch=B, seed=0):
    """Prompts of differing length with a gap of unwritten slots before the queries' own keys."""
    random = np.random.default_rng(seed)
    query = random.standard_normal((batch, num_queries, N, H)).astype(np.float32)
    key = random.standard_normal((batch, K, num_keys, H)).astype(np.float32)
    value = random.standard_normal((batch, K, num_keys, H)).astype(np.float32)
    key_positions = np.full((batch, num_keys), -1)
    num_old = num_keys - num_queries
    for b in range(batch):
        length = max(num_old - 2 * b, 0)
        key_positions[b, :length] = np.arange(length)
        key_positions[b, num_old:] = length + np.arange(num_queries)
    query_positions = key_positions[:, num_old:].copy()
    query_positions[-1, -1] = key_positions[-1, -1] = -1
    return query, key, value, query_positions, key_positions


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("num_queries, num_keys", [(1, 1), (1, 17), (5, 5), (13, 29)])
@pytest.mark.parametrize("chunk", [512, 5])
def test_float64(num_queries, num_keys, window, chunk, monkeypatch):
    monkeypatch.setattr(module, "QUERY_CHUNK", chunk)
    arrays = inputs(num_queries, num_keys)
    actual = attend(*map(jnp.asarray, arrays), sliding_window=window)
    np.testing.assert_allclose(actual, reference(*arrays, window), atol=2e-6)
    assert not np.any(actual[-1, -1]), "a padding query gets zeros"


@pytest.mark.parametrize("as_sums", [False, True])
@pytest.mark.parametrize("cache_dtype", [jnp.float32, jnp.bfloat16])
def test_one_row_in_both_forms(as_sums, cache_dtype, monkeypatch):
    """One query of one row takes another path on newer jax; both are the same attention."""
    monkeypatch.setattr(module, "_ROW_AS_SUMS", as_sums)
    query, key, value, query_positions, key_positions = inputs(1, 40, batch=1)
    query_positions[:] = key_positions[:, -1:] = 39
    key, value = jnp.asarray(key, cache_dtype), jnp.asarray(value, cache_dtype)
    actual = attend(
        jnp.asarray(query), key, value, query_positions, key_positions, sliding_window=9
    )
    exact = [np.asarray(array, np.float64) for array in (key, value)]
    expected = reference(query, *exact, query_positions, key_positions, 9)
    # bfloat16: the query and the weights are rounded to 8 bits as well.
    tolerance = 2e-6 if cache_dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(actual, expected, atol=tolerance)
    assert actual.dtype == jnp.float32


def test_large_scores_stay_finite():
    """Scores of thousands: the maximum is subtracted first."""
    query, key, value, query_positions, key_positions = inputs(4, 9)
    actual = attend(
        jnp.asarray(query * 1e3), jnp.asarray(key * 10), value, query_positions, key_positions
    )
    expected = reference(
        query.astype(np.float64) * 1e3, key * 10.0, value, query_positions, key_positions, None
    )
    np.testing.assert_allclose(actual, expected, atol=5e-3)
