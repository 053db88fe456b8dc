"""Are single linears quantised as the papers say? Against float64 references."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.quant import (
    GptqOptions,
    InputStatistics,
    Scheme,
    gptq,
    output_error,
    rtn,
    scale_outputs,
    search_clip,
    search_scales,
)
from helios_jax.quant.scheme import GRIDS
from tests.quantise import references

SCHEMES = [
    Scheme(bits, size, grid) for bits, size, grid in itertools.product((3, 4, 8), (32, -1), GRIDS)
]
NUM_OUT, NUM_IN = 24, 64


def weights(seed: int = 0, num_out: int = NUM_OUT, num_in: int = NUM_IN) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (0.1 * rng.standard_normal((num_out, num_in))).astype(np.float32)


def statistics(seed: int = 1, num_in: int = NUM_IN) -> InputStatistics:
    """Correlated inputs, two channels of which are 20 times larger."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((512, num_in)) @ rng.standard_normal((num_in, num_in))
    inputs[:, [3, 40]] *= 20
    return InputStatistics.empty(num_in).add(jnp.asarray(inputs, jnp.float32))


def error_of(weight: np.ndarray, quantised, given: InputStatistics) -> float:
    return float(output_error(quantised.dequantize() - weight, given.moment_KK))


# Round to nearest


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rtn_takes_the_nearest_value_of_the_groups_grid(scheme):
    weight = weights()
    weight[2] = np.abs(weight[2])
    weight[3] = -np.abs(weight[3])
    quantised = rtn(jnp.asarray(weight), scheme)
    quantised.validate("linear")
    size = scheme.channels_per_group(NUM_IN)
    expected = np.zeros_like(weight)
    for n, g in itertools.product(range(NUM_OUT), range(0, NUM_IN, size)):
        scale, zero = references.fit(weight[n, g : g + size], scheme)
        codes = [references.nearest(w, scale, zero, scheme) for w in weight[n, g : g + size]]
        expected[n, g : g + size] = scale * (np.array(codes) - zero)
    # A value in the middle of two codes may go either way in float32: none lies there here.
    np.testing.assert_allclose(quantised.dequantize(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_zero_groups_stay_zero(scheme):
    """A group of zeros, a whole row of zeros, and a weight too small for its scale."""
    weight = weights()
    weight[0, :32] = 0
    weight[1] = 0
    weight[2, :] = 1e-12
    dequantised = np.asarray(rtn(jnp.asarray(weight), scheme).dequantize())
    assert np.isfinite(dequantised).all()
    assert not dequantised[0, :32].any() and not dequantised[1].any()
    assert np.abs(dequantised[2]).max() < 1e-6


def test_the_symmetric_grids_differ_in_their_lowest_code():
    """One weight of -8 beside smaller ones: -8..7 holds it with scale 1, -7..7 with 8/7."""
    weight = np.zeros((1, 32), np.float32)
    weight[0, :3] = [-8, 7, 3]
    full = rtn(jnp.asarray(weight), Scheme(4, 32, "full"))
    assert float(full.scale[0, 0]) == 1.0 and full.codes()[0, :4].tolist() == [0, 15, 11, 8]
    narrow = rtn(jnp.asarray(weight), Scheme(4, 32, "symmetric"))
    assert float(narrow.scale[0, 0]) == np.float16(8 / 7)
    assert narrow.codes()[0, :4].tolist() == [1, 14, 11, 8]
    mirrored = rtn(-jnp.asarray(weight), Scheme(4, 32, "full"))
    assert float(mirrored.scale[0, 0]) == np.float16(8 / 7)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(bits=5), "bits=5: must be one of (3, 4, 8)"),
        (dict(group_size=48), "group_size=48: must be one of"),
        (dict(grid="odd"), "grid='odd': must be one of"),
    ],
)
def test_wrong_schemes(fields, message):
    with pytest.raises(ValueError) as raised:
        Scheme(**fields)
    assert message in str(raised.value)


def test_a_group_that_does_not_divide_names_the_linear():
    with pytest.raises(ValueError, match="layers_0/ffn/down: group_size=128 does not divide its 9"):
        Scheme(4, 128).check("layers_0/ffn/down", 96)
    with pytest.raises(ValueError, match="lm_head: has 72 input channels: 4-bit codes"):
        Scheme(4, -1).check("lm_head", 72)
    Scheme(8, -1).check("lm_head", 72)


# Statistics


def test_statistics_are_means_over_all_tokens_however_they_come():
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((3, 7, 16)).astype(np.float32)
    together = InputStatistics.empty(16).add(inputs)
    apart = InputStatistics.empty(16).add(inputs[:1]).add(inputs[1:])
    flat = inputs.reshape(-1, 16).astype(np.float64)
    for given in (together, apart):
        assert int(given.num_tokens) == 21
        np.testing.assert_allclose(given.moment_KK, flat.T @ flat / 21, atol=1e-5)
        np.testing.assert_allclose(given.magnitude_K, np.abs(flat).mean(0), atol=1e-5)


