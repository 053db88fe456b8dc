"""What do an engine's metrics say of drafts? Flat names, as `Engine.metrics` has them."""

from collections.abc import Mapping

import numpy as np

from helios_jax.speculative import AcceptanceTelemetry


def acceptance_counts(telemetry: AcceptanceTelemetry) -> dict[str, int | float]:
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


def acceptance_means(sums: Mapping[str, float], num_draft_tokens: int) -> dict[str, float]:
    """acceptance_rate, in all and by position, and acceptance_length; 0 where nothing was drafted.

    Args:
      sums: of `acceptance_counts`, that do not wrap; none at first.
      num_draft_tokens: positions, J.
    """

    def ratio(part: str, whole: str) -> float:
        return sums.get(part, 0) / sums[whole] if sums.get(whole) else 0.0

    means = {
        f"acceptance_rate_at_{place}": ratio(
            f"num_accepted_tokens_at_{place}", f"num_draft_tokens_at_{place}"
        )
        for place in range(num_draft_tokens)
    }
    means["acceptance_rate"] = ratio("num_accepted_tokens", "num_draft_tokens")
    means["acceptance_length"] = (
        1 + ratio("num_accepted_tokens", "num_verifications")
        if sums.get("num_verifications")
        else 0.0
    )
    return means
