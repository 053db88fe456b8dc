"""Do simulations side by side give what each gives alone?"""

import dataclasses
import math

import numpy as np
import pytest

from helios_jax.profiler import GPUS, Formats
from helios_jax.replay import (
    Drafts,
    Lane,
    RooflineSeconds,
    Trace,
    highest_load,
    is_lower_bound,
    simulate,
)
from helios_jax.replay import simulate_lanes as run_lanes
from helios_jax.replay.machine import MODELS, deal_targets
from helios_jax.scheduler import SchedulerConfig
from helios_jax.scheduler.urgency import deadline, fcfs

CONFIG = SchedulerConfig(
    num_blocks=80, max_num_rows=16, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64,
    kv_watermark=math.inf,
)  # fmt: skip


def seconds(num_tokens, kv_tokens, **counts):
    return 0.01 + 0.001 * num_tokens + 1e-6 * kv_tokens


def make(number, seed=0):
    rng = np.random.default_rng(seed)
    return Trace(
        np.sort(rng.uniform(0, 3, number)),
        rng.integers(5, 150, number).astype(np.int32),
        rng.integers(1, 40, number).astype(np.int32),
    )


def test_lanes_equal_single_runs():
    trace = make(24)
    lanes = [
        Lane("fcfs"), Lane("deadline", 2.0, seed=1), Lane("deadline", 2.0, num_blocks=30, seed=1),
        Lane("deadline", 2.0, seed=2),
    ]  # fmt: skip
    policies = {"fcfs": fcfs, "deadline": deadline}

    def deal(seed):
        return deal_targets(len(trace), [0.2, 2.0], 0.05, seed)

    together = run_lanes(trace, lanes, policies, deal, CONFIG, seconds)
    # The smallest pool, in a lane with room for the largest.
    config = dataclasses.replace(CONFIG, num_blocks=30)
    alone, outcome = simulate(trace.at_load(2.0), deal(1), config, seconds, deadline), together[2]
    assert int(outcome.num_events) == int(alone.num_events)
    np.testing.assert_allclose(outcome.finish_time_N, alone.finish_time_N, rtol=1e-5)
    assert int(outcome.counters.num_preemptions) == int(alone.counters.num_preemptions)
    assert int(together[2].counters.num_preemptions) > int(together[1].counters.num_preemptions)
    waits = [outcome.first_token_time_N.tolist() for outcome in together]
    assert waits[1] != waits[3] and max(waits[0]) > 2


def test_lanes_must_name_known_policies():
    with pytest.raises(ValueError, match="lane policy='x': must be one of fcfs"):
        run_lanes(make(2), [Lane("x")], {"fcfs": fcfs}, None, CONFIG, seconds)


def test_who_comes_during_a_step_waits_for_the_one_after_the_next():
    """Steps of a second, one token each: request 0 alone runs from 0; request 1 comes at 1.5."""
    trace = Trace(np.array([0.0, 1.5]), np.array([5, 5], np.int32), np.array([8, 1], np.int32))

    def a_second(num_tokens, **counts):
        return 1.0 + 0.0 * num_tokens

    targets = deal_targets(2, [1.0], 1.0)
    config = dataclasses.replace(CONFIG, max_rounds=1)
    outcome = simulate(trace, targets, config, a_second, fcfs, overlaps=True)
    # The step from 2 on is planned at 1, so it enters that from 3 on.
    assert float(outcome.first_token_time_N[1]) == 4.0


def test_speculation_costs_a_round_and_gives_its_expected_tokens():
    model, hardware = MODELS["llama-3-8b"], GPUS["h100"].hardware
    drafts = Drafts(0.75, 4, 0.02)
    assert drafts.tokens_per_round == pytest.approx((1 - 0.75**5) / 0.25)
    plain = RooflineSeconds(model, Formats(), hardware)
    drafting = dataclasses.replace(plain, drafts=drafts)
    one = dict(
        num_tokens=1, num_sampled=1, kv_tokens=1000, attended_tokens=1000, num_decode=1,
        decode_kv_tokens=1000, num_rounds=1,
    )  # fmt: skip
    # Bytes bound both passes: nearly the same bytes for five tokens as for one.
    gain = float(plain(**one) / drafting(**one))
    assert gain == pytest.approx(drafts.tokens_per_round / (1 + 4 * 0.02), rel=1e-3)
    with pytest.raises(ValueError, match="acceptance_rate=1"):
        Drafts(1)


def test_the_highest_load_is_interpolated_and_counts_up_to_the_first_miss():
    assert highest_load([1.0, 0.5, 2.0], [0.9, 1.0, 0.99], 0.95) == pytest.approx(0.75)
    assert highest_load([0.5, 1.0], [1.0, 0.97], 0.95) == 1.0
    assert highest_load([0.5], [0.2], 0.95) is None


def test_a_load_that_nobody_missed_is_a_lower_bound():
    assert is_lower_bound(highest_load([0.5, 1.0], [1.0, 0.97], 0.95), [0.5, 1.0])
    assert not is_lower_bound(highest_load([0.5, 1.0], [1.0, 0.9], 0.95), [0.5, 1.0])
    assert not is_lower_bound(None, [0.5])
