"""In which order are rows served, and who may push out whom?"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from helios_jax.scheduler.state import NO_LIMIT, SchedulerState


class Order(NamedTuple):
    """The order of one call of `schedule`.

    rows_R: int32, rows from the most to the least urgent; those that neither wait nor run last.
    rank_R: int32, its inverse: place of each row.
    level_R: int32; 0 for rows that go first whatever the policy says, 1 for other live ones, 2 for
      the rest.
    urgency_R: float32, what the policy said; NaN is -inf, 0 but for level 1.
    sequence_R: int32, which breaks ties.
    """

    rows_R: Array
    rank_R: Array
    level_R: Array
    urgency_R: Array
    sequence_R: Array


def age_rows(state: SchedulerState, now: Array) -> SchedulerState:
    """Marks rows that waited, were passed over or were preempted too often; the mark stays."""
    has_waited_R = now - state.waiting_since_R >= state.limits.aging_seconds
    is_aged_R = state.is_aged_R | (state.is_waiting_R & has_waited_R)
    return dataclasses.replace(state, is_aged_R=is_aged_R | _is_capped(state))


def _is_capped(state: SchedulerState) -> Array:
    is_skipped_R = state.num_skips_R >= state.limits.max_skips
    return is_skipped_R | (state.num_preemptions_R >= state.limits.max_preemptions)


def order_rows(state: SchedulerState, urgency_R: Array) -> Order:
    """Rows that must go first by order of submission, then by urgency and order of submission.

    Of those that have only waited long the oldest goes first and the others keep the place that the
    policy gives them: when there is more to do than can be done all of them have waited long, and
    serving them by age would be no policy at all.
    """
    is_live_R = state.is_waiting_R | state.is_running_R
    is_aged_R = is_live_R & state.is_aged_R
    oldest = jnp.min(jnp.where(is_aged_R, state.sequence_R, NO_LIMIT))
    is_first_R = is_aged_R & (_is_capped(state) | (state.sequence_R == oldest))
    level_R = jnp.where(is_live_R, jnp.where(is_first_R, 0, 1), 2)
    urgency_R = jnp.where(jnp.isnan(urgency_R), -jnp.inf, urgency_R)
    urgency_R = jnp.where(level_R == 1, urgency_R, 0.0).astype(jnp.float32)
    row_R = jnp.arange(level_R.shape[0], dtype=jnp.int32)
    *_, rows_R = lax.sort((level_R, -urgency_R, state.sequence_R, row_R), num_keys=3)
    rank_R = jnp.zeros_like(row_R).at[rows_R].set(row_R, unique_indices=True)
    return Order(rows_R, rank_R, level_R, urgency_R, state.sequence_R)


def is_less_urgent(order: Order, row: Array) -> Array:
    """Which rows are strictly less urgent than `row`, bool [R]: those that it may preempt.

    Among those that go first the later submitted is the less urgent.
    """
    level, urgency = order.level_R[row], order.urgency_R[row]
    later_R = order.sequence_R > order.sequence_R[row]
    equal_R = order.level_R == level
    below_R = jnp.where(level == 0, later_R, order.urgency_R < urgency)
    return (order.level_R > level) | (equal_R & below_R)
