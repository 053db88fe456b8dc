"""What does a person read of the acceptance telemetry? Copies it to the host; not for a step."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from helios_jax.speculative.telemetry import (
    CONTEXT_EDGES,
    TEMPERATURE_EDGES,
    AcceptanceTelemetry,
    Window,
)

TEMPERATURE_NAMES = (
    "greedy",
    *(
        f"temperature < {edge:g}" if i == 0 else f"temperature {TEMPERATURE_EDGES[i]:g} to {edge:g}"
        for i, edge in enumerate(TEMPERATURE_EDGES[1:])
    ),
    f"temperature >= {TEMPERATURE_EDGES[-1]:g}",
)
CONTEXT_NAMES = (
    f"context < {CONTEXT_EDGES[0]}",
    *(f"context {a} to {b - 1}" for a, b in zip(CONTEXT_EDGES, CONTEXT_EDGES[1:], strict=False)),
    f"context >= {CONTEXT_EDGES[-1]}",
)
# Effects on the rate smaller than this are not named as what changed.
_NAMED_POINTS = 0.01


class Acceptance(NamedTuple):
    """acceptance_rate is None where nothing was proposed."""

    num_proposed: int
    num_accepted: int

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_proposed if self.num_proposed else None


@dataclass(frozen=True)
class DriftEvent:
    """A fall of the acceptance rate.

    Attributes:
      before, after: the slow and the fast average when it was noticed.
      changes: what made it, the largest effect first: a bucket in which fewer drafts are accepted,
        or a shift of the traffic to buckets where fewer are.
    """

    before: float
    after: float
    changes: tuple[str, ...]


@dataclass(frozen=True)
class AcceptanceReport:
    """Attributes:
    total: all drafts; by_position, by_temperature, by_context: parts of it, empty buckets left out.
    acceptance_length: tokens per verification, 1 + accepted / verifications; None without any.
    recent_rate, baseline_rate: the averages; None before anything was proposed.
    num_drifts: events since the start; drift: the latest.
    """

    total: Acceptance
    acceptance_length: float | None
    by_position: tuple[Acceptance, ...]
    by_temperature: dict[str, Acceptance]
    by_context: dict[str, Acceptance]
    recent_rate: float | None
    baseline_rate: float | None
    num_drifts: int
    drift: DriftEvent | None


def read_acceptance(telemetry: AcceptanceTelemetry) -> AcceptanceReport:
    """Waits for the device and reads everything."""
    t = jax.device_get(telemetry)
    total = Acceptance(int(t.proposed_J.sum()), int(t.accepted_J.sum()))
    num_verifications = int(t.verifications_EC.sum())

    def parts(axis: int, names: tuple[str, ...]) -> dict[str, Acceptance]:
        pairs = zip(names, t.proposed_EC.sum(axis), t.accepted_EC.sum(axis), strict=True)
        return {name: Acceptance(int(p), int(a)) for name, p, a in pairs if p}

    num_drifts = int(t.num_drifts)
    return AcceptanceReport(
        total=total,
        acceptance_length=1 + total.num_accepted / num_verifications if num_verifications else None,
        by_position=tuple(
            Acceptance(int(p), int(a)) for p, a in zip(t.proposed_J, t.accepted_J, strict=True)
        ),
        by_temperature=parts(1, TEMPERATURE_NAMES),
        by_context=parts(0, CONTEXT_NAMES),
        recent_rate=_rate(t.recent),
        baseline_rate=_rate(t.baseline),
        num_drifts=num_drifts,
        drift=drift_event(t.drift_baseline, t.drift_recent) if num_drifts else None,
    )


def drift_event(before: Window, after: Window) -> DriftEvent:
    """What lies between two averages.

    The difference of two rates is, over the buckets k of either axis, the sum of mean share times
    change of rate and of mean rate times change of share (Kitagawa, 1955).
    """
    effects: list[tuple[float, str]] = []
    for axis, names in ((1, TEMPERATURE_NAMES), (0, CONTEXT_NAMES)):
        share, rate = zip(
            *(_shares_and_rates(window, axis) for window in (before, after)), strict=True
        )
        rate = (
            np.where(np.isnan(rate[0]), rate[1], rate[0]),
            np.where(np.isnan(rate[1]), rate[0], rate[1]),
        )
        within = (share[0] + share[1]) / 2 * (rate[1] - rate[0])
        shift = float(np.nansum((share[1] - share[0]) * (rate[0] + rate[1]) / 2))
        for k in np.flatnonzero(within < -_NAMED_POINTS):
            effects.append(
                (within[k], f"{names[k]}: acceptance {rate[0][k]:.1%} -> {rate[1][k]:.1%}")
            )
        if shift < -_NAMED_POINTS:
            grown = int(np.argmax(share[1] - share[0]))
            effects.append(
                (shift, f"more of {names[grown]}: {share[0][grown]:.1%} -> {share[1][grown]:.1%}")
            )
    changes = tuple(
        f"{what} ({100 * effect:+.1f} points)"
        for effect, what in sorted(effects, key=lambda e: e[0])
    )
    rate_before, rate_after = _rate(before), _rate(after)
    assert rate_before is not None and rate_after is not None, "an event needs drafts"
    return DriftEvent(rate_before, rate_after, changes)


def _shares_and_rates(window: Window, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the buckets along one axis; the rate is NaN where nothing was proposed."""
    proposed = np.asarray(window.proposed_EC, np.float64).sum(axis)
    accepted = np.asarray(window.accepted_EC, np.float64).sum(axis)
    rate = np.full(proposed.shape, np.nan)
    np.divide(accepted, proposed, out=rate, where=proposed > 0)
    return proposed / max(proposed.sum(), 1e-9), rate


def _rate(window: Window) -> float | None:
    proposed = float(np.sum(window.proposed_EC))
    return float(np.sum(window.accepted_EC)) / proposed if proposed > 0 else None
