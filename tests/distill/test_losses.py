"""Are the losses what their names say, and are their gradients right?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.distill.losses import LossWeights, Targets, losses, weighted_loss

NAMES = [field.name for field in dataclasses.fields(LossWeights)]
N, U, K = 5, 12, 4


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def teacher(seed: int, top: int | None, lacking: bool = False) -> tuple[np.ndarray, Targets]:
    """Log-probabilities of U tokens, and what is kept of them."""
    random = np.random.default_rng(seed)
    logp = np.log(random.dirichlet(np.ones(U), size=N))
    tokens = random.integers(U, size=N).astype(np.int32)
    if top is None:
        return logp, Targets(None, logp, np.full(N, -np.inf), tokens)  # pyright: ignore
    ids = np.argsort(-logp, axis=1)[:, :top].astype(np.int32)
    kept = np.take_along_axis(logp, ids, axis=1)
    tail = np.log1p(-np.exp(kept).sum(axis=1))
    if lacking:
        ids[:, 1] = -1
        tokens[0] = -1
    return logp, Targets(ids, kept, tail, tokens)  # pyright: ignore


def logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(N, U)) * 2


def test_of_the_whole_distribution_they_are_the_textbook_formulas(float64):
    logp, targets = teacher(0, None)
    logq = np.asarray(jax.nn.log_softmax(logits(1)))
    p, q = np.exp(logp), np.exp(logq)
    m = (p + q) / 2
    expected = {
        "forward_kl": (p * (logp - logq)).sum(1),
        "reverse_kl": (q * (logq - logp)).sum(1),
        "jsd": ((p * np.log(p / m)).sum(1) + (q * np.log(q / m)).sum(1)) / 2,
        "total_variation": np.abs(p - q).sum(1) / 2,
        "cross_entropy": -logq[np.arange(N), targets.tokens_N],
    }
    found = losses(jnp.asarray(logits(1)), targets)
    for name in NAMES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-9, err_msg=name)


def test_total_variation_is_what_is_not_accepted(float64):
    logp, targets = teacher(3, None)
    q = np.exp(np.asarray(jax.nn.log_softmax(logits(4))))
    found = losses(jnp.asarray(logits(4)), targets)["total_variation"]
    np.testing.assert_allclose(1 - found, np.minimum(np.exp(logp), q).sum(1), rtol=1e-9)


@pytest.mark.parametrize("top", [None, K])
@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_finite_differences(name, top, lacking, float64):
    _, targets = teacher(5, top, lacking and top is not None)
    x = logits(6)

    def total(x):
        return jnp.sum(losses(x, targets)[name])

    gradient = np.asarray(jax.grad(total)(jnp.asarray(x)))
    assert np.abs(gradient).max() > 1e-3
    step = 1e-6
    for place in [(0, 0), (1, 5), (2, 11), (4, 3), (3, int(np.argmax(np.abs(gradient[3]))))]:
        moved = np.zeros_like(x)
        moved[place] = step
        numeric = float(total(x + moved) - total(x - moved)) / (2 * step)
        assert numeric == pytest.approx(gradient[place], rel=1e-5, abs=1e-8), place


@pytest.mark.parametrize("top", [None, K])
def test_nothing_is_lost_where_the_student_is_the_teacher(top, float64):
    logp, targets = teacher(7, top)
    found = losses(jnp.asarray(logp) + 3, targets)
    for name in NAMES:
        if name != "cross_entropy":
            np.testing.assert_allclose(found[name], 0, atol=1e-12, err_msg=name)
    # And the student that differs loses.
    other = losses(jnp.asarray(logits(8)), targets)
    assert all(np.all(np.asarray(other[name]) > 1e-3) for name in NAMES)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "total_variation"])
def test_the_top_alone_never_tells_of_a_larger_distance(name, float64):
    _, whole = teacher(9, None)
    _, top = teacher(9, K)
    x = jnp.asarray(logits(10))
    assert np.all(losses(x, top)[name] <= losses(x, whole)[name] + 1e-9)


def test_a_student_of_fewer_tokens_is_best_at_the_teacher_on_those(float64):
    logp, targets = teacher(11, K, lacking=True)
    kept = np.exp(logp)
    for row, missing in enumerate(np.argsort(-logp, axis=1)[:, 1]):
        kept[row, missing] = 1e-300
    best = jnp.log(kept / kept.sum(1, keepdims=True))
    found = losses(best, targets)
    np.testing.assert_allclose(found["forward_kl"], 0, atol=1e-6)
    # What it lacks cannot be accepted.
    second = np.exp(np.sort(logp, axis=1)[:, -2])
    np.testing.assert_allclose(found["total_variation"], second, rtol=1e-6)


def test_weights_add_up_and_leave_out_what_does_not_count():
    _, targets = teacher(12, K)
    by_name = losses(jnp.asarray(logits(13), jnp.float32), targets)
    counts = jnp.asarray([1, 0, 1, 1, 0], jnp.float32)
    chosen = [0, 2, 3]
    weights = LossWeights(forward_kl=0.5, total_variation=2, cross_entropy=0.25)
    expected = (
        0.5 * by_name["forward_kl"][jnp.array(chosen)].mean()
        + 2 * by_name["total_variation"][jnp.array(chosen)].mean()
        + 0.25 * by_name["cross_entropy"][jnp.array(chosen)].mean()
    )
    np.testing.assert_allclose(weighted_loss(by_name, counts, weights), expected, rtol=1e-6)


def test_weights_that_want_nothing_are_refused():
    with pytest.raises(ValueError, match="one of them more"):
        LossWeights(forward_kl=0)
    with pytest.raises(ValueError, match="at least 0"):
        LossWeights(jsd=-1)
