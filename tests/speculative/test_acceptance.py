"""Rejection sampling: the law of what comes out, the rule's edges, greedy rows, single rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from helios_jax import speculative
from helios_jax.sampling import SamplingParams, sample_tokens, sampling_shapes, stack_sampling
from helios_jax.speculative import Draft, RowKey, acceptance_uniforms, no_draft
from tests.speculative import law, wrong_rules

accept = jax.jit(speculative.accept, compiler_options=law.UNOPTIMISED)
verify = jax.jit(speculative.verify, static_argnames="rule", compiler_options=law.UNOPTIMISED)

ROWS = 4000
# Seeds are fixed, so that a test passes always or never; a right rule fails 1 in 1e4.
LOWEST = 1e-4
SLOW = [pytest.mark.slow]

GRID = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=2.0),
    "cold": SamplingParams(temperature=0.4),
    "top-k": SamplingParams(temperature=1.5, top_k=3),
    "top-p": SamplingParams(temperature=2.0, top_p=0.8),
    "min-p": SamplingParams(min_p=0.2),
    "all three": SamplingParams(temperature=0.8, top_k=6, top_p=0.9, min_p=0.02),
}
FILTERS = {
    "penalties": SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "bias": SamplingParams(logit_bias={0: -100.0, 3: 2.0}),
    "allowed": SamplingParams(allowed_token_ids=[0, 1, 2], temperature=1.5),
    "bad words": SamplingParams(bad_words_token_ids=[[1], [2, 3]]),
    "min tokens": SamplingParams(min_tokens=2, temperature=1.5),
    "everything": SamplingParams(
        temperature=1.4, top_p=0.95, min_p=0.01, frequency_penalty=0.5, logit_bias={2: 1.0},
        bad_words_token_ids=[[0, 1]], min_tokens=1,
    ),
}  # fmt: skip
EOS = (3,)
SHAPES = sampling_shapes(list((GRID | FILTERS).values()), eos_token_ids=EOS)


def judge(params, *, vocab_size, num_rows=ROWS, num_tokens=2, num_draft_tokens=3, seed=0, **how):
    pair = law.random_pair(vocab_size, seed=seed)
    tokens_BN = law.emitted(
        pair, params, num_rows=num_rows, num_tokens=num_tokens, seed=seed, eos=EOS,
        num_draft_tokens=num_draft_tokens, shapes=SHAPES, **how,
    )  # fmt: skip
    return law.p_value(tokens_BN, law.exact(pair, params, num_tokens, EOS))


@pytest.mark.parametrize("params", (GRID | FILTERS).values(), ids=GRID | FILTERS)
def test_two_tokens_follow_the_targets_joint_law(params):
    assert judge(params, vocab_size=5) > LOWEST


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"greedy_draft": True}, {"deterministic": True}], ids=str)
@pytest.mark.parametrize("name", ["all three", "everything"])
def test_the_joint_law_with_chosen_drafts(name, how):
    assert judge((GRID | FILTERS)[name], vocab_size=5, **how) > LOWEST


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size, num_tokens", [(4, 2), (8, 2), (16, 1), (64, 1)])
@pytest.mark.parametrize("params", (GRID | FILTERS).values(), ids=GRID | FILTERS)
def test_the_law_over_vocabularies_and_seeds(params, vocab_size, num_tokens):
    """Random p and q, the joint law of two tokens where the vocabulary is small; over the seeds
    p-values are uniform (Kolmogorov-Smirnov)."""
    p_values = [
        judge(params, vocab_size=vocab_size, num_tokens=num_tokens, num_rows=5_000, seed=seed)
        for seed in range(200)
    ]
    assert min(p_values) > LOWEST / 200
    assert scipy.stats.kstest(p_values, "uniform").pvalue > LOWEST


def test_p_values_are_uniform_over_seeds():
    """Were the law a little wrong, p-values would lean to 0; were it too regular, to 1."""
    right = wrong_rules.RIGHT[0]
    p_values = [wrong_rules.judge(right, seed) for seed in range(80)]
    assert scipy.stats.kstest(p_values, "uniform").pvalue > 1e-3


QUICK = ("no residual", "a number used twice", "q not warped", "top-p before temperature")


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, id=mistake.name, marks=[] if mistake.name in QUICK else SLOW)
        for mistake in wrong_rules.WRONG
    ],
)
def test_wrong_rules_are_rejected_by_the_same_test(mistake):
    assert wrong_rules.judge(mistake) < wrong_rules.REJECTED


@pytest.mark.parametrize("right", wrong_rules.RIGHT, ids=lambda right: right.name)
def test_and_the_right_rule_is_not(right):
    """Chosen drafts leave the law alone too: q is one-hot then, and never an array."""
    assert wrong_rules.judge(right) > LOWEST


def key_of(num_rows: int, seed: int = 0) -> RowKey:
    rng = np.random.default_rng(seed)
    seed_B2 = jnp.asarray(rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32))
    return RowKey(seed_B2, jnp.zeros(num_rows, jnp.int32))


def test_accepts_with_probability_min_1_p_over_q():
    p_3V = np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]], np.float32)
    q_2V = np.array([[0.4, 0.2, 0.4], [0.25, 0.75, 0.0]], np.float32)
    B = 20_000
    tokens_BJ = jnp.broadcast_to(jnp.array([0, 1], jnp.int32), (B, 2))
    n_B, next_B = accept(
        jnp.broadcast_to(p_3V, (B, 3, 3)), jnp.broadcast_to(q_2V, (B, 2, 3)), tokens_BJ,
        key_of(B), jnp.full(B, 2, jnp.int32),
    )  # fmt: skip
    first, second = 0.1 / 0.4, 0.25 / 0.75
    expected = np.array([1 - first, first * (1 - second), first * second]) * B
    counts = np.bincount(n_B, minlength=3)
    assert scipy.stats.chisquare(counts, expected).pvalue > LOWEST
    assert set(np.asarray(next_B)[np.asarray(n_B) == 0].tolist()) == {2}, "p - q > 0 there alone"
    bonus = np.bincount(np.asarray(next_B)[np.asarray(n_B) == 2], minlength=3)
    assert scipy.stats.chisquare(bonus, np.array([0.25, 0.25, 0.5]) * bonus.sum()).pvalue > LOWEST


def test_a_token_of_probability_0_is_never_accepted_even_at_u_0(monkeypatch):
    from helios_jax.speculative import acceptance

    p_BTV = jnp.array([[[0.0, 1.0], [0.5, 0.5]]])
    q_BJV = jnp.array([[[0.5, 0.5]]])
    monkeypatch.setattr(
        acceptance, "acceptance_uniforms", lambda key, J: jnp.zeros((len(key.seed_B2), J))
    )
    for q in (q_BJV, None):
        n_B, next_B = speculative.accept(p_BTV, q, jnp.array([[0]]), key_of(1), jnp.array([1]))
        assert (n_B.tolist(), next_B.tolist()) == ([0], [1])


def test_equal_p_and_q_accept_everything_and_never_divide_by_zero():
    rng = np.random.default_rng(0)
    p_BTV = rng.dirichlet(np.ones(9), (500, 4)).astype(np.float32)
    tokens_BJ = rng.integers(0, 9, (500, 3))
    n_B, next_B = accept(
        p_BTV, p_BTV[:, :3], jnp.asarray(tokens_BJ), key_of(500), jnp.full(500, 3, jnp.int32)
    )
    assert np.all(np.asarray(n_B) == 3) and np.all(np.asarray(next_B) >= 0)


def test_draft_lengths_are_the_rows_own():
    """Tokens beyond a row's length do not count, whatever they and their p and q hold."""
    rng = np.random.default_rng(1)
    B, J, V = 64, 3, 5
    p_BTV = rng.dirichlet(np.ones(V), (B, J + 1)).astype(np.float32)
    q_BJV = rng.dirichlet(np.ones(V), (B, J)).astype(np.float32)
    tokens_BJ = rng.integers(0, V, (B, J))
    length_B = np.arange(B) % (J + 1)
    key = key_of(B)
    short = accept(p_BTV, q_BJV, jnp.asarray(tokens_BJ), key, jnp.asarray(length_B))
    assert np.all(np.asarray(short.num_accepted_B) <= length_B)
    for length in range(J + 1):
        rows = length_B == length
        alone = accept(
            p_BTV[rows][:, : length + 1], q_BJV[rows][:, :length],
            jnp.asarray(tokens_BJ[rows][:, :length]), jax.tree.map(lambda x, r=rows: x[r], key),
            jnp.full(rows.sum(), length, jnp.int32),
        )  # fmt: skip
        for whole, part in zip(short, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(whole)[rows], part)
    spoilt = p_BTV.copy()
    spoilt[np.arange(J + 1) > length_B[:, None]] = np.nan
    again = accept(spoilt, q_BJV, jnp.asarray(tokens_BJ), key, jnp.asarray(length_B))
    np.testing.assert_array_equal(again.next_token_B, short.next_token_B)


