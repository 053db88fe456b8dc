"""The warped distribution against a naive float64 one: every filter, ties, order, histories."""

import functools

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.sampling import (
    SamplingParams,
    init_history,
    is_finite,
    position_rows,
    probs,
    sampling_shapes,
    stack_sampling,
    update_history,
    warp_logits,
)
from helios_jax.sampling.rows import first_argmax, largest
from helios_jax.sampling.threshold import NUM_CANDIDATES, keep_threshold
from tests.sampling import sampling_oracle

EPSILON = 2e-6  # float32 sums of up to 49,152 probabilities
PROPERTY = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)

warp = jax.jit(warp_logits)
threshold = jax.jit(keep_threshold)


def distribution(logits_BV, rows, history=None, num_output_tokens=0, eos=()):
    vocab_size = logits_BV.shape[1]
    sampling = stack_sampling(rows, vocab_size=vocab_size, eos_token_ids=eos)
    num_B = jnp.full(len(rows), num_output_tokens, jnp.int32)
    return np.asarray(probs(warp(jnp.asarray(logits_BV), sampling, history, num_B)))


def check_kept(y_V, kept_V, top_k, top_p, min_p):
    """Asserts that kept_V is what the filters leave, up to EPSILON of mass at a threshold.

    Weaker than equality with a set only where float32 cannot tell: every other token is decided.
    """
    y_V = y_V.astype(np.float64)
    weight_V = np.exp(y_V)
    floor = y_V[kept_V].min()
    assert np.array_equal(kept_V, y_V >= floor), "ties at the threshold are kept together"
    left_V = weight_V >= min_p * (1 - EPSILON)
    if top_k > 0:
        left_V &= y_V >= np.sort(y_V)[::-1][min(top_k, len(y_V)) - 1]
    assert left_V[kept_V].all()
    mass = (weight_V * left_V).sum()
    kept_mass = weight_V[kept_V].sum()
    if top_p < 1:
        assert kept_mass >= (top_p - EPSILON) * mass, "the kept tokens reach top_p"
        heaviest = weight_V[kept_V & (y_V <= floor + EPSILON)].sum()
        assert kept_mass - heaviest < (top_p + EPSILON) * mass, "no fewer tokens reach it"
    else:
        must_V = left_V & (weight_V >= min_p * (1 + EPSILON))
        assert kept_V[must_V].all()


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 64, 200])
def test_thresholds_are_exact_for_any_logits(vocab_size):
    batch = 4

    @PROPERTY
    @hypothesis.given(
        hypothesis.extra.numpy.arrays(
            np.float32,
            (batch, vocab_size),
            elements=st.one_of(
                st.integers(-20 * 2**12, 20 * 2**12).map(lambda i: i / 2**12),
                st.integers(-3, 3).map(float),
                st.just(-np.inf),
            ),
            fill=st.just(1.5),
        ),
        st.tuples(*[st.integers(0, vocab_size + 1)] * batch),
        st.tuples(*[st.one_of(st.just(1.0), st.floats(2**-6, 1 - 2**-6, width=32))] * batch),
        st.tuples(*[st.one_of(st.just(0.0), st.floats(2**-6, 1, width=32))] * batch),
    )
    def check(logits_BV, top_k_B, top_p_B, min_p_B):
        hypothesis.assume(np.isfinite(logits_BV.max(1)).all())
        y_BV = logits_BV - logits_BV.max(1, keepdims=True)
        numbers = [np.array(top_k_B, np.int32), np.array(top_p_B, np.float32)]
        threshold_B = np.asarray(threshold(y_BV, *numbers, np.array(min_p_B, np.float32)))
        for b in range(batch):
            kept_V = (y_BV[b] >= threshold_B[b]) & (y_BV[b] > -np.inf)
            finite_V = y_BV[b] > -np.inf
            check_kept(y_BV[b][finite_V], kept_V[finite_V], top_k_B[b], top_p_B[b], min_p_B[b])

    check()


