"""How well are drafts accepted, where, and has it fallen? Counts and averages on the device.

acceptance_rate = accepted / proposed; acceptance_length = 1 + accepted / verifications, a
verification being a row's round with at least one draft token. A draft goes stale when its target
or its traffic changes, so a fast average is held against a slow one: a fall of more than five
points is an event, kept with what both averages were, for `telemetry_report` to say what changed.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.sampling.params import GREEDY_TEMPERATURE

# Buckets lie between these: temperature below the first is greedy; context in known tokens.
TEMPERATURE_EDGES = (GREEDY_TEMPERATURE, 0.5, 0.9, 1.3)
CONTEXT_EDGES = (256, 1024, 4096, 16384)
# Proposed tokens that the two averages remember, and without which nothing is called a fall.
RECENT_TOKENS, BASELINE_TOKENS, LEAST_TOKENS = 1000.0, 20000.0, 400.0
DRIFT_POINTS, RECOVERED_POINTS = 0.05, 0.025


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """Exponentially weighted sums of draft tokens, float32.

    proposed_J, accepted_J: by position in the draft. proposed_EC, accepted_EC: by temperature
    bucket (E) and context bucket (C).
    """

    proposed_J: Array
    accepted_J: Array
    proposed_EC: Array
    accepted_EC: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AcceptanceTelemetry:
    """Sums since the start, int32 that wraps (read differences), and the two averages.

    Attributes:
      proposed_J, accepted_J: draft tokens by their position in the draft.
      proposed_EC, accepted_EC, verifications_EC: by temperature bucket and context bucket.
      num_row_rounds: rounds of rows, those without draft tokens included.
      recent, baseline: the fast and the slow average.
      is_drifting: bool, set at a fall, cleared when half of it is made up for.
      num_drifts: events so far.
      drift_recent, drift_baseline: the averages at the latest event.
    """

    proposed_J: Array
    accepted_J: Array
    proposed_EC: Array
    accepted_EC: Array
    verifications_EC: Array
    num_row_rounds: Array
    recent: Window
    baseline: Window
    is_drifting: Array
    num_drifts: Array
    drift_recent: Window
    drift_baseline: Window


def init_telemetry(max_num_draft_tokens: int) -> AcceptanceTelemetry:
    """Nothing seen yet."""
    J, EC = max_num_draft_tokens, (len(TEMPERATURE_EDGES) + 1, len(CONTEXT_EDGES) + 1)

    def window() -> Window:
        return Window(jnp.zeros(J), jnp.zeros(J), jnp.zeros(EC), jnp.zeros(EC))

    zero_J, zero_EC = jnp.zeros(J, jnp.int32), jnp.zeros(EC, jnp.int32)
    return AcceptanceTelemetry(
        zero_J, zero_J, zero_EC, zero_EC, zero_EC, jnp.int32(0), window(), window(),
        jnp.bool_(False), jnp.int32(0), window(), window(),
    )  # fmt: skip


def record_round(
    telemetry: AcceptanceTelemetry,
    temperature_B: Array,
    num_known_B: Array,
    num_draft_B: Array,
    num_accepted_B: Array,
    live_B: Array,
) -> AcceptanceTelemetry:
    """The telemetry after a round.

    Args:
      num_known_B: int32, tokens that rows had before.
      live_B: bool, rows that took part.
    """
    J = telemetry.proposed_J.shape[0]
    num_draft_B = jnp.where(live_B, num_draft_B, 0)
    num_accepted_B = jnp.where(live_B, num_accepted_B, 0)
    bucket_B = jnp.searchsorted(jnp.asarray(TEMPERATURE_EDGES), temperature_B, side="right")
    context_B = jnp.searchsorted(jnp.asarray(CONTEXT_EDGES), num_known_B, side="right")
    place_J = jnp.arange(J)

    def by_place(count_B: Array) -> Array:
        return jnp.sum(place_J < count_B[:, None], axis=0, dtype=jnp.int32)

    def by_bucket(count_B: Array) -> Array:
        shape = telemetry.proposed_EC.shape
        return jnp.zeros(shape, jnp.int32).at[bucket_B, context_B].add(count_B)

    new = (
        by_place(num_draft_B), by_place(num_accepted_B),
        by_bucket(num_draft_B), by_bucket(num_accepted_B),
    )  # fmt: skip
    total = jnp.sum(num_draft_B).astype(jnp.float32)

    def averaged(window: Window, tokens: float) -> Window:
        faded = jnp.exp(-total / tokens)
        olds = (window.proposed_J, window.accepted_J, window.proposed_EC, window.accepted_EC)
        return Window(*(faded * old + part for old, part in zip(olds, new, strict=True)))

    recent = averaged(telemetry.recent, RECENT_TOKENS)
    baseline = averaged(telemetry.baseline, BASELINE_TOKENS)
    fall = window_rate(baseline) - window_rate(recent)
    enough = jnp.sum(recent.proposed_EC) >= LEAST_TOKENS
    begins = enough & (fall > DRIFT_POINTS) & ~telemetry.is_drifting
    goes_on = telemetry.is_drifting & (fall > RECOVERED_POINTS)

    def at_event(now: Window, before: Window) -> Window:
        return jax.tree.map(lambda x, y: jnp.where(begins, x, y), now, before)

    return dataclasses.replace(
        telemetry,
        proposed_J=telemetry.proposed_J + new[0],
        accepted_J=telemetry.accepted_J + new[1],
        proposed_EC=telemetry.proposed_EC + new[2],
        accepted_EC=telemetry.accepted_EC + new[3],
        verifications_EC=telemetry.verifications_EC
        + by_bucket((num_draft_B > 0).astype(jnp.int32)),
        num_row_rounds=telemetry.num_row_rounds + jnp.sum(live_B, dtype=jnp.int32),
        recent=recent,
        baseline=baseline,
        is_drifting=begins | goes_on,
        num_drifts=telemetry.num_drifts + begins,
        drift_recent=at_event(recent, telemetry.drift_recent),
        drift_baseline=at_event(baseline, telemetry.drift_baseline),
    )


def window_rate(window: Window) -> Array:
    """acceptance_rate of an average; 0 before anything was proposed."""
    proposed = jnp.sum(window.proposed_EC)
    return jnp.sum(window.accepted_EC) / jnp.maximum(proposed, 1e-9)
