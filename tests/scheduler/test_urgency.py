"""Do the policies order rows as documented, and does the scheduler rank any policy's values?"""

import dataclasses
import math

import jax.numpy as jnp
import pytest

from helios_jax import scheduler
from helios_jax.scheduler import urgency
from helios_jax.scheduler.order import is_less_urgent, order_rows

CONFIG = scheduler.SchedulerConfig(
    num_blocks=64, max_num_rows=4, max_num_seqs=4, prefill_tokens_per_second=100.0
)


def table(**fields):
    state = scheduler.init_scheduler(CONFIG)
    values = {
        "status_R": [scheduler.WAITING] * 4,
        "num_prompt_R": [100] * 4,
        "num_known_R": [100] * 4,
    }
    values |= fields
    arrays = {k: jnp.asarray(v, getattr(state, k).dtype) for k, v in values.items()}
    return dataclasses.replace(state, **arrays)


def at(policy, state, now=0.0):
    return policy(state, jnp.float32(now)).tolist()


def test_deadline_is_minus_the_slack_to_the_first_token():
    state = table(
        arrival_time_R=[0, 0, 4, 0], ttft_target_R=[10, 20, 10, math.inf],
        num_prompt_R=[100, 100, 300, 100], num_known_R=[100, 100, 300, 100],
    )  # fmt: skip
    # 100 tokens are a second of prefill.
    *with_target, without = at(urgency.deadline, state, 5.0)
    assert with_target == [-4.0, -14.0, -6.0] and without < -3 * urgency.CLASS


def test_deadline_lets_short_requests_without_targets_pass_a_long_one():
    """For as long as it is patient: 80 s for 8,000 tokens."""
    state = table(
        arrival_time_R=[0, 2, 78, 80], ttft_target_R=[math.inf] * 4,
        num_prompt_R=[8000, 100, 100, 100], num_known_R=[8000, 100, 100, 100],
    )  # fmt: skip
    long, *shorts, too_late = at(urgency.deadline, state, 5.0)
    assert min(shorts) > long > too_late
    assert shorts[0] > shorts[1]


def test_deadline_follows_the_pace_of_later_tokens():
    state = table(
        num_known_R=[101, 111, 111, 101], num_computed_R=[100, 110, 110, 100],
        first_token_time_R=[10, 10, 10, 10], tpot_target_R=[1, 1, 0.1, math.inf],
    )  # fmt: skip
    values = at(urgency.deadline, state, 12.0)
    # Due at 11, 21 and 11.1: late, comfortably early, late; the last has no target. Starting again
    # would take a second.
    assert values[:3] == pytest.approx([2.01, -7.89, 2.01], abs=1e-5)
    assert values[3] < -3 * urgency.CLASS


def test_deadline_gives_up_a_first_token_that_must_be_late():
    state = table(arrival_time_R=[0, 9, 0, 0], ttft_target_R=[5, 5, 15, 5])
    late, fresh, due_soon, later = at(urgency.deadline, state, 10.0)
    assert (fresh, due_soon) == (-3.0, -4.0)
    assert late == later == 6.0 - 2 * urgency.CLASS  # behind all that can be in time
    # What has been computed may save it, and makes it no less urgent than before.
    state = table(num_computed_R=[0, 50, 0, 50], ttft_target_R=[0.6, 0.6, 3.0, 3.0])
    lost, saved, begins, goes_on = at(urgency.deadline, state)
    assert lost < -19_000 and saved == pytest.approx(0.4) and begins == goes_on == -2.0


def test_deadline_lets_nobody_push_out_rows_that_decode():
    state = table(
        status_R=[scheduler.RUNNING] * 3 + [scheduler.WAITING], num_known_R=[101, 101, 100, 100],
        num_computed_R=[100, 100, 0, 0], first_token_time_R=[10, 10, math.inf, math.inf],
        tpot_target_R=[2, math.inf, 2, 2], ttft_target_R=[5, 5, 13, 12.5], deadline_R=[20] * 4,
    )  # fmt: skip
    early, earlier, prefills, waits = at(urgency.deadline, state, 10.0)
    assert early > earlier > waits > prefills
    # Past its deadline even one of them may go.
    state = dataclasses.replace(state, deadline_R=jnp.asarray([9.0, 20.0, 20.0, 20.0]))
    late, *_, waits = at(urgency.deadline, state, 10.0)
    assert late < waits


