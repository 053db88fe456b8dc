"""How fast is the engine beside the pure loop, static batches and transformers? A report."""

import datetime
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from helios_jax import hub
from helios_jax.bench import machine
from helios_jax.bench.engines import check_peer, peer_checkpoint, run_peer, run_worker
from helios_jax.bench.serving_workload import ServingWorkload
from helios_jax.bench.workload import Workload

# What is asked of each measure: the ratio (of a share: itself) and whether more or less is better.
BARS = {
    "single": (0.9, "at least"),
    "batch": (0.7, "at least"),
    "peer": (1.2, "at least"),
    "mix": (1.5, "at least"),
    "ttft": (2.0, "at most"),
    "prefix": (0.05, "at most"),
}
_PEER = "transformers"


def measure_serving(
    workload: ServingWorkload,
    against: str | None = None,
    peer_python: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Runs the parts of the workload in a process of their own, `repeats` times.

    Args:
      workload: what to run.
      against: None, or "transformers": the requests of the part "batch" in a process of its
        own, after each of Helios'; bfloat16, all in one batch.
      peer_python: the interpreter that has it; None for this one.
      progress: told what is about to run.

    Returns:
      schema 1: {date, machine, workload, versions, weights, serving: rows}. A row has what
      `serving_worker.measure` says, of all processes, and "median", "other_median", "ratio"
      (the median of the pairs' ratios), "cpu_ratio" (likewise of processor time, other / ours: what
      other work on the machine disturbs less), "bar", "is_met".

    Raises:
      ValueError: an unknown or missing peer, or a checkpoint that it cannot read; before anything
        is measured.
      RuntimeError: a process failed.
    """
    from checkpoints_conv import open_checkpoint

    interpreter = peer_python or sys.executable
    peer_job = None
    if against is not None:
        if against != _PEER:
            raise ValueError(f"against={against!r}: must be {_PEER}")
        if "batch" not in workload.parts:
            raise ValueError(
                f"against={against!r}: runs what the part 'batch' does, and part={workload.parts} "
                "lacks it"
            )
        check_peer(_PEER, interpreter)
        peer_job = {"model": str(peer_checkpoint(_PEER, workload.model)), "dtype": "bfloat16"}
    path = hub.resolve(workload.model)
    config = open_checkpoint(path).config
    job = workload.job(config.vocab_size, config.max_model_len) | {"model": str(path)}
    if peer_job is not None:
        peer_job |= _peer_batches(workload, config.vocab_size)
    ours, peers = [], []
    for repeat in range(workload.repeats):
        place = f"process {repeat + 1} of {workload.repeats}"
        progress(f"helios: {', '.join(workload.parts)}; {place}")
        command = [sys.executable, "-m", "helios_jax.bench.serving_worker"]
        ours.append(run_worker(command, job))
        if peer_job is not None:
            progress(f"{_PEER}, {place}")
            peers.append(run_peer(_PEER, interpreter, peer_job))
    return report(workload, ours, peers) | {"machine": machine.describe()}


def report(
    workload: ServingWorkload,
    ours: Sequence[Mapping[str, Any]],
    peers: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The report but for the machine, from what the workers returned, a process after the other."""
    rows = [_joined(parts) for parts in zip(*(each["rows"] for each in ours), strict=True)]
    versions = {"helios": ours[0]["versions"]}
    if peers:
        versions[_PEER] = peers[0]["versions"]
        rates = _peer_rates(workload, peers)
        beside = [row for row in rows if row["measure"] == "batch"]
        for row in beside:
            against = f"{_PEER}, {peers[0]['weights']}"
            row = {**row, "measure": "peer", "against": against, "others": rates}
            cpu_seconds = [seconds for peer in peers for seconds in peer["cpu_seconds"]]
            rows.append({**row, "other_cpu_seconds": cpu_seconds})
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workload": asdict(workload),
        "versions": versions,
        "weights": ours[0]["weights"],
        "serving": [row | judged(row) for row in rows],
    }


def _joined(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of the same measurement in several processes."""
    joined = dict(rows[0])
    for key in ("values", "others", "cpu_seconds", "other_cpu_seconds"):
        joined[key] = [value for row in rows for value in row[key]]
    metrics = rows[0]["metrics"]
    joined["metrics"] = {key: sum(row["metrics"][key] for row in rows) for key in metrics}
    joined["num_new_programs"] = sum(row["num_new_programs"] for row in rows)
    return joined


def judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's medians and ratios, and whether they reach its bar."""
    ours, others = row["values"], row["others"]
    ratio = _median_ratio(ours, others)
    value = statistics.median(ours) if ratio is None else ratio
    bar, side = BARS[row["measure"]]
    is_rate = row["unit"] == "tokens/s"
    cpu_ratio = _median_ratio(row["other_cpu_seconds"], row["cpu_seconds"]) if is_rate else None
    return {
        "median": statistics.median(ours),
        "other_median": statistics.median(others) if others else None,
        "ratio": ratio,
        "cpu_ratio": cpu_ratio,
        "bar": f"{side} {bar:g}",
        "is_met": value >= bar if side == "at least" else value <= bar,
    }


def _median_ratio(ours: Sequence[float], others: Sequence[float]) -> float | None:
    """Of the pairs; None where there are none to divide by."""
    if not ours or not others:
        return None
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def _peer_batches(workload: ServingWorkload, vocab_size: int) -> dict[str, Any]:
    """The peer's part of the work, as its worker wants it: a batch for each pair."""
    prompt, output = workload.batch_tokens
    batches = Workload(
        batch_sizes=(workload.batch_size,) * workload.pairs,
        prompt_tokens=1,
        context_tokens=prompt,
        # Its worker draws one more, the prefill's.
        output_tokens=output - 1,
        seed=workload.seed,
    )
    return batches.job(vocab_size) | {"num_threads": machine.num_threads()}


def _peer_rates(workload: ServingWorkload, peers: Sequence[Mapping[str, Any]]) -> list[float]:
    num_tokens = workload.batch_size * workload.batch_tokens[1]
    return [num_tokens / seconds for peer in peers for seconds in peer["total_seconds"]]
