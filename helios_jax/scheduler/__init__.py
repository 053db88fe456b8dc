"""Which requests run, and with which blocks of the KV pool? Pure functions on one pytree.

A step is: `submit` what arrived and `abort` what was called off, `schedule`, carry out the plan
(`grow` before each decode round, `advance` after the chunk and after each round), `commit`.
"""

from helios_jax.scheduler.commit import advance, commit, grow, hash_outputs
from helios_jax.scheduler.policies import find_policy
from helios_jax.scheduler.requests import (
    ABSENT,
    ACCEPTED,
    NEVER_FITS,
    TABLE_FULL,
    Requests,
    abort,
    init_requests,
    is_wide_prompt,
    submit,
)
from helios_jax.scheduler.schedule import Plan, Urgency, schedule
from helios_jax.scheduler.state import (
    EMPTY,
    FINISHED,
    RUNNING,
    WAITING,
    Counters,
    Limits,
    SchedulerConfig,
    SchedulerState,
    check_invariants,
    init_limits,
    init_scheduler,
    rebase,
)

__all__ = [
    "ABSENT",
    "ACCEPTED",
    "Counters",
    "EMPTY",
    "FINISHED",
    "Limits",
    "NEVER_FITS",
    "Plan",
    "RUNNING",
    "Requests",
    "SchedulerConfig",
    "SchedulerState",
    "TABLE_FULL",
    "Urgency",
    "WAITING",
    "abort",
    "advance",
    "check_invariants",
    "commit",
    "find_policy",
    "grow",
    "hash_outputs",
    "init_limits",
    "init_requests",
    "init_scheduler",
    "is_wide_prompt",
    "rebase",
    "schedule",
    "submit",
]
