"""What does the gRPC server cost beside the engine in process? A report.

`num_streams` clients of one process stream from a server in another; the same requests are then
streamed from an engine in the clients' own process, in turn. Prompts are drawn anew every time, of
the same sizes, so that the prefix cache finds nothing. The server's process notes when its engine
handed each update over, on the clock that all processes of a machine share; what passes from then
until the client has the tokens is the added latency, of every token once.
"""

import asyncio
import datetime
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from helios_jax.bench import machine

# Of the in-process engine's rate, and seconds that a token may be late.
LEAST_RATIO, MOST_ADDED_SECONDS = 0.9, 0.002
_START_SECONDS = 600.0


@dataclass(frozen=True)
class ServerWorkload:
    """What is streamed.

    Attributes:
      model, dtype: as for `helios_jax.load`.
      num_streams: requests that are streamed side by side.
      prompt_tokens, output_tokens: of each.
      pairs: runs over gRPC, each beside one in process.
      seed: of the prompts.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    num_streams: int = 8
    prompt_tokens: int = 128
    output_tokens: int = 128
    pairs: int = 5
    seed: int = 0

    def __post_init__(self):
        for name in ("num_streams", "prompt_tokens", "output_tokens", "pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")


def measure_server(
    workload: ServerWorkload, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Runs the pairs.

    Returns:
      schema 1: {date, machine, workload, weights, pairs: [{"grpc", "engine"} in tokens/s],
      "ratio" (median of the pairs'), "added_seconds" (quantiles "p50", "p90", "p99" of all tokens),
      "is_met"}.

    Raises:
      RuntimeError: the server's process failed.
    """
    import helios_jax

    progress("loading both")
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes.jsonl")
        with _server(workload, notes) as address:
            llm = helios_jax.load(
                workload.model, dtype=workload.dtype, max_num_seqs=workload.num_streams
            )
            llm.engine.start()
            rng = random.Random(workload.seed)

            def prompts() -> list[list[int]]:
                size = llm.config.vocab_size
                return [
                    [rng.randrange(size) for _ in range(workload.prompt_tokens)]
                    for _ in range(workload.num_streams)
                ]

            pairs, received = [], []
            # The first pair compiles what the warm-up did not.
            for number in range(workload.pairs + 1):
                progress(f"pair {number} of {workload.pairs}")
                over_grpc, times = asyncio.run(_over_grpc(address, prompts(), workload))
                in_process = asyncio.run(_in_process(llm.engine, prompts(), workload))
                if number > 0:
                    pairs.append({"grpc": over_grpc, "engine": in_process})
                    received += times
            llm.engine.stop()
            weights = llm.dtype_report
        handed = [json.loads(line) for line in notes.read_text().splitlines()]
    added = _added_seconds(received, handed)
    ratio = statistics.median(pair["grpc"] / pair["engine"] for pair in pairs)
    cuts = statistics.quantiles(added, n=100)
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "workload": asdict(workload),
        "weights": weights,
        "pairs": pairs,
        "ratio": ratio,
        "added_seconds": {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]},
        "is_met": ratio >= LEAST_RATIO and cuts[49] < MOST_ADDED_SECONDS,
    }


def describe_server(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    lines = [
        f"{pair['grpc']:.1f} tokens/s over gRPC, {pair['engine']:.1f} in process, "
        f"{pair['grpc'] / pair['engine']:.2f}x"
        for pair in report["pairs"]
    ]
    added = {name: f"{1000 * value:.2f} ms" for name, value in report["added_seconds"].items()}
    return [
        *lines,
        f"median {report['ratio']:.2f}x (at least {LEAST_RATIO}); added per token: "
        + ", ".join(f"{name} {value}" for name, value in added.items())
        + f" (p50 below {1000 * MOST_ADDED_SECONDS:.0f} ms)"
        + ("" if report["is_met"] else ": MISSED"),
        report["weights"],
    ]


@contextmanager
def _server(workload: ServerWorkload, notes: Path) -> Iterator[str]:
    """The address of a server in a process of its own."""
    job = asdict(workload) | {"notes": str(notes)}
    log_path = notes.with_name("log")
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "helios_jax.bench.server_worker", json.dumps(job)],
            stdout=subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
    try:
        ends, fields = time.monotonic() + _START_SECONDS, {}
        while "ready" not in fields:
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the server did not start:\n{log_path.read_text()[-2000:]}")
            time.sleep(0.1)
            for line in log_path.read_text().splitlines(keepends=True):
                if line.startswith("{") and line.endswith("\n"):
                    entry = json.loads(line)
                    fields[entry["message"]] = entry
        yield f"127.0.0.1:{fields['listening']['port']}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _over_grpc(
    address: str, prompts: list[list[int]], workload: ServerWorkload
) -> tuple[float, list[dict[str, Any]]]:
    """Tokens per second, and when each token came: {"prompt", "tokens", "time"}."""
    from helios_jax.server.client import AsyncClient

    times: list[dict[str, Any]] = []

    async def one(client: AsyncClient, prompt: list[int]) -> int:
        number = 0
        async for part in client.stream(
            prompt, temperature=0, max_tokens=workload.output_tokens, ignore_eos=True
        ):
            if part.token_ids:
                number += len(part.token_ids)
                times.append({"prompt": prompt[:16], "tokens": number, "time": time.monotonic()})
        return number

    async with AsyncClient(address) as client:
        await client.server_info()
        started = time.perf_counter()
        numbers = await asyncio.gather(*(one(client, prompt) for prompt in prompts))
        seconds = time.perf_counter() - started
    return sum(numbers) / seconds, times


async def _in_process(engine: Any, prompts: list[list[int]], workload: ServerWorkload) -> float:
    """Tokens per second of the same, without a server."""
    from helios_jax import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=workload.output_tokens, ignore_eos=True)

    async def one(prompt: list[int]) -> int:
        return sum([len(part.token_ids) async for part in engine.async_stream(prompt, params)])

    started = time.perf_counter()
    numbers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return sum(numbers) / (time.perf_counter() - started)


def _added_seconds(received: list[dict[str, Any]], handed: list[dict[str, Any]]) -> list[float]:
    """For every token, from the engine's update to the client's having it."""
    by_prompt: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for update in handed:
        by_prompt.setdefault(tuple(update["prompt"]), []).append(update)
    added, seen = [], {}
    for part in received:
        prompt = tuple(part["prompt"])
        for token in range(seen.get(prompt, 0) + 1, part["tokens"] + 1):
            # The update that brought it, which may have waited for another to go out with.
            source = next(each for each in by_prompt[prompt] if each["tokens"] >= token)
            added.append(part["time"] - source["time"])
        seen[prompt] = part["tokens"]
    return added
