"""What has an engine done since it started? Counts of the device, summed where they cannot wrap."""

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from helios_jax.engine.config import StepConfig
from helios_jax.engine.state import StepSummary, Telemetry
from helios_jax.outputs import Acceptance
from helios_jax.scheduler import Counters
from helios_jax.speculative import AcceptanceReport, AcceptanceTelemetry, read_acceptance

_COUNTS = [item.name for part in (Telemetry, Counters) for item in dataclasses.fields(part)]
_GAUGES = ("num_waiting", "num_running", "num_used_blocks")


class Metrics:
    """Told of each step's summary, asked from any thread."""

    def __init__(self):
        self._lock = threading.Lock()
        self._totals: dict[str, float] = dict.fromkeys(_COUNTS, 0)
        self.start_over()

    def start_over(self) -> None:
        """The device counts from 0 again; the sums stay."""
        with self._lock:
            self._last_counts: dict[str, int | float] = {}
            self._gauges: dict[str, int] = dict.fromkeys(_GAUGES, 0)
            self._acceptance: AcceptanceTelemetry | None = None

    def add(self, summary: StepSummary) -> None:
        """Takes in a step, read from the device."""
        counts: dict[str, int | float] = {}
        for part in (summary.telemetry, summary.counters):
            for item in dataclasses.fields(part):
                counts[item.name] = np.asarray(getattr(part, item.name)).item()
        if summary.acceptance is not None:
            counts |= _acceptance_counts(summary.acceptance)
        with self._lock:
            self._acceptance = summary.acceptance
            for name, count in counts.items():
                added = count - self._last_counts.get(name, 0)
                # Integers wrap on the device.
                added = added if isinstance(count, float) else added % 2**32
                self._totals[name] = self._totals.get(name, 0) + added
            self._last_counts = counts
            self._gauges = {name: int(getattr(summary, name)) for name in _GAUGES}

    def read(self, config: StepConfig) -> dict[str, float]:
        """See `Engine.metrics`."""
        with self._lock:
            metrics: dict[str, float] = {**self._totals, **self._gauges}
        metrics["num_blocks"] = config.num_blocks
        steps, rounds = metrics.get("num_steps", 0), metrics.get("num_rounds", 0)
        metrics["rounds_per_step"] = rounds / steps if steps else 0.0
        metrics["rows_per_round"] = metrics.get("num_decode_rows", 0) / rounds if rounds else 0.0
        if config.speculation is not None:
            metrics |= _acceptance_means(metrics, config.num_draft_tokens)
        return metrics

    def acceptance(self) -> AcceptanceReport | None:
        """See `Engine.acceptance`."""
        with self._lock:
            telemetry = self._acceptance
        return None if telemetry is None else read_acceptance(telemetry)

    def to_json(self) -> dict[str, Any]:
        """All but the acceptance, which the device's state holds."""
        with self._lock:
            return {
                "totals": dict(self._totals),
                "last_counts": self._last_counts,
                "gauges": self._gauges,
            }

    def resume(self, fields: Mapping[str, Any], acceptance: AcceptanceTelemetry | None) -> None:
        """Goes on from `to_json`'s fields and the device's `acceptance`."""
        with self._lock:
            self._totals, self._gauges = fields["totals"], fields["gauges"]
            self._last_counts = fields["last_counts"]
            self._acceptance = jax.device_get(acceptance)


def _acceptance_counts(telemetry: AcceptanceTelemetry) -> dict[str, int | float]:
    """Sums since the start, int32 that wraps; of arrays on the host."""
    proposed_J, accepted_J = np.asarray(telemetry.proposed_J), np.asarray(telemetry.accepted_J)
    counts: dict[str, int | float] = {
        "num_draft_tokens": int(proposed_J.sum(dtype=np.int64)),
        "num_accepted_tokens": int(accepted_J.sum(dtype=np.int64)),
        "num_verifications": int(np.asarray(telemetry.verifications_EC).sum(dtype=np.int64)),
        "num_drifts": int(telemetry.num_drifts),
    }
    for place, (proposed, accepted) in enumerate(zip(proposed_J, accepted_J, strict=True)):
        counts[f"num_draft_tokens_at_{place}"] = int(proposed)
        counts[f"num_accepted_tokens_at_{place}"] = int(accepted)
    return counts


def _acceptance_means(sums: Mapping[str, float], num_draft_tokens: int) -> dict[str, float]:
    """acceptance_rate, in all and by position, and acceptance_length; 0 where nothing was drafted.

    Args:
      sums: of `_acceptance_counts`, that do not wrap; none at first.
      num_draft_tokens: positions, J.
    """

    def so_far(place: str = "") -> Acceptance:
        names = (f"num_draft_tokens{place}", f"num_accepted_tokens{place}", "num_verifications")
        return Acceptance(*(int(sums.get(name, 0)) for name in names))

    means = {
        f"acceptance_rate_at_{place}": so_far(f"_at_{place}").acceptance_rate
        for place in range(num_draft_tokens)
    }
    means["acceptance_rate"] = so_far().acceptance_rate
    means["acceptance_length"] = so_far().acceptance_length
    return means
