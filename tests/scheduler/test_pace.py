"""Is the rate of prefill the configured one, until it is measured while requests wait?"""

import jax.numpy as jnp
import pytest

from helios_jax.scheduler import pace


def after(steps, seconds=0.1, tokens=100, waiting=3, state=None, start=0.0):
    """So many steps, each begun when the last has ended."""
    state = pace.init_pace() if state is None else state
    for i in range(steps + 1):
        now = jnp.float32(start + i * seconds)
        state = pace.begin(pace.observe(state, now), now, jnp.int32(tokens), jnp.int32(waiting))
    return state


def rate(state, configured=5000.0):
    return 1.0 / float(pace.seconds_per_token(state, jnp.float32(configured)))


def test_the_configured_rate_holds_while_nobody_waits():
    assert rate(pace.init_pace()) == pytest.approx(5000)
    assert rate(after(50, waiting=0)) == pytest.approx(5000)


def test_what_was_measured_replaces_it_and_is_forgotten():
    state = after(400)
    assert rate(state) == pytest.approx(1000, rel=0.02)  # 100 tokens in 0.1 s
    assert 1000 < rate(after(20)) < 2500  # two seconds in
    idle = after(400, waiting=0, state=state, start=40.1)
    assert rate(idle) == pytest.approx(5000, rel=0.02)


def test_an_unknown_rate_is_measured_too():
    assert float(pace.seconds_per_token(pace.init_pace(), jnp.float32(jnp.inf))) == 0.0
    assert rate(after(400), jnp.inf) == pytest.approx(1000, rel=0.02)


def test_steps_without_tokens_are_slow_not_undefined():
    assert 0 < rate(after(400, tokens=0)) < 1