def random_round(rows, V=11, J=3, seed=2, q=True):
    rng = np.random.default_rng(seed)
    B = len(rows)
    sampling = stack_sampling(rows, vocab_size=V, rng=np.random.default_rng(0))
    logits_BTV = jnp.asarray(2 * rng.standard_normal((B, J + 1, V)).astype(np.float32))
    q_BJV = jnp.asarray(rng.dirichlet(np.ones(V), (B, J)).astype(np.float32)) if q else None
    tokens_BJ = jnp.asarray(rng.integers(0, V, (B, J)), jnp.int32)
    draft = Draft(tokens_BJ, jnp.asarray(np.arange(B) % (J + 1), jnp.int32), q_BJV)
    return logits_BTV, draft, sampling


def test_without_drafts_a_row_draws_what_plain_sampling_draws():
    rows = [SamplingParams(seed=i, temperature=1.2, top_p=0.9) for i in range(40)]
    logits_BTV, draft, sampling = random_round(rows)
    num_B = jnp.arange(40, dtype=jnp.int32)
    draft = draft._replace(num_draft_B=jnp.zeros(40, jnp.int32))
    plain_B = sample_tokens(logits_BTV[:, 0], sampling, None, num_B)
    record = verify(logits_BTV, draft, sampling, None, num_B)
    np.testing.assert_array_equal(record.next_token_B, plain_B)
    assert record.is_bonus_B.all() and np.all(record.drawn_BT[:, 1:] == -1)
    record = verify(logits_BTV[:, :1], no_draft(40, 0), sampling, None, num_B)
    np.testing.assert_array_equal(record.next_token_B, plain_B)