def test_thresholds_are_exact_for_a_real_vocabulary():
    """Peaked, flat, quantised and uniform rows; k within and beyond the candidates."""
    rng = np.random.default_rng(0)
    noise_V = rng.standard_normal(49152).astype(np.float32)
    kinds = [4 * noise_V, 0.3 * noise_V, np.round(3 * noise_V), np.zeros_like(noise_V)]
    for top_k in (0, 1, NUM_CANDIDATES, NUM_CANDIDATES + 1, 3000):
        for top_p, min_p in ((1.0, 0.0), (0.5, 0.0), (0.95, 0.02), (0.999, 0.0)):
            y_BV = np.stack([logits_V - logits_V.max() for logits_V in kinds])
            batch = len(kinds)
            threshold_B = np.asarray(
                threshold(
                    y_BV,
                    np.full(batch, top_k, np.int32),
                    np.full(batch, top_p, np.float32),
                    np.full(batch, min_p, np.float32),
                )
            )
            for b in range(batch):
                check_kept(y_BV[b], y_BV[b] >= threshold_B[b], top_k, top_p, min_p)


def test_a_row_does_not_change_anothers_threshold():
    """The search runs for the whole batch if one row needs it; the other rows stay bit-equal."""
    rng = np.random.default_rng(1)
    y_BV = rng.standard_normal((2, 49152)).astype(np.float32) * np.float32([[6], [0.2]])
    y_BV -= y_BV.max(1, keepdims=True)
    arguments = np.array([40, 500], np.int32), np.full(2, 0.9, np.float32), np.zeros(2, np.float32)
    together = np.asarray(threshold(y_BV, *arguments))
    beside_itself = np.asarray(threshold(y_BV[[0, 0]], *(x[[0, 0]] for x in arguments)))
    assert together[0] == beside_itself[0]


@pytest.mark.parametrize("vocab_size, k", [(1, 1), (64, 20), (300, 3), (331, 5), (49152, 20)])
def test_largest_equals_top_k_with_ties(vocab_size, k):
    rng = np.random.default_rng(2)
    for spread in (1, 3, 1000):
        x_BV = jnp.asarray(rng.integers(0, spread, (6, vocab_size)).astype(np.float32))
        expected = jax.lax.top_k(x_BV, k)
        for got, want in zip(largest(x_BV, k), expected, strict=True):
            assert np.array_equal(got, want)


def test_first_argmax():
    x_BV = np.array([[1, 3, 3], [-np.inf, -5, -np.inf], [0, np.nan, 9], [np.inf, 0, 0]])
    assert first_argmax(jnp.asarray(x_BV, jnp.float32)).tolist() == [1, 1, -1, -1]
    assert first_argmax(jnp.full((1, 5), -jnp.inf)).tolist() == [-1]


def test_order_is_temperature_then_top_p():
    """p = [.5, .3, .15, .05] at T = 2 is [.379, .294, .208, .120]: top_p = .9 drops nothing."""
    logits_BV = np.log([[0.5, 0.3, 0.15, 0.05]]).astype(np.float32)
    got = distribution(logits_BV, [SamplingParams(temperature=2, top_p=0.9)])
    assert np.allclose(got, [[0.379, 0.294, 0.208, 0.120]], atol=6e-4)
    # top_p first would have dropped the last token: .5 + .3 + .15 reaches .9.
    assert distribution(logits_BV, [SamplingParams(top_p=0.9)])[0, 3] == 0
    # top-k comes before top-p: of the two tokens left, .625 and .375, the first reaches .6.
    assert np.allclose(distribution(logits_BV, [SamplingParams(top_k=2, top_p=0.6)]), np.eye(4)[0])
    # The penalty comes before the temperature: e**-2 before the square root.
    params = SamplingParams(temperature=2, logit_bias={0: -2.0})
    expected = np.sqrt(np.array([0.5 * np.exp(-2), 0.3, 0.15, 0.05]))
    assert np.allclose(distribution(logits_BV, [params])[0], expected / expected.sum(), atol=1e-6)