def test_output_error_is_the_mean_squared_error_of_the_outputs():
    rng = np.random.default_rng(0)
    inputs, error = rng.standard_normal((50, 16)), rng.standard_normal((5, 16))
    given = InputStatistics.empty(16).add(jnp.asarray(inputs, jnp.float32))
    expected = np.mean(np.sum((inputs @ error.T) ** 2, axis=1))
    found = output_error(jnp.asarray(error, jnp.float32), given.moment_KK)
    assert float(found) == pytest.approx(expected, rel=1e-5)


# AWQ


def awq_reference(weight: np.ndarray, scheme: Scheme, scale: np.ndarray, inputs: np.ndarray):
    """Mean squared output error relative to the output, with explicit inputs."""
    scaled = jnp.asarray(weight * scale, jnp.float32)
    quantised = np.asarray(rtn(scaled, scheme).dequantize(), np.float64) / scale
    difference = inputs @ (quantised - weight).T
    return np.sum(difference**2) / np.sum((inputs @ weight.T) ** 2)


@pytest.mark.parametrize("grid", GRIDS)
def test_scale_search_finds_the_best_alpha(grid):
    scheme = Scheme(4, 32, grid)
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((256, NUM_IN))
    inputs[:, [3, 40]] *= 30
    weight = weights()
    given = InputStatistics.empty(NUM_IN).add(jnp.asarray(inputs, jnp.float32))
    search = search_scales((jnp.asarray(weight),), (scheme,), given)
    magnitude = np.abs(inputs).mean(0)
    errors = []
    for step in range(20):
        scale = magnitude ** (step / 20)
        scale /= np.sqrt(scale.max() * scale.min())
        errors.append(awq_reference(weight, scheme, scale, inputs))
    best = int(np.argmin(errors))
    assert float(search.error) == pytest.approx(errors[best], rel=0.02)
    assert float(search.unscaled_error) == pytest.approx(errors[0], rel=0.02)
    assert float(search.alpha) > 0 and float(search.error) < 0.8 * float(search.unscaled_error)
    scale = np.asarray(search.scale_K)
    assert awq_reference(weight, scheme, scale, inputs) == pytest.approx(errors[best], rel=0.02)
    assert scale.max() * scale.min() == pytest.approx(1, rel=1e-5)


def test_scales_are_equal_where_one_value_head_makes_several_inputs():
    given = statistics()
    search = search_scales((jnp.asarray(weights()),), (Scheme(4, 32),), given, (2, 4))
    per_head = np.asarray(search.scale_K).reshape(2, 4, 8)
    assert (per_head == per_head[:, :1]).all()
    assert len(np.unique(per_head)) > 2


def test_channels_that_are_never_active_do_no_harm():
    inputs = np.random.default_rng(0).standard_normal((64, NUM_IN)).astype(np.float32)
    inputs[:, 5] = 0
    given = InputStatistics.empty(NUM_IN).add(inputs)
    search = search_scales((jnp.asarray(weights()),), (Scheme(4, 32),), given)
    scale = np.asarray(search.scale_K)
    assert np.isfinite(scale).all() and (scale > 0).all()
    nothing = InputStatistics.empty(NUM_IN).add(np.zeros((4, NUM_IN), np.float32))
    scale = np.asarray(search_scales((jnp.asarray(weights()),), (Scheme(4, 32),), nothing).scale_K)
    np.testing.assert_array_equal(scale, 1)


def test_clipping_never_raises_a_groups_error_and_lowers_some():
    scheme = Scheme(3, 32, "symmetric")
    weight, given = weights(), statistics()
    clip_NG = search_clip(jnp.asarray(weight), scheme, given.moment_KK)
    assert clip_NG.shape == (NUM_OUT, 2)
    assert 0.5 <= float(clip_NG.min()) < 1 and float(clip_NG.max()) <= 1
    moment = np.asarray(given.moment_KK, np.float64)
    plain = np.asarray(rtn(jnp.asarray(weight), scheme).dequantize()) - weight
    clipped = np.asarray(rtn(jnp.asarray(weight), scheme, clip_NG).dequantize()) - weight
    for group in (slice(0, 32), slice(32, 64)):
        block = moment[group, group]
        before = np.einsum("ni,ij,nj->n", plain[:, group], block, plain[:, group])
        after = np.einsum("ni,ij,nj->n", clipped[:, group], block, clipped[:, group])
        assert (after <= before * (1 + 1e-4)).all() and after.sum() < 0.95 * before.sum()