def test_deadline_puts_off_the_longest_when_not_all_can_be_in_time():
    """Prefills of 1, 3, 2 and 1 s."""
    lengths = [100, 300, 200, 100]
    state = table(num_prompt_R=lengths, num_known_R=lengths, ttft_target_R=[4, 4.5, 5, 8.5])
    put_off = [value < -9000 for value in at(urgency.deadline, state)]
    assert put_off == [False, True, False, False]  # 1 + 3 + 2 s are more than 5
    enough = dataclasses.replace(state, ttft_target_R=jnp.asarray([4.0, 6.0, 6.0, 8.5]))
    assert all(value > -9 for value in at(urgency.deadline, enough))
    # Rows that run, have begun or are lost take no time from the others.
    begun = dataclasses.replace(state, num_known_R=state.num_known_R + jnp.asarray([0, 1, 0, 0]))
    assert all(value > -9 for value in at(urgency.deadline, begun)[2:])


def test_deadline_heeds_the_deadline_of_the_whole_answer():
    state = table(deadline_R=[30, 3, math.inf, math.inf], ttft_target_R=[10, 10, 10, math.inf])
    *with_one, without = at(urgency.deadline, state)
    assert with_one == [-9.0, -2.0, -9.0] and without < -3 * urgency.CLASS
    # Past it a row is in nobody's way, even one that has long begun.
    state = table(
        deadline_R=[30] * 4, num_known_R=[101] * 4, num_computed_R=[100] * 4,
        first_token_time_R=[9] * 4, tpot_target_R=[1] * 4,
    )  # fmt: skip
    assert at(urgency.deadline, state, 29.0)[0] > 0 > -19_000 > at(urgency.deadline, state, 31.0)[0]


def test_priority_fcfs_and_shortest():
    state = table(
        priority_R=[1, -1, 0, 1], max_known_R=[150, 120, 300, 101], num_computed_R=[40, 0, 0, 0]
    )
    assert at(urgency.priority, state) == [-1.0, 1.0, 0.0, -1.0]
    assert at(urgency.fcfs, state) == [0.0] * 4
    assert at(urgency.shortest, state) == [-110.0, -120.0, -300.0, -101.0]


def test_of_rows_that_waited_long_the_oldest_goes_first():
    state = table(is_aged_R=[True, True, False, True], sequence_R=[3, 1, 0, 2])
    order = order_rows(state, jnp.asarray([1.0, 0.0, 2.0, 3.0]))
    assert order.rows_R.tolist() == [1, 3, 2, 0] and order.level_R.tolist() == [1, 0, 1, 1]
    # One that was skipped or preempted too often comes next.
    state = dataclasses.replace(state, num_skips_R=jnp.asarray([99, 0, 0, 0]))
    assert order_rows(state, jnp.zeros(4)).rows_R.tolist() == [1, 0, 2, 3]


def test_order_puts_aged_rows_first_and_dead_ones_last():
    state = table(
        status_R=[scheduler.WAITING, scheduler.RUNNING, scheduler.FINISHED, scheduler.WAITING],
        is_aged_R=[False, True, True, False], sequence_R=[0, 3, 2, 1],
    )  # fmt: skip
    order = order_rows(state, jnp.asarray([1.0, -9.0, 99.0, 2.0]))
    assert order.rows_R.tolist() == [1, 3, 0, 2]
    assert order.rank_R.tolist() == [2, 0, 3, 1]
    assert is_less_urgent(order, jnp.int32(3)).tolist() == [True, False, True, False]


def test_ties_go_to_the_earlier_and_preempt_nobody():
    state = table(sequence_R=[3, 1, 2, 0])
    order = order_rows(state, jnp.asarray([0.0, 0.0, jnp.nan, -jnp.inf]))
    assert order.rows_R.tolist() == [1, 0, 3, 2]  # NaN counts as -inf
    assert is_less_urgent(order, jnp.int32(1)).tolist() == [False, False, True, True]
    assert not bool(is_less_urgent(order, jnp.int32(3))[2])


def test_among_aged_rows_the_earlier_may_preempt_the_later():
    state = table(is_aged_R=[True] * 4, num_preemptions_R=[99] * 4, sequence_R=[2, 0, 1, 3])
    order = order_rows(state, jnp.asarray([9.0, 0.0, 5.0, 1.0]))
    assert order.rows_R.tolist() == [1, 2, 0, 3]
    assert is_less_urgent(order, jnp.int32(2)).tolist() == [True, False, False, True]
