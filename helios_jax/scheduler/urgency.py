"""Who goes first? Policies: urgency(state, now) -> float32 [R], larger is more urgent.

Any function of that shape will do; values of empty rows are ignored, NaN counts as least urgent.
Equal urgency falls back to the order of submission. A waiting request preempts running ones only
if it is strictly more urgent, so that a policy whose values change with time (deadline) may
preempt where one whose order is fixed at submission does not. Aged rows go first whatever a policy
says.
"""

import jax.numpy as jnp
from jax import Array

from helios_jax.scheduler.state import SchedulerState

# More than any slack: clocks stay below it, see `SchedulerState`.
LOST_SECONDS = 1e4


def deadline(state: SchedulerState, now: Array) -> Array:
    """The less time is left until the next target is missed, the more urgent.

    The first token is due at arrival + ttft_target, later ones every tpot_target after it, all by
    `deadline`. What prefilling all known tokens takes is taken off, for running rows too: it is
    what preempting them would cost, and a row's own progress lets nobody overtake it.

    A row whose first token or last deadline cannot be met any more, even if it got all of the
    prefill from now on, comes behind all that can meet theirs: better one target missed than two.
    Such rows are served in what the others leave, or when they have aged.
    """
    rate = state.limits.prefill_tokens_per_second
    started_R = state.num_output_R > 0
    first_due_R = state.arrival_time_R + state.ttft_target_R
    next_due_R = state.first_token_time_R + state.tpot_target_R * state.num_output_R
    due_R = jnp.minimum(jnp.where(started_R, next_due_R, first_due_R), state.deadline_R)
    end_R = now + state.num_pending_R / rate
    is_lost_R = (end_R > state.deadline_R) | (~started_R & (end_R > first_due_R))
    slack_R = due_R - now - state.num_known_R / rate
    return -jnp.where(is_lost_R, slack_R + LOST_SECONDS, slack_R)


def priority(state: SchedulerState, now: Array) -> Array:
    """The client's priority, lower first (vLLM's meaning); equal ones in order of submission."""
    return -state.priority_R


def fcfs(state: SchedulerState, now: Array) -> Array:
    """First come, first served; nobody preempts for being more urgent."""
    return jnp.zeros(state.status_R.shape, jnp.float32)


def shortest(state: SchedulerState, now: Array) -> Array:
    """The fewest tokens still to compute first, as far as known: prefill left, then max_tokens."""
    return -(state.max_known_R - state.num_computed_R).astype(jnp.float32)


POLICIES = {"deadline": deadline, "priority": priority, "fcfs": fcfs, "shortest": shortest}