def test_greedy_and_sampled_rows_share_a_batch():
    logits_BV = np.array([[0.0, 2.0, 1.0, 2.0]] * 3, np.float32)
    greedy, plain = SamplingParams(temperature=0, top_k=2, min_p=0.5), SamplingParams()
    got = distribution(logits_BV, [greedy, plain, greedy])
    assert np.array_equal(got[[0, 2]], np.eye(4)[[1, 1]])
    expected = np.exp(logits_BV[1]) / np.exp(logits_BV[1]).sum()
    assert np.allclose(got[1], expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1e-4])
def test_tiny_temperatures_and_huge_logits_are_greedy(temperature):
    logits_BV = np.array([[-1e4, 1e4, 9.9e3, -np.inf], [-3e38, -1.0, -3e38, 3e38]], np.float32)
    got = distribution(logits_BV, [SamplingParams(temperature=temperature)] * 2)
    assert np.array_equal(got, np.eye(4)[[1, 3]])


def test_a_huge_temperature_is_uniform_over_what_is_left():
    logits_BV = np.array([[1.0, 5.0, -np.inf, 3.0]], np.float32)
    got = distribution(logits_BV, [SamplingParams(temperature=1e30)])
    assert np.allclose(got, [[1 / 3, 1 / 3, 0, 1 / 3]], atol=1e-6)


def test_rows_without_a_finite_maximum_are_reported():
    bad = [np.nan, np.inf, -np.inf]
    logits_BV = np.zeros((4, 300), np.float32)
    logits_BV[0, 299], logits_BV[1, 5], logits_BV[2] = bad
    logits_BV[3, 7] = -np.inf
    assert np.asarray(is_finite(jnp.asarray(logits_BV))).tolist() == [False, False, False, True]
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)):
        got = distribution(logits_BV, [params] * 4)
        assert np.isnan(got[:3]).all() and np.isclose(got[3].sum(), 1)


def random_params(rng, vocab_size):
    """Parameters with every kind of edit to the logits, each present half the time."""

    def maybe(value):
        return value if rng.random() < 0.5 else None

    ids = rng.permutation(vocab_size)
    chosen = dict(
        temperature=maybe(float(rng.choice([0.0, 0.5, 1.7]))),
        top_k=maybe(int(rng.integers(1, 6))),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2))),
        presence_penalty=maybe(float(rng.uniform(-2, 2))),
        frequency_penalty=maybe(float(rng.uniform(-2, 2))),
        logit_bias=maybe({int(i): float(rng.normal()) for i in ids[:3]}),
        allowed_token_ids=maybe([int(i) for i in ids[2:9]]),
        bad_words_token_ids=maybe([[1], [2, 3], [0, 2, 3], [3, 3]]),
        stop_token_ids=maybe([5]),
        min_tokens=maybe(4),
    )
    return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})


def test_edits_agree_with_a_naive_implementation():
    """40 mixed batches; histories grown token by token, and the same rebuilt at once."""
    rng = np.random.default_rng(3)
    vocab_size, batch, width, eos = 12, 5, 9, (4,)
    everything = functools.reduce(
        lambda a, b: a | b,
        [shapes_of(random_params(rng, vocab_size), eos) for _ in range(30)],
    )
    for _ in range(40):
        rows = [random_params(rng, vocab_size) for _ in range(batch)]
        sampling = stack_sampling(rows, vocab_size=vocab_size, eos_token_ids=eos, shapes=everything)
        tokens_BT = rng.integers(0, 4, (batch, width)).astype(np.int32)
        prompt_B = rng.integers(1, 4, batch)
        length_B = rng.integers(prompt_B, width + 1)
        logits_BV = (3 * rng.standard_normal((batch, vocab_size))).astype(np.float32)

        grown = history_of(tokens_BT, prompt_B, sampling, vocab_size)
        for t in range(width):
            active_B = (t >= prompt_B) & (t < length_B)
            grown = grow(grown, tokens_BT[:, t], active_B)
        rebuilt = history_of(tokens_BT, prompt_B, sampling, vocab_size, length_B)
        jax.tree.map(np.testing.assert_array_equal, grown, rebuilt)

        num_B = (length_B - prompt_B).astype(np.int32)
        warped = np.asarray(probs(warp(logits_BV, sampling, grown, num_B)))
        for b, params in enumerate(rows):
            prompt, output = np.split(tokens_BT[b, : length_B[b]], [prompt_B[b]])
            naive = sampling_oracle.distribution(
                logits_BV[b], params, prompt.tolist(), output.tolist(), eos
            )
            np.testing.assert_allclose(warped[b], naive, atol=1e-5)


