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


def deadline(state: SchedulerState, now: Array) -> Array:
    """The less time is left until the next target is missed, the more urgent.

    The next token is due at arrival + ttft_target, later ones every tpot_target after the first;
    work still to be prefilled is taken off. A first token that cannot come in time any more is as
    urgent as one of a request that has just arrived: better one target missed than two.
    """
    started_R = state.num_output_R > 0
    first_due_R = state.arrival_time_R + state.ttft_target_R
    next_due_R = state.first_token_time_R + state.tpot_target_R * state.num_output_R
    work_R = state.num_pending_R / state.limits.prefill_tokens_per_second
    slack_R = jnp.where(started_R, next_due_R, first_due_R) - now - work_R
    slack_R = jnp.where(~started_R & (slack_R < 0), state.ttft_target_R, slack_R)
    return -jnp.minimum(slack_R, state.deadline_R - now - work_R)


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
