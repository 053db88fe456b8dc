"""What holds for every row after every step, whatever arrives? (on the toy engine of world.py)

A million steps: python -m pytest --slow -s tests/scheduler/test_properties.py -k million
Last run on 9443d9a, 29 November 2026, 2 cores AMD Zen 5, jax 0.12.0.1, passed in 84 s:
1,008,000 steps, 348,607 rows finished, 6,773 aborted, 184,020 preemptions, 25,487 migrations,
1,850,888 tokens found by prefix, 4,500 blocks copied, 88,804 requests refused; the longest stay was
128 steps, the bound is 508.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from helios_jax.scheduler.urgency import POLICIES
from tests.scheduler.world import CONFIG, R, init_world, step, with_limits

LANES = 48
# What a row alone takes at most, in calls: its tokens through chunks of what the other running rows
# leave, twice since it may migrate by starting again, a call per output token, a few to get in.
CHUNK = CONFIG.max_num_batched_tokens - CONFIG.max_num_seqs
SERVICE = 2 * (CONFIG.max_model_len // CHUNK + 2) + CONFIG.max_model_len
STARVATION_BOUND = int(CONFIG.aging_seconds) + R * SERVICE
DRAIN_STEPS = R * SERVICE


def mixed_urgency(lane):
    """One of the shipped policies, or one that changes its mind every step."""

    def urgency(state, now):
        key = jax.random.fold_in(jax.random.key(7), now.astype(jnp.int32))
        noise = jax.random.uniform(key, (R,))
        policies = [policy(state, now) for policy in POLICIES.values()]
        return jnp.stack([*policies, noise])[lane % (len(policies) + 1)]

    return urgency


@jax.jit
def histories(worlds, keys, rate):
    """Scans all lanes over keys [steps]; rate 0 lets nothing arrive and nobody be aborted."""

    def history(lane, world):
        def body(world, key):
            key = jax.random.fold_in(key, lane)
            abort_rate = jnp.where(rate > 0, 0.02, 0.0)
            return step(world, key, mixed_urgency(lane), rate, abort_rate)

        return jax.lax.scan(body, world, keys)

    worlds, reports = jax.vmap(history)(jnp.arange(LANES), worlds)
    # Summed here, since a million reports are not worth keeping.
    holds = {name: jnp.all(getattr(reports, name)) for name in reports._fields[:5]}
    counts = {name: jnp.sum(getattr(reports, name)) for name in reports._fields[6:]}
    return worlds, holds, counts, jnp.max(reports.max_age)


def start_worlds():
    """Tiny pools of 11 to 24 blocks, 1 to 4 slots, watermarks 0, 8, 14 and infinity."""
    lane = jnp.arange(LANES)
    num_blocks = jnp.asarray([24, 11, 14, 20])[lane % 4]
    kv_watermark = jnp.asarray([14, 0, 8, 2**31 - 1, 14, 14])[lane // 4 % 6]
    return jax.vmap(lambda *limits: with_limits(init_world(), *limits))(
        num_blocks, 1 + lane % 4, kv_watermark
    )


def check(num_calls: int, steps_per_call: int) -> None:
    worlds, totals, oldest = start_worlds(), {}, 0
    for call in range(num_calls):
        keys = jax.random.split(jax.random.key(call), steps_per_call)
        worlds, holds, counts, max_age = histories(worlds, keys, 0.3)
        assert all(map(bool, holds.values())), {k: bool(v) for k, v in holds.items()}
        totals = {name: totals.get(name, 0) + int(value) for name, value in counts.items()}
        oldest = max(oldest, int(max_age))
    counters = worlds.state.counters
    for field in dataclasses.fields(counters):
        totals[field.name] = int(jnp.sum(getattr(counters, field.name)))
    print(f"\n{LANES * num_calls * steps_per_call} steps: {totals}")
    print(f"longest stay {oldest} steps, bound {STARVATION_BOUND}")
    for name in (
        "num_preemptions", "num_migrations", "num_prefix_hit_tokens", "num_refused", "num_copies",
        "num_table_full", "num_aborted", "num_finished", "num_recomputed_tokens",
    ):  # fmt: skip
        assert totals[name] > 0, f"the histories showed no {name}"
    assert oldest <= STARVATION_BOUND
    drain_keys = jax.random.split(jax.random.key(99), steps_per_call)
    for _ in range(-(-DRAIN_STEPS // steps_per_call)):
        worlds, holds, _, _ = histories(worlds, drain_keys, 0.0)
        assert all(map(bool, holds.values()))
    assert not bool(jnp.any(worlds.state.is_waiting_R | worlds.state.is_running_R))
    assert bool(jnp.all(worlds.state.pool.num_free == worlds.state.pool.num_blocks))


def test_fifty_thousand_steps():
    check(num_calls=5, steps_per_call=210)


@pytest.mark.slow
def test_a_million_steps():
    check(num_calls=100, steps_per_call=210)
