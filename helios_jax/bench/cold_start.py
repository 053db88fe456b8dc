"""How long does a fresh process take to its first token, and how much memory to its last?"""

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helios_jax import hub
from helios_jax.bench import machine

# What a run is measured by, in the order in which a process passes them.
STAGES = ("import_seconds", "load_seconds", "first_token_seconds", "last_token_seconds")
MEMORY = "peak_memory_bytes"
CACHES = ("empty", "warm")


def measure_cold_start(
    model: str,
    dtype: str = "auto",
    prompt_tokens: int = 32,
    output_tokens: int = 64,
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Runs whole processes that stream an answer, with an empty compilation cache and a warm one.

    Each repetition has a compilation cache of its own: the first process fills it, the second finds
    it. The model is in the user's cache already.

    Returns:
      schema 1: {date, machine, cold_start: {model, dtype, weights, prompt_tokens, output_tokens,
      runs: {cache: [run]}, medians: {cache: run}}}; a run has `STAGES`, seconds since the process
      was started, and the peak resident memory.
    """
    if prompt_tokens < 1 or output_tokens < 2 or repeats < 1:
        raise ValueError(
            f"prompt_tokens={prompt_tokens}, output_tokens={output_tokens}, repeats={repeats}: "
            "must be at least 1, 2 and 1"
        )
    path = str(hub.resolve(model))
    job = {
        "model": path,
        "dtype": dtype,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "seed": seed,
    }
    runs: dict[str, list[dict[str, Any]]] = {cache: [] for cache in CACHES}
    weights = ""
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for cache in CACHES:
                progress(f"{cache} compilation cache, process {repeat + 1} of {repeats}")
                run = _run_process(job, Path(folder))
                weights = run.pop("weights")
                runs[cache].append(run)
    medians = {
        cache: {
            name: statistics.median(run[name] for run in runs[cache]) for name in (*STAGES, MEMORY)
        }
        for cache in CACHES
    }
    described = {**job, "model": model, "weights": weights}
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "cold_start": {**described, "runs": runs, "medians": medians},
    }


def _run_process(job: dict[str, Any], cache: Path) -> dict[str, Any]:
    """One run of `cold_start_worker`, whose programs are compiled into `cache`."""
    job_path, result_path, log_path = cache / "job.json", cache / "result.json", cache / "log"
    # The user's cache holds the model, which the job names by its path; ours the programs.
    environment = {
        name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
    } | {"HELIOS_CACHE": str(cache)}
    command = [sys.executable, "-m", "helios_jax.bench.cold_start_worker"]
    with open(log_path, "w+") as log:
        job_path.write_text(json.dumps(job | {"started": time.time()}))
        process = subprocess.Popen(
            [*command, str(job_path), str(result_path)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        # The usage of this child alone; RUSAGE_CHILDREN is the maximum over all of them.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            last_lines = "".join(log.readlines()[-15:])
            raise RuntimeError(
                f"{' '.join(command)} ended with code {process.returncode}:\n{last_lines}"
            )
    # In kilobytes, on macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return json.loads(result_path.read_text()) | {MEMORY: usage.ru_maxrss * unit}
