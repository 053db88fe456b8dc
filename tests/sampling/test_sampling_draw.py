"""Drawn tokens: their law, their seeds, their edges, and what the compiled program holds."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from helios_jax.sampling import (
    SamplingParams,
    chosen_logprobs,
    init_history,
    probs,
    sample,
    sample_tokens,
    stack_sampling,
    top_logprobs,
    uniforms,
    warp_logits,
)
from tests.chi_square import chi_square_p
from tests.sampling import sampling_oracle

DRAWS = 20_000
LOGITS_V = np.log([0.5, 0.3, 0.15, 0.05]).astype(np.float32)

draw = jax.jit(sample_tokens)
invert = jax.jit(sample)


def drawn(logits_V, params, history_tokens=None, draws=DRAWS):
    """Counts of each id over rows that differ in their seed alone."""
    vocab_size = len(logits_V)
    sampling = params.to_arrays(draws, vocab_size=vocab_size, rng=np.random.default_rng(5))
    history = None
    if history_tokens is not None:
        prompt, output = history_tokens
        history = init_history(
            jnp.asarray([[*prompt, *output]] * draws, jnp.int32),
            jnp.full(draws, len(prompt), jnp.int32),
            sampling,
            vocab_size=vocab_size,
            lengths_B=jnp.full(draws, len(prompt) + len(output), jnp.int32),
        )
    tokens_B = draw(
        jnp.broadcast_to(logits_V, (draws, vocab_size)), sampling, history, jnp.zeros(draws, int)
    )
    return np.bincount(np.asarray(tokens_B), minlength=vocab_size)


GRID = [
    SamplingParams(temperature=2, top_p=0.9),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5, top_k=3),
    SamplingParams(min_p=0.35),
    SamplingParams(top_k=3, top_p=0.8, min_p=0.05),
    SamplingParams(logit_bias={0: -100, 3: 2.5}),
    SamplingParams(allowed_token_ids=[1, 3], temperature=3),
]


@pytest.mark.parametrize("params", GRID)
def test_draws_follow_the_exact_distribution(params):
    """With fixed seeds this either always passes or never; a right sampler fails 1 time in 1e4."""
    expected = sampling_oracle.distribution(LOGITS_V, params)
    assert chi_square_p(drawn(LOGITS_V, params), expected) > 1e-4


def test_draws_with_penalties_follow_the_exact_distribution():
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    prompt, output = [3, 1], [0, 0, 2]
    counts = drawn(LOGITS_V, params, (prompt, output))
    expected = sampling_oracle.distribution(LOGITS_V, params, prompt, output)
    assert chi_square_p(counts, expected) > 1e-4


def test_the_chi_square_test_sees_a_wrong_order():
    """Without the temperature, and with top-p before it, the same test rejects."""
    counts = drawn(LOGITS_V, SamplingParams(temperature=2, top_p=0.94))
    top_p_first = np.where(np.arange(4) < 3, np.sqrt(np.exp(LOGITS_V)), 0)
    for wrong in (np.exp(LOGITS_V), top_p_first + 1e-9):
        assert chi_square_p(counts, wrong / wrong.sum()) < 1e-9


def test_draws_from_a_large_vocabulary_follow_the_distribution():
    """20,000 draws over 49,152 ids, judged by 64 groups of ids of very different mass."""
    rng = np.random.default_rng(6)
    weights_V = np.exp(2 * rng.standard_normal(49152)).astype(np.float32)
    group_V = rng.permutation(49152) % 64
    uniform = rng.random((DRAWS, 2)).astype(np.float32)
    weights_BV = jnp.broadcast_to(weights_V, (100, 49152))
    ids = np.concatenate([invert(weights_BV, part) for part in uniform.reshape(-1, 100, 2)])
    expected = np.bincount(group_V, weights_V) / weights_V.sum(dtype=np.float64)
    counts = np.bincount(group_V[ids], minlength=64)
    assert chi_square_p(counts, expected) > 1e-4


def test_rows_of_mixed_temperature_in_one_batch():
    rows = [SamplingParams(temperature=0, seed=1), SamplingParams(temperature=1, seed=2)]
    sampling = stack_sampling(rows * 5000, vocab_size=4, rng=np.random.default_rng(0))
    seeds = np.random.default_rng(7).integers(0, 2**32, (10_000, 2), dtype=np.uint32)
    sampling = dataclasses.replace(sampling, seed_B2=jnp.asarray(seeds))
    logits_BV = jnp.broadcast_to(LOGITS_V, (10_000, 4))
    tokens_B = np.asarray(draw(logits_BV, sampling, None, jnp.zeros(10_000, int)))
    assert (tokens_B[::2] == 0).all()
    counts = np.bincount(tokens_B[1::2], minlength=4)
    assert chi_square_p(counts, np.exp(LOGITS_V.astype(np.float64))) > 1e-4


@pytest.mark.parametrize("vocab_size", [1, 4, 331, 49152])
def test_a_token_of_probability_0_is_never_drawn(vocab_size):
    rng = np.random.default_rng(8)
    edges = np.array([0, 1e-45, 2**-24, 0.5, 1 - 2**-24, 1], np.float32)
    uniform_B2 = np.stack(np.meshgrid(edges, edges), -1).reshape(-1, 2)
    batch = len(uniform_B2)
    for kind in range(6):
        weights_BV = np.zeros((batch, vocab_size), np.float32)
        ids = rng.choice(vocab_size, min(vocab_size, 1 + 3 * kind), replace=False)
        if kind == 0:
            ids[:] = vocab_size - 1
        weights_BV[:, ids] = rng.choice([1e-30, 1e-9, 0.3, 1.0], len(ids))
        got = np.asarray(invert(weights_BV, uniform_B2))
        assert np.isin(got, ids).all()
    assert (np.asarray(invert(weights_BV * 0, uniform_B2)) == -1).all()
    assert (np.asarray(invert(weights_BV * np.nan, uniform_B2)) == -1).all()


def test_uniforms_reach_every_token():
    """u = 0 gives the first, u = 1 the last token that has weight; the order is that of the ids."""
    weights_BV = np.array([[0.0, 0.25, 0.5, 0.0, 0.25, 0.0]] * 5, np.float32)
    u = np.array([0, 0.2, 0.4, 0.8, 1], np.float32)
    got = [
        int(invert(row[None], np.array([[first, second]], np.float32))[0])
        for row in weights_BV[:1]
        for first in u
        for second in (0.0, 1.0)
    ]
    assert got[0] == 1 and got[-1] == 4 and set(got) == {1, 2, 4}


def test_uniforms_are_uniform_and_their_streams_independent():
    seeds = jnp.asarray(np.random.default_rng(9).integers(0, 2**32, (DRAWS, 2), dtype=np.uint32))
    same = jnp.broadcast_to(jnp.array([0, 3], jnp.uint32), (DRAWS, 2))
    position_B = jnp.arange(DRAWS, dtype=jnp.int32)
    parts = [
        uniforms(seeds, jnp.zeros(DRAWS, jnp.int32)),
        uniforms(same, position_B),
        uniforms(same, position_B, stream=1),
    ]
    columns = np.concatenate([np.asarray(part) for part in parts], axis=1)
    assert columns.min() >= 0 and columns.max() < 1
    for column in columns.T:
        assert scipy.stats.kstest(column, "uniform").pvalue > 1e-4
    correlation = np.corrcoef(columns.T) - np.eye(columns.shape[1])
    assert np.abs(correlation).max() < 5 / np.sqrt(DRAWS)


def test_a_seeded_row_draws_the_same_alone_and_in_any_batch():
    rng = np.random.default_rng(10)
    vocab_size, steps = 1000, 40
    rows = [
        SamplingParams(seed=7, temperature=1.3, top_p=0.97),
        SamplingParams(seed=8, top_k=100, min_p=0.01),
        SamplingParams(seed=9),
        SamplingParams(temperature=0),
        SamplingParams(seed=7, temperature=1.3, top_p=0.97),
    ]
    shared_V = rng.standard_normal((steps, vocab_size)).astype(np.float32) * 3
    together = stack_sampling(rows, vocab_size=vocab_size)
    alone = [row.to_arrays(1, vocab_size=vocab_size) for row in rows]
    for step in range(steps):
        logits_BV = np.broadcast_to(shared_V[step], (len(rows), vocab_size))
        got = draw(logits_BV, together, None, jnp.full(len(rows), step)).tolist()
        assert got[0] == got[4]
        for b, sampling in enumerate(alone):
            assert draw(logits_BV[:1], sampling, None, jnp.full(1, step)).tolist() == [got[b]]


def test_positions_differ():
    sampling = SamplingParams(seed=1).to_arrays(64, vocab_size=1000)
    tokens_B = draw(jnp.zeros((64, 1000)), sampling, None, jnp.arange(64))
    assert len(set(tokens_B.tolist())) > 50


def test_a_row_that_is_not_finite_gives_minus_one():
    logits_BV = np.zeros((4, 9), np.float32)
    logits_BV[0, 3], logits_BV[1, 0], logits_BV[2] = np.nan, np.inf, -np.inf
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)):
        rows = [params] * 3 + [SamplingParams(temperature=0)]
        tokens_B = draw(logits_BV, stack_sampling(rows, vocab_size=9), None, jnp.zeros(4, int))
        assert tokens_B.tolist() == [-1, -1, -1, 0]
    barred = SamplingParams(allowed_token_ids=[2], min_tokens=1, temperature=0)
    sampling = barred.to_arrays(1, vocab_size=9, eos_token_ids=(2,))
    assert draw(logits_BV[3:], sampling, None, jnp.zeros(1, int)).tolist() == [-1]


def test_min_tokens_holds_until_it_is_reached():
    params = SamplingParams(temperature=0, min_tokens=2)
    sampling = params.to_arrays(1, vocab_size=4, eos_token_ids=(0,))
    got = [draw(LOGITS_V[None], sampling, None, jnp.full(1, i)).tolist() for i in range(4)]
    assert got == [[1], [1], [0], [0]]


def test_logprobs_are_those_of_the_raw_logits():
    rng = np.random.default_rng(11)
    logits_BV = rng.integers(-8, 8, (6, 700)).astype(np.float32)
    tokens_B = np.array([0, 5, 699, 3, 9, -1], np.int32)
    exact_BV = logits_BV.astype(np.float64)
    exact_BV -= np.log(np.exp(exact_BV).sum(1, keepdims=True))
    got = chosen_logprobs(jnp.asarray(logits_BV), jnp.asarray(tokens_B))
    for b in range(5):
        assert np.isclose(got.logprob_B[b], exact_BV[b, tokens_B[b]], atol=1e-5)
        assert got.rank_B[b] == (logits_BV[b] >= logits_BV[b, tokens_B[b]]).sum()
    assert np.isnan(got.logprob_B[5]) and got.rank_B[5] == 0
    top = top_logprobs(jnp.asarray(logits_BV), 5)
    expected_ids = np.argsort(-logits_BV, axis=1, kind="stable")[:, :5]
    assert np.array_equal(top.ids_BK, expected_ids)
    np.testing.assert_allclose(
        top.logprobs_BK, np.take_along_axis(exact_BV, expected_ids, 1), atol=1e-5
    )
    huge = jnp.array([[1e4, 0.0, -jnp.inf]], jnp.bfloat16)
    assert top_logprobs(huge, 1).logprobs_BK.tolist() == [[0.0]]


def everything(batch, vocab_size):
    params = SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.1,
        presence_penalty=0.1, frequency_penalty=0.1, logit_bias={1: 1.0}, min_tokens=1,
        allowed_token_ids=list(range(vocab_size - 1)), bad_words_token_ids=[[1, 2]], seed=3,
    )  # fmt: skip
    sampling = params.to_arrays(batch, vocab_size=vocab_size, eos_token_ids=(2,))
    prompt_BT = jnp.ones((batch, 2), jnp.int32)
    lengths_B = jnp.full(batch, 2, jnp.int32)
    history = init_history(prompt_BT, lengths_B, sampling, vocab_size=vocab_size)
    return sampling, history, jnp.zeros(batch, jnp.int32)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


def test_nothing_sorts_the_vocabulary_and_nothing_calls_the_host():
    vocab_size = 49152
    jaxpr = jax.make_jaxpr(sample_tokens)(jnp.zeros((8, vocab_size)), *everything(8, vocab_size))
    names = set()
    for equation in primitives(jaxpr.jaxpr):
        names.add(equation.primitive.name)
        if equation.primitive.name in ("sort", "top_k", "approx_top_k"):
            assert equation.invars[0].aval.shape[-1] <= vocab_size // 16
    assert {"top_k", "while", "cond", "sort"} <= names, "the walk reaches the inner programs"
    assert not any("callback" in name for name in names) and not jaxpr.effects


def test_a_greedy_batch_pays_for_a_maximum_only():
    """Random numbers are made in one of two branches, and nowhere outside it."""
    jaxpr = jax.make_jaxpr(sample_tokens)(jnp.zeros((8, 512)), *everything(8, 512)).jaxpr

    def draws(program) -> bool:
        return any(inner.primitive.name == "random_bits" for inner in primitives(program))

    (choice,) = [e for e in jaxpr.eqns if draws(SimpleNamespace(eqns=[e]))]
    assert choice.primitive.name == "cond"
    assert sorted(draws(branch.jaxpr) for branch in choice.params["branches"]) == [False, True]


def test_jit_vmap_and_strict_dtypes():
    """Under vmap a batch of one-row programs draws what one program of many rows draws."""
    vocab_size, batch = 331, 6
    arguments = everything(batch, vocab_size)
    rng = np.random.default_rng(12)
    logits_BV = jnp.asarray(rng.standard_normal((batch, vocab_size)) * 3, jnp.bfloat16)
    plain = draw(logits_BV, *arguments)
    rows = jax.tree.map(lambda leaf: leaf[:, None], (logits_BV, *arguments))
    with jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"):
        mapped = jax.jit(jax.vmap(sample_tokens))(*rows)
        warped = jax.jit(warp_logits)(logits_BV, *arguments)
    assert mapped[:, 0].tolist() == plain.tolist()
    assert warped.dtype == jnp.float32
    np.testing.assert_allclose(jnp.sum(probs(warped), axis=1), 1, rtol=1e-6)


def test_values_do_not_recompile():
    count = 0

    @jax.jit
    def step(logits_BV, sampling, num_B):
        nonlocal count
        count += 1
        return sample_tokens(logits_BV, sampling, None, num_B)

    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=3)):
        for seed in (1, None):
            rows = [params, SamplingParams(top_p=0.5, seed=seed, max_tokens=3)]
            sampling = stack_sampling(rows, vocab_size=50)
            step(jnp.zeros((2, 50)), sampling, jnp.zeros(2, jnp.int32))
    assert count == 1
