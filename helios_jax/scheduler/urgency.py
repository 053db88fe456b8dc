"""Who goes first? Policies: urgency(state, now) -> float32 [R], larger is more urgent.

Any function of that shape will do; values of empty rows are ignored, NaN counts as least urgent.
Equal urgency falls back to the order of submission. A waiting request preempts running ones only
if it is strictly more urgent, so that a policy whose values change with time (deadline) may
preempt where one whose order is fixed at submission does not. Aged rows go first whatever a policy
says.
"""

import jax.numpy as jnp
from jax import Array

from helios_jax.scheduler.pace import seconds_per_token
from helios_jax.scheduler.state import SchedulerState

# Seconds between classes of urgency; slack counts up to it.
CLASS = 1e4
NUM_LIMITS = 16
# Seconds that a request without targets is taken to be patient for, per token to prefill.
PATIENCE = 0.01


def deadline(state: SchedulerState, now: Array) -> Array:
    """The less time is left until the next target is missed, the more urgent.

    The first token is due at arrival + ttft_target, later ones every tpot_target after it, all by
    `deadline`. What prefilling all known tokens takes is taken off, for running rows too: it is
    what preempting them would cost, and a row's own progress lets nobody overtake it. In order:

    - Rows that decode. Waiting ones do not push them out, however early they are; they are what is
      preempted for growth, those with most time left first. (Where memory is short, letting the
      comfortable ones be pushed out met 45% of the TTFT targets instead of 97%: the others then
      wait for their recomputation.)
    - Rows whose first token can be in time.
    - The longest of these when not all can be: that is how most are (Moore, Management Science
      15(1), 1968, who drops the longest job so far whenever a job would be late). How fast they are
      served is measured, see `pace`.
    - Rows whose first token or deadline cannot be met, even if they got all of the prefill from now
      on: better one target missed than two. They get what the others leave, or have aged.
    - Rows without any target: as if the first token were due `PATIENCE` per token after arrival, so
      that short requests pass a long one, for as long as it would not mind. (Five prompts of 64
      tokens behind one of 8,191 waited 62 times as long as alone when all were equal.) Where all
      seats are taken they preempt it, too, while it prefills, `max_preemptions` times at most; with
      prefix caching what it had computed is found again.
    """
    rate = state.limits.prefill_tokens_per_second
    is_live_R = state.is_waiting_R | state.is_running_R
    started_R = state.num_output_R > 0
    next_due_R = state.first_token_time_R + state.tpot_target_R * state.num_output_R
    first_due_R = jnp.minimum(state.arrival_time_R + state.ttft_target_R, state.deadline_R)
    due_R = jnp.where(started_R, jnp.minimum(next_due_R, state.deadline_R), first_due_R)
    slack_R = jnp.clip(due_R - now - state.num_known_R / rate, -CLASS, CLASS)

    end_R = now + state.num_pending_R / rate
    is_lost_R = end_R > jnp.where(started_R, state.deadline_R, first_due_R)
    decodes_R = state.is_running_R & started_R & ~is_lost_R
    is_open_R = is_live_R & ~started_R & ~is_lost_R
    work_R = jnp.where(is_open_R, state.num_pending_R * seconds_per_token(state.pace, rate), 0.0)
    left_R = jnp.where(is_open_R, first_due_R - now, jnp.inf)
    is_put_off_R = work_R > _longest_that_fits(work_R, left_R)
    urgency_R = -(slack_R + CLASS * (is_put_off_R + 2.0 * is_lost_R))
    implied_R = state.arrival_time_R + PATIENCE * state.num_known_R - now
    implied_R = 4.0 * CLASS + jnp.clip(implied_R, -CLASS, CLASS)
    urgency_R = jnp.where(jnp.isinf(due_R), -implied_R, urgency_R)
    return jnp.where(decodes_R, CLASS - jnp.minimum(slack_R, 0.5 * CLASS), urgency_R)


def _longest_that_fits(work_R: Array, left_R: Array) -> Array:
    """The largest limit so that all work up to it, done one after the other, is done in time.

    Args:
      work_R: seconds of work, 0 for none.
      left_R: seconds until it must be done.

    Returns:
      One of NUM_LIMITS limits from the longest work downward, each sqrt(2) below the last; 0 where
      none will do.
    """
    order_R = jnp.argsort(left_R)
    work_O, left_O = work_R[order_R], left_R[order_R]
    limit_C = jnp.max(work_O) * 2.0 ** (-0.5 * jnp.arange(NUM_LIMITS))
    work_CO = jnp.where(work_O <= limit_C[:, None], work_O, 0.0)
    in_time_CO = (jnp.cumsum(work_CO, axis=1) <= left_O) | (work_CO == 0)
    return jnp.max(jnp.where(jnp.all(in_time_CO, axis=1), limit_C, 0.0))


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
