"""The draft-length controller: its formula, its memory, its way back from 0."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.speculative import AdaptiveLength, CostTable, assumed_costs, expected_tokens

J = 6


@partial(jax.jit, static_argnums=0)
def many_rounds(controller, state, num_draft_B, num_accepted_B, times):
    live_B = jnp.ones(len(num_draft_B), bool)
    return jax.lax.fori_loop(
        0, times, lambda _, s: controller.update(s, num_draft_B, num_accepted_B, live_B), state
    )


def rounds(controller, state, num_draft, num_accepted, times=1):
    return many_rounds(
        controller, state, np.array(num_draft, np.int32), np.array(num_accepted, np.int32), times
    )


choose = jax.jit(AdaptiveLength.choose, static_argnums=(0, 3, 4))


def test_expected_tokens_is_the_papers_formula():
    a_B = np.array([0.0, 0.3, 0.78, 0.999], np.float32)
    g = np.arange(J + 1)
    formula = (1 - a_B[:, None] ** (g + 1)) / (1 - a_B[:, None])
    np.testing.assert_allclose(expected_tokens(jnp.asarray(a_B), J), formula, rtol=1e-3)
    np.testing.assert_allclose(expected_tokens(jnp.ones(1), J)[0], g + 1)
    # What the formula gives for a = 0.78 and 4 draft tokens at cost 0.1.
    assert np.isclose(expected_tokens(jnp.full(1, 0.78), 4)[0, 4] / 1.4, 2.31, atol=0.01)


def test_it_chooses_the_best_length_by_the_measured_costs():
    """Against a search in plain numbers, over acceptances and costs."""
    controller = AdaptiveLength(decay=0.999, probe_interval=0)
    rng = np.random.default_rng(0)
    found = set()
    for _ in range(30):
        draft = float(rng.uniform(0, 0.5))
        verify_T = 1 + np.cumsum(rng.uniform(0, 0.3, J + 1)).astype(np.float32)
        state = controller.init_state(1)
        accepted = int(rng.integers(0, 7))
        state = rounds(controller, state, [6], [accepted], 200)
        a = float(controller.acceptance(state)[0])
        tested = accepted + (accepted < 6)
        assert abs(a - accepted / tested) < 0.02
        rates = [sum(a**i for i in range(g + 1)) / (verify_T[g] + g * draft) for g in range(J + 1)]
        costs = CostTable(jnp.float32(draft), jnp.asarray(verify_T))
        chosen = int(choose(controller, costs, state, 1, J)[0])
        assert np.isclose(rates[chosen], max(rates), rtol=1e-5)
        found.add(chosen)
    assert len(found) >= 4, "the cases tell lengths apart"


def test_a_row_that_was_turned_off_probes_and_comes_back():
    controller = AdaptiveLength(probe_interval=5, probe_tokens=2)
    costs = assumed_costs(J, 0.2)
    state = rounds(controller, controller.init_state(1), [J], [0], 40)
    lengths = []
    for _ in range(12):
        length = int(choose(controller, costs, state, 1, J)[0])
        lengths.append(length)
        state = rounds(controller, state, [length], [0])
    assert lengths == [0] * 5 + [2] + [0] * 5 + [2]
    for _ in range(100):
        length = int(choose(controller, costs, state, 1, J)[0])
        state = rounds(controller, state, [length], [length])
    assert length == J


def test_rows_learn_on_their_own_and_idle_rows_forget_nothing():
    controller = AdaptiveLength()
    state = rounds(controller, controller.init_state(3), [4, 4, 0], [4, 0, 0], 30)
    a_B = np.asarray(controller.acceptance(state))
    assert a_B[0] > 0.97 and a_B[1] < 0.05 and np.isclose(a_B[2], 0.7)
    assert state.num_idle_B.tolist() == [0, 0, 30]
    frozen = controller.update(
        state, jnp.array([4, 4, 4]), jnp.array([0, 4, 0]), jnp.zeros(3, bool)
    )
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(frozen), strict=True):
        np.testing.assert_array_equal(before, after)


def test_the_newest_tokens_weigh_most():
    """Sums as if every tested token had come on its own."""
    controller = AdaptiveLength(decay=0.8)
    state = controller.init_state(1)
    tested = accepted = 0.0
    for num_draft, num_accepted in ((4, 2), (3, 3), (0, 0), (5, 0), (2, 1)):
        state = rounds(controller, state, [num_draft], [num_accepted])
        for i in range(min(num_accepted + 1, num_draft)):
            tested = 0.8 * tested + 1
            accepted = 0.8 * accepted + (i < num_accepted)
    np.testing.assert_allclose(state.num_tested_B, [tested], rtol=1e-5)
    np.testing.assert_allclose(state.num_accepted_B, [accepted], rtol=1e-5)


def test_costs_and_lengths_are_values():
    controller = AdaptiveLength()
    state = controller.init_state(2)
    assert choose(controller, assumed_costs(J, 5.0), state, 2, J).tolist() == [0, 0]
    before = choose._cache_size()
    assert choose(controller, assumed_costs(J, 0.0), state, 2, J).tolist() == [J, J]
    assert choose._cache_size() == before


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prior_acceptance": 1.5}, "prior_acceptance=1.5"),
        ({"prior_tokens": 0}, "prior_tokens=0"),
        ({"decay": 1.0}, "decay=1.0"),
        ({"probe_interval": -1}, "probe_interval=-1"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveLength(**changes)