def test_greedy_rows_emit_the_argmax_alone_and_among_sampled_ones():
    greedy = SamplingParams(temperature=0)
    logits_BTV, draft, sampling = random_round([greedy] * 12)
    best_BT = np.argmax(logits_BTV, axis=2)
    # Some drafts are right.
    right_BJ = jnp.asarray(np.where(np.arange(3) < 2, best_BT[:, :3], 0), jnp.int32)
    draft = draft._replace(tokens_BJ=right_BJ)
    alone = verify(logits_BTV, draft, sampling, None, jnp.zeros(12, jnp.int32))
    drawn_BT, n_B = np.asarray(alone.drawn_BT), np.asarray(alone.num_accepted_B)
    assert set(n_B.tolist()) == {0, 1, 2}
    for b in range(12):
        np.testing.assert_array_equal(drawn_BT[b, : n_B[b] + 1], best_BT[b, : n_B[b] + 1])
    mixed = dataclasses.replace(sampling, temperature_B=sampling.temperature_B.at[0].set(1.0))
    one_hot_BJV = jax.nn.one_hot(draft.tokens_BJ, 11)
    among = verify(
        logits_BTV, draft._replace(q_BJV=one_hot_BJV), mixed, None, jnp.zeros(12, jnp.int32)
    )
    for found, expected in zip(among, alone, strict=True):
        if found.ndim == 1:
            np.testing.assert_array_equal(found[1:], expected[1:])


def test_a_row_that_is_not_finite_gives_minus_one_after_what_was_accepted():
    """At the position where it matters; a NaN after a rejected draft does not."""
    for temperature in (0.0, 1.0):
        rows = [SamplingParams(temperature=temperature, seed=i) for i in range(3)]
        logits_BTV, draft, sampling = random_round(rows, q=False)
        best_BJ = jnp.argmax(logits_BTV[:, :3], axis=2).astype(jnp.int32)
        sure_BTV = logits_BTV.at[jnp.arange(3)[:, None], jnp.arange(3), best_BJ].add(200.0)
        draft = draft._replace(tokens_BJ=best_BJ, num_draft_B=jnp.full(3, 3, jnp.int32))
        draft = draft._replace(tokens_BJ=draft.tokens_BJ.at[2, 0].add(1) % 11)
        bad_BTV = sure_BTV.at[0, 0, 4].set(jnp.nan).at[1:, 2, 4].set(jnp.nan)
        record = verify(bad_BTV, draft, sampling, None, jnp.zeros(3, jnp.int32))
        assert record.num_accepted_B.tolist() == [0, 2, 0]
        assert record.next_token_B.tolist()[:2] == [-1, -1] and record.next_token_B[2] >= 0


def test_a_batch_of_greedy_rows_computes_no_distribution():
    """Both paths are in the program; the greedy one holds no exponential."""
    logits_BTV, draft, sampling = random_round([SamplingParams(temperature=0)] * 3)
    jaxpr = jax.make_jaxpr(speculative.verify)(
        logits_BTV, draft, sampling, None, jnp.zeros(3, jnp.int32)
    )

    def names(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from names(inner)

    branches = [
        [set(names(branch.jaxpr)) for branch in equation.params["branches"]]
        for equation in jaxpr.eqns
        if equation.primitive.name == "cond"
    ]
    by_exp = sorted("exp" in branch for branch in branches[-1])
    assert by_exp == [False, True]
    outside = {equation.primitive.name for equation in jaxpr.eqns}
    assert "exp" not in outside and "sort" not in outside


def test_a_row_does_not_depend_on_its_batch():
    rows = [SamplingParams(seed=i, temperature=0.5 + 0.2 * i) for i in range(8)]
    logits_BTV, draft, sampling = random_round(rows)
    num_B = jnp.arange(8, dtype=jnp.int32)
    together = verify(logits_BTV, draft, sampling, None, num_B)
    for b in range(8):
        one = jax.tree.map(lambda x, b=b: x[b : b + 1], (logits_BTV, draft, sampling, num_B))
        alone = verify(*one[:3], None, one[3])
        for found, expected in zip(together, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(found)[b : b + 1], expected)


def test_no_two_tests_share_a_number():
    key = key_of(300)
    later = key._replace(position_B=key.position_B + 1)
    numbers = [np.asarray(acceptance_uniforms(k, 4)).ravel() for k in (key, later)]
    assert len(np.unique(np.concatenate(numbers))) > 0.999 * 2400
