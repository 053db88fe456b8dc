"""How fast are the engines beside each other? Processes in turn, medians, ratios."""

import datetime
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from helios_jax import hub
from helios_jax.bench import machine
from helios_jax.bench.engines import check_peer, peer_checkpoint, run_helios, run_peer
from helios_jax.bench.workload import Workload

HELIOS = "helios"


def compare(
    workload: Workload,
    against: Sequence[str] = (),
    peer_python: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures Helios and its peers; the report is what `--json` writes.

    Machines drift (clock, neighbours), so the engines take turns: one process of each, then the
    next of each. Every rate is the median over an engine's processes, a ratio that of two medians.

    Args:
      workload: what to run.
      against: names from `PEERS`.
      peer_python: the interpreter that has the peers; None for this one.
      progress: told what is about to run.

    Returns:
      schema 1: {date, machine, workload, engines: {name: {versions, weights, runs, medians}},
      ratios: {peer: {metric: Helios' median / the peer's}}}. Rates are tokens/s, by
      `Workload.metrics`.

    Raises:
      ValueError: an unknown or missing peer, or a checkpoint that it cannot read; before anything
        is measured.
      RuntimeError: a process failed.
    """
    from checkpoints_conv import open_checkpoint

    interpreter = peer_python or sys.executable
    against = list(dict.fromkeys(against))
    for name in against:
        check_peer(name, interpreter)
    path = hub.resolve(workload.model)
    checkpoints = {name: str(peer_checkpoint(name, workload.model)) for name in against}
    job = workload.job(open_checkpoint(path).config.vocab_size)
    job |= {"num_threads": machine.num_threads()}

    def measure(name: str) -> dict[str, Any]:
        if name == HELIOS:
            return run_helios(job | {"model": str(path), "dtype": workload.dtype})
        asked = {"model": checkpoints[name], "dtype": workload.peer_dtype}
        return run_peer(name, interpreter, job | asked)

    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in (HELIOS, *against)}
    for repeat in range(workload.repeats):
        for name, results in measured.items():
            progress(f"{name}, process {repeat + 1} of {workload.repeats}")
            results.append(measure(name))
    return report(workload, measured) | {"machine": machine.describe()}


def report(
    workload: Workload, measured: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """The report but for the machine, from what the workers returned, by engine."""
    engines = {}
    for name, results in measured.items():
        runs = [workload.rates(result) for result in results]
        engines[name] = {
            "versions": results[0]["versions"],
            "weights": results[0]["weights"],
            "runs": runs,
            "medians": {
                metric: statistics.median(run[metric] for run in runs)
                for metric in workload.metrics
            },
        }
    ours = engines[HELIOS]["medians"]
    ratios = {
        name: {metric: ours[metric] / engine["medians"][metric] for metric in ours}
        for name, engine in engines.items()
        if name != HELIOS
    }
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "workload": asdict(workload),
        "engines": engines,
        "ratios": ratios,
    }
