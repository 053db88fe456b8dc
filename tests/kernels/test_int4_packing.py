"""Is 4-bit packing the layout its diagram states, with an exact inverse?"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import packing


@pytest.mark.parametrize("span", packing.SPANS)
@pytest.mark.parametrize("xp", [np, jnp])
def test_bit_diagram(xp, span):
    """Byte j of a span: code j low, code j + span / 2 high."""
    codes = xp.arange(2 * span, dtype=xp.uint8).reshape(1, -1) % 16
    packed = np.asarray(packing.pack_int4(codes, span))
    q = np.asarray(codes)[0]
    half = span // 2
    for s in range(2):
        for j in range(half):
            expected = int(q[s * span + j]) | int(q[s * span + j + half]) << 4
            assert packed[0, s * half + j] == expected


@pytest.mark.parametrize("span", packing.SPANS)
def test_all_bytes_round_trip(span):
    packed = np.arange(256, dtype=np.uint8).reshape(2, 128)
    np.testing.assert_array_equal(
        packing.pack_int4(packing.unpack_int4(packed, span), span), packed
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.sampled_from(packing.SPANS), st.integers(1, 3), st.integers(0, 5), st.integers(0, 2**32 - 1)
)
def test_inverse(span, spans, rows, seed):
    codes = np.random.default_rng(seed).integers(0, 16, (rows, spans * span), dtype=np.uint8)
    packed = packing.pack_int4(codes, span)
    assert packed.nbytes * 2 == codes.nbytes
    np.testing.assert_array_equal(packing.unpack_int4(packed, span), codes)
    np.testing.assert_array_equal(packing.unpack_int4(jnp.asarray(packed), span), codes)


def test_bad_spans_are_named():
    with pytest.raises(ValueError, match="span=48"):
        packing.pack_int4(np.zeros((1, 48), np.uint8), 48)
    with pytest.raises(ValueError, match="multiple of span=64"):
        packing.pack_int4(np.zeros((1, 96), np.uint8), 64)