def test_positions_of_a_draft_see_the_tokens_before_them():
    rng = np.random.default_rng(4)
    vocab_size, batch, drafts, eos = 12, 3, 3, (4,)
    rows = [
        SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, bad_words_token_ids=[[2, 3]]),
        SamplingParams(min_tokens=3, repetition_penalty=1.5),
        SamplingParams(temperature=0.5, bad_words_token_ids=[[1, 1, 1], [0]]),
    ]
    sampling = stack_sampling(rows, vocab_size=vocab_size, eos_token_ids=eos)
    prompts_BT = rng.integers(0, 4, (batch, 4)).astype(np.int32)
    history = history_of(prompts_BT, np.full(batch, 4), sampling, vocab_size)
    draft_BJ = np.array([[2, 2, 1], [3, 0, 3], [1, 1, 2]], np.int32)
    logits_BTV = rng.standard_normal((batch, drafts + 1, vocab_size)).astype(np.float32)
    flat = position_rows(sampling, history, jnp.zeros(batch, jnp.int32), jnp.asarray(draft_BJ))
    warped = np.asarray(probs(warp(logits_BTV.reshape(-1, vocab_size), *flat)))
    for b, params in enumerate(rows):
        for j in range(drafts + 1):
            naive = sampling_oracle.distribution(
                logits_BTV[b, j], params, prompts_BT[b].tolist(), draft_BJ[b, :j].tolist(), eos
            )
            np.testing.assert_allclose(warped[b * (drafts + 1) + j], naive, atol=1e-5)


def test_a_filter_without_its_history_is_refused():
    logits_BV = jnp.zeros((1, 5))
    for params in (SamplingParams(presence_penalty=1), SamplingParams(bad_words_token_ids=[[1]])):
        sampling = params.to_arrays(1, vocab_size=5)
        with pytest.raises(ValueError, match="init_history"):
            warp_logits(logits_BV, sampling, None, jnp.zeros(1, jnp.int32))
    plain = SamplingParams().to_arrays(1, vocab_size=5)
    tokens = jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    assert init_history(*tokens, plain, vocab_size=5) is None
    assert update_history(None, jnp.ones(1, jnp.int32), jnp.ones(1, bool)) is None


def test_logit_bias_and_allowed_ids_bar_a_token():
    logits_BV = np.array([[9.0, 1.0, 0.0]] * 2, np.float32)
    greedy = dict(temperature=0.0)
    rows = [
        SamplingParams(logit_bias={0: -100}, **greedy),
        SamplingParams(allowed_token_ids=[2], **greedy),
    ]
    assert distribution(logits_BV, rows).argmax(1).tolist() == [1, 2]


grow = jax.jit(update_history)


def history_of(tokens_BT, prompt_lengths_B, sampling, vocab_size, lengths_B=None):
    as_int = functools.partial(jnp.asarray, dtype=jnp.int32)
    return init_history(
        as_int(tokens_BT),
        as_int(prompt_lengths_B),
        sampling,
        vocab_size=vocab_size,
        lengths_B=None if lengths_B is None else as_int(lengths_B),
    )


def shapes_of(params, eos):
    return sampling_shapes([params], eos_token_ids=eos)