@pytest.mark.parametrize("grid", GRIDS)
def test_scaling_outputs_changes_scales_only(grid):
    weight = rtn(jnp.asarray(weights()), Scheme(4, 32, grid))
    factor_N = np.linspace(0.5, 2, NUM_OUT).astype(np.float32)
    scaled = scale_outputs(weight, jnp.asarray(factor_N))
    np.testing.assert_array_equal(scaled.packed, weight.packed)
    expected = np.asarray(weight.dequantize()) * factor_N[:, None]
    np.testing.assert_allclose(scaled.dequantize(), expected, rtol=1e-3, atol=1e-6)
    assert scaled.scale.dtype == jnp.float16
    tiny = scale_outputs(weight, jnp.full(NUM_OUT, 1e-6))
    assert tiny.scale.dtype == jnp.float32
    np.testing.assert_allclose(tiny.dequantize(), weight.dequantize() * 1e-6, rtol=1e-6)


# GPTQ


@pytest.mark.parametrize("bits", (3, 4))
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("act_order", (False, True))
def test_gptq_solves_for_the_remaining_channels(bits, grid, act_order):
    """Against the textbook form, which inverts the remaining Hessian after every channel.

    160 channels are five of the implementation's blocks.
    """
    scheme, num_in = Scheme(bits, 32, grid), 160
    weight, given = weights(num_out=8, num_in=num_in), statistics(num_in=num_in)
    options = GptqOptions(act_order=act_order, clip=False)
    quantised = gptq(jnp.asarray(weight), scheme, given.moment_KK, options)
    quantised.validate("linear")
    assert quantised.perm is None
    moment = np.asarray(given.moment_KK, np.float64)
    order = np.argsort(-np.diag(moment)) if act_order else np.arange(num_in)
    expected = references.gptq(weight, scheme, moment, 0.01, order)
    found = np.asarray(quantised.dequantize(), np.float64)
    # A float32 near-tie flips a code, and everything after it: compare the errors then.
    different = ~np.isclose(found, expected, atol=1e-4).all(axis=1)
    assert different.mean() < 0.4
    ours, theirs = (
        output_error(jnp.asarray(w - weight), given.moment_KK) for w in (found, expected)
    )
    assert float(ours) == pytest.approx(float(theirs), rel=0.05)


@pytest.mark.parametrize(
    "scheme", [Scheme(b, s, g) for b, s, g in itertools.product((3, 4), (32, 64, -1), GRIDS)]
)
@pytest.mark.parametrize("options", [
    GptqOptions(),
    GptqOptions(clip=False),
    GptqOptions(act_order=False, clip=False),
    GptqOptions(static_groups=False, clip=False),
    GptqOptions(static_groups=False, act_order=False, clip=False),
])  # fmt: skip
def test_gptq_halves_the_error_of_rounding_to_nearest(scheme, options):
    num_in = 192
    weight, given = weights(num_in=num_in), statistics(num_in=num_in)
    quantised = gptq(jnp.asarray(weight), scheme, given.moment_KK, options)
    quantised.validate("linear")
    needs_perm = options.act_order and not options.static_groups and scheme.group_size != -1
    assert (quantised.perm is not None) == needs_perm
    nearest = rtn(jnp.asarray(weight), scheme)
    assert error_of(weight, quantised, given) < 0.5 * error_of(weight, nearest, given)


def test_gptq_without_correlations_is_round_to_nearest():
    """White inputs leave nothing to compensate, in any order."""
    weight, scheme = weights(), Scheme(4, 32, "full")
    found = gptq(jnp.asarray(weight), scheme, jnp.eye(NUM_IN), GptqOptions(clip=False))
    nearest = rtn(jnp.asarray(weight), scheme)
    np.testing.assert_array_equal(found.packed, nearest.packed)
    np.testing.assert_array_equal(found.scale, nearest.scale)


def test_gptq_survives_dead_channels_and_refuses_bad_moments():
    given = statistics()
    moment = np.array(given.moment_KK)
    moment[7], moment[:, 7] = 0, 0
    weight = weights()
    found = np.asarray(gptq(jnp.asarray(weight), Scheme(4, 32), jnp.asarray(moment)).dequantize())
    assert np.isfinite(found).all() and not found[:, 7].any()
    nothing = gptq(jnp.asarray(weight), Scheme(4, 32), jnp.zeros((NUM_IN, NUM_IN)))
    assert not np.asarray(nothing.dequantize()).any()
    moment[0, 0] = np.nan
    with pytest.raises(ValueError, match="moment of the inputs is not finite"):
        gptq(jnp.asarray(weight), Scheme(4, 32), jnp.asarray(moment))
    indefinite = np.eye(NUM_IN, dtype=np.float32) - 0.9
    with pytest.raises(ValueError, match="dampening=0.01: the Hessian is not positive definite"):
        gptq(jnp.asarray(weight), Scheme(4, 32), jnp.asarray(indefinite))


@pytest.mark.parametrize("dampening", (0, -1, 1.5, float("nan")))
def test_wrong_dampening(dampening):
    with pytest.raises(ValueError, match="must be greater than 0 and at most 1"):
        GptqOptions(dampening=dampening)


def test_clip_needs_static_groups():
    with pytest.raises(ValueError, match="clip=True needs static_groups=True"):
        dataclasses.replace(GptqOptions(), static_groups=False)
