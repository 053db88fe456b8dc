"""Does simulated time follow from the scheduler's decisions and the step times alone?"""

import dataclasses
import math

import numpy as np
import pytest

from helios_jax.replay import Targets, Trace, simulate, summarize
from helios_jax.scheduler import SchedulerConfig, urgency

CONFIG = SchedulerConfig(
    num_blocks=400, max_num_rows=16, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=100,
    kv_watermark=math.inf,
)  # fmt: skip


def one_second(num_tokens, **counts):
    """Every pass takes a second, however much it does."""
    return 1.0 + 0.0 * num_tokens


def seconds_per_token(num_tokens, **counts):
    return 0.01 * num_tokens


def make(arrivals, prompts, outputs, ttft=math.inf, priority=0):
    number = len(arrivals)
    trace = Trace(
        np.array(arrivals, np.float64), np.array(prompts, np.int32), np.array(outputs, np.int32)
    )
    targets = Targets(
        np.broadcast_to(ttft, number), np.full(number, math.inf), np.broadcast_to(priority, number)
    )
    return trace, targets


def test_one_request_takes_its_chunks_and_its_tokens():
    trace, targets = make([3.0], [250], [11])
    outcome = simulate(trace, targets, CONFIG, one_second, urgency.fcfs)
    # Three chunks, the last of which samples the first token, then ten rounds.
    assert float(outcome.first_token_time_N[0]) == 6.0
    assert float(outcome.finish_time_N[0]) == 16.0
    assert int(outcome.num_events) < 10  # rounds in which nothing changes are one event


def test_events_of_several_rounds_end_where_something_changes():
    """The times are those of one round an event."""
    trace, targets = make([0.0, 4.5, 5.0, 5.2, 30.0], [90, 250, 40, 60, 10], [20, 5, 9, 30, 2])
    times = []
    for max_rounds in (1, 8):
        config = dataclasses.replace(CONFIG, max_rounds=max_rounds)
        outcome = simulate(trace, targets, config, one_second, urgency.fcfs)
        times.append(np.asarray([outcome.first_token_time_N, outcome.finish_time_N]))
        assert np.isfinite(times[-1]).all()
    np.testing.assert_allclose(*times, rtol=1e-6)


def test_policies_change_who_waits():
    arrivals = [0.0] + [0.1] * 6
    trace, targets = make(arrivals, [100] * 7, [2] * 7, priority=[9, 5, 5, 5, 5, 5, 1])
    config = dataclasses.replace(CONFIG, max_num_seqs=1)
    by_arrival = simulate(trace, targets, config, seconds_per_token, urgency.fcfs)
    by_priority = simulate(trace, targets, config, seconds_per_token, urgency.priority)
    first, last = (
        np.asarray(by_arrival.first_token_time_N),
        np.asarray(by_priority.first_token_time_N),
    )
    assert (np.diff(first) > 0).all()
    assert last[6] < last[1] and last[6] < first[6]
    # The one that ran gave way and computed its prompt again.
    summary = summarize(trace, targets, by_priority)
    assert summary["preemption_rate"] == pytest.approx(1 / 7)
    assert summary["num_recomputed_tokens"] == 100


def test_more_requests_than_rows_wait_outside_and_are_all_served():
    trace, targets = make([0.0] * 60, [30] * 60, [4] * 60, ttft=1.0)
    outcome = simulate(trace, targets, CONFIG, seconds_per_token, urgency.deadline)
    summary = summarize(trace, targets, outcome)
    assert summary["num_served"] == 60 and int(outcome.counters.num_table_full) == 0
    assert 0 < summary["ttft_met"] < 1


def test_what_never_fits_is_refused_and_the_others_are_served():
    trace, targets = make([0.0, 0.0, 1.0], [50, 1023, 50], [4, 600, 4])
    outcome = simulate(trace, targets, CONFIG, one_second, urgency.fcfs)
    assert np.isfinite(np.asarray(outcome.finish_time_N)).tolist() == [True, False, True]
    assert int(outcome.counters.num_refused) == 1


def test_a_small_pool_preempts_and_everybody_finishes():
    config = dataclasses.replace(CONFIG, num_blocks=12)
    trace, targets = make([0.0] * 8, [60] * 8, [60] * 8)
    outcome = simulate(trace, targets, config, one_second, urgency.fcfs)
    assert np.isfinite(np.asarray(outcome.finish_time_N)).all()
    assert int(outcome.counters.num_preemptions) > 0


def test_targets_must_be_as_many_as_requests():
    trace, targets = make([0.0, 1.0], [5, 5], [5, 5])
    targets = dataclasses.replace(targets, priority=np.zeros(3))
    with pytest.raises(ValueError, match="targets.priority: has 3 entries"):
        simulate(trace, targets, CONFIG, one_second, urgency.fcfs)


def with_prefixes(trace, ids):
    return dataclasses.replace(trace, prefix_ids_NI=np.array(ids, np.int32), prefix_tokens=64)


def test_a_shared_prefix_is_found_and_not_computed_again():
    """Ids stand for 64 tokens, blocks for 16: of the second prompt 96 tokens are the first's."""
    ids = [[1, 2, -1], [1, 2, -1], [9, 2, -1], [1, 2, 3]]
    trace, targets = make([0.0, 50.0, 100.0, 150.0], [100, 100, 100, 140], [2] * 4)
    outcome = simulate(with_prefixes(trace, ids), targets, CONFIG, seconds_per_token, urgency.fcfs)
    ttft = np.asarray(outcome.first_token_time_N) - trace.arrival_seconds
    # The partial block of 100 is computed again; an id after another is other content.
    np.testing.assert_allclose(ttft, [1.0, 0.04, 1.0, 0.44], atol=1e-4)
    summary = summarize(trace, targets, outcome)
    assert summary["prefix_hit_rate"] == pytest.approx(2 * 96 / 440)


def test_wide_rows_share_wide_blocks_alone():
    """Past the watermark blocks hold 8 tokens; the narrow ones of a shorter prompt are no match."""
    config = dataclasses.replace(CONFIG, kv_watermark=110)
    trace, targets = make([0.0, 50.0, 100.0], [100, 128, 128], [2] * 3)
    trace = with_prefixes(trace, [[1, 2], [1, 2], [1, 2]])
    outcome = simulate(trace, targets, config, seconds_per_token, urgency.fcfs)
    ttft = np.asarray(outcome.first_token_time_N) - trace.arrival_seconds
    np.testing.assert_allclose(ttft, [1.0, 1.28, 0.01], atol=1e-4)


def test_blocks_must_divide_what_an_id_stands_for():
    trace, targets = make([0.0], [5], [5])
    trace = dataclasses.replace(with_prefixes(trace, [[1]]), prefix_tokens=40)
    with pytest.raises(ValueError, match="block of 16 tokens: must divide the 40 tokens"):
        simulate(trace, targets, CONFIG, one_second, urgency.fcfs)


def test_nobody_served_is_nothing_met():
    trace, targets = make([0.0], [1023], [600], ttft=1.0)
    outcome = simulate(trace, targets, CONFIG, one_second, urgency.fcfs)
    summary = summarize(trace, targets, outcome)
    assert summary["ttft_met"] == summary["num_served"] == 0 and summary["num_refused"] == 1
    assert summary["ttft_p95_seconds"] == math.inf
