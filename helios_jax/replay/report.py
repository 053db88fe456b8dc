"""What did serving a trace come to? Figures in the field names of vLLM's serving benchmark.

TTFT counts from a request's arrival time, so that a queue in front of the server is in it; ITL is
the time between two updates that brought tokens, as vLLM counts it, TPOT the mean time per token
after the first. A user's tokens/s is 1 / TPOT.
"""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from helios_jax.replay.serving import Run, Served

_TAIL = (95, 99)
_COUNTERS = (
    "num_steps", "num_rounds", "num_decode_rows", "num_prefill_tokens", "num_preemptions",
    "num_recomputed_tokens", "num_prefix_hit_tokens", "num_migrations", "num_draft_tokens",
    "num_accepted_tokens", "num_verifications",
)  # fmt: skip
_Goals = Mapping[str, float]


def summarize_run(
    run: Run,
    counters: Mapping[str, float],
    *,
    model_id: str,
    backend: str = "helios-engine",
    goodput: _Goals | None = None,
) -> dict[str, Any]:
    """The report of one run.

    Args:
      counters: what was added during the run, by the names of `Engine.metrics`.
      goodput: {"ttft": ms, "tpot": ms, "e2el": ms}, as vLLM's --goodput; None takes each request's
        own targets.

    Returns:
      vLLM's fields (date, backend, model_id, num_prompts, duration, completed, failed,
      total_input_tokens, total_output_tokens, request_throughput, request_goodput,
      output_throughput, total_token_throughput, {mean, median, std, p95, p99}_{ttft, tpot, itl,
      e2el}_ms, input_lens, output_lens, ttfts, errors), then ours: median_user_tokens_per_second,
      the counters, preemption_rate, acceptance_rate, max_send_lag_ms, is_interrupted.
    """
    done = [each for each in run.served if each.is_complete and each.num_tokens]
    num_output = sum(each.num_tokens for each in run.served)
    num_input = sum(len(each.request.prompt_token_ids) for each in done)
    times = [_times(each) for each in done]
    seconds = max(run.seconds, 1e-9)
    good = sum(_is_good(each, found, goodput) for each, found in zip(done, times, strict=True))
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": backend,
        "model_id": model_id,
        "num_prompts": len(run.served),
        "duration": run.seconds,
        "completed": len(done),
        "failed": sum(each.error is not None for each in run.served),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / seconds,
        "request_goodput": good / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
    }
    gaps = [gap for each in done for gap in _gaps(each)]
    for name in ("ttft", "tpot", "e2el"):
        values = [value for found in times if (value := found[name]) is not None]
        report |= statistics_ms(name, values)
    report |= statistics_ms("itl", gaps)
    rates = [1 / found["tpot"] for found in times if found["tpot"]]
    drafted = counters.get("num_draft_tokens", 0)
    lags = [
        each.sent_seconds - each.request.arrival_seconds
        for each in run.served
        if each.sent_seconds is not None
    ]
    return report | {
        "median_user_tokens_per_second": float(np.median(rates)) if rates else None,
        **{name: counters[name] for name in _COUNTERS if name in counters},
        "preemption_rate": counters.get("num_preemptions", 0) / max(len(run.served), 1),
        "acceptance_rate": counters.get("num_accepted_tokens", 0) / drafted if drafted else None,
        "max_send_lag_ms": 1e3 * max(lags, default=0.0),
        "is_interrupted": run.is_interrupted,
        "input_lens": [len(each.request.prompt_token_ids) for each in run.served],
        "output_lens": [each.num_tokens for each in run.served],
        "ttfts": [None if not each.token_seconds else _times(each)["ttft"] for each in run.served],
        "errors": [each.error or "" for each in run.served],
    }


def statistics_ms(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and tail of times, in ms, by vLLM's names."""
    values = 1e3 * np.asarray(seconds, float)
    found: dict[str, float | None] = {
        f"mean_{name}_ms": float(values.mean()) if len(values) else None,
        f"median_{name}_ms": float(np.median(values)) if len(values) else None,
        f"std_{name}_ms": float(values.std()) if len(values) else None,
    }
    for percentile in _TAIL:
        value = float(np.percentile(values, percentile)) if len(values) else None
        found[f"p{percentile}_{name}_ms"] = value
    return found


TABLE = {
    "completed": "done",
    "median_ttft_ms": "TTFT p50, ms",
    "p95_ttft_ms": "TTFT p95",
    "p99_ttft_ms": "TTFT p99",
    "median_tpot_ms": "TPOT p50, ms",
    "p95_tpot_ms": "TPOT p95",
    "p99_tpot_ms": "TPOT p99",
    "median_itl_ms": "ITL p50, ms",
    "p95_itl_ms": "ITL p95",
    "p99_itl_ms": "ITL p99",
    "median_user_tokens_per_second": "tok/s per user",
    "output_throughput": "tok/s in all",
    "request_goodput": "good req/s",
    "preemption_rate": "preempted",
    "num_recomputed_tokens": "recomputed",
    "acceptance_rate": "acceptance",
}


def cells(report: Mapping[str, Any]) -> list[str]:
    """A run's row in a table of `TABLE`'s columns."""

    def show(key: str, value: Any) -> str:
        if value is None:
            return "–"
        if key in ("preemption_rate", "acceptance_rate"):
            return f"{value:.1%}"
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

    return [show(key, report.get(key)) for key in TABLE]


def markdown(reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Runs by name as a Markdown table."""
    lines = ["| run | " + " | ".join(TABLE.values()) + " |", "|---" * (len(TABLE) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells(each)) + " |" for name, each in reports.items()]
    return "\n".join(lines) + "\n"


def _times(each: Served) -> dict[str, float | None]:
    """Seconds; tpot is None for a single token."""
    first, last = each.token_seconds[0][0], each.token_seconds[-1][0]
    later = each.num_tokens - each.token_seconds[0][1]
    arrival = each.request.arrival_seconds
    return {
        "ttft": first - arrival,
        "tpot": (last - first) / later if later else None,
        "e2el": last - arrival,
    }


def _gaps(each: Served) -> list[float]:
    return np.diff([seconds for seconds, _ in each.token_seconds]).tolist()


def _is_good(each: Served, found: Mapping[str, float | None], goodput: _Goals | None) -> bool:
    if goodput is None:
        request = each.request
        limits = {"ttft": request.ttft_target_seconds, "tpot": request.tpot_target_seconds}
    else:
        limits = {name: limit / 1e3 for name, limit in goodput.items()}
    return all(
        limit is None or (value := found[name]) is None or value <= limit
        for name, limit in limits.items()
    )
