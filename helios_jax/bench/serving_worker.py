"""Measures the engine in this process: `python -m helios_jax.bench.serving_worker JOB RESULT`.

Each measurement takes turns with what it is compared with. Everything has run once before at the
same sizes, so nothing compiles; how many programs were asked for all the same while a measurement
was timed is part of the result. Token ids are drawn anew for every run: the prefix cache finds
nothing but where that is what is measured.
"""

import inspect
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from helios_jax import SamplingParams, generate, hub
from helios_jax.bench.static_batch import run_batch
from helios_jax.engine import Engine, EngineConfig
from helios_jax.engine.row_progress import Row
from helios_jax.generation import GenerateOutput
from helios_jax.llm import use_compilation_cache
from helios_jax.model.compiler import COMPILER_OPTIONS
from helios_jax.model.forms import ServingForm, serving_form
from helios_jax.sampling import stack_sampling

# What a static batch holds at most, in rows and in padded prompt tokens.
STATIC_ROWS = 8
STATIC_TOKENS = 4096

Requests = list[tuple[list[int], SamplingParams]]


@dataclass
class Bench:
    """The model, the job, and where token ids come from."""

    form: ServingForm
    tokenizer: Any
    config: Any
    job: dict[str, Any]
    rng: np.random.Generator

    def engine(self, **options: Any) -> Engine:
        return Engine(
            self.form, self.tokenizer, model_config=self.config,
            config=EngineConfig(**options), seed=0,
        )  # fmt: skip

    def requests(self, sizes: Sequence[Sequence[int]]) -> Requests:
        """Random prompts of (prompt, output) tokens: greedy, going on after the end."""
        return [
            (
                self.rng.integers(0, self.config.vocab_size, num_prompt).tolist(),
                SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True, seed=0),
            )
            for num_prompt, num_output in sizes
        ]


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Runs the job's parts.

    Returns:
      {versions, weights, rows}; a row has "measure" (a key of `serving.BARS`), "name", "against",
      "unit" ("tokens/s", "seconds" or "share"), "values" and "others" (one per pair; `others` may
      be empty), "cpu_seconds" and "other_cpu_seconds" (of the process, likewise), "metrics" (of
      the engine, over its timed runs) and "num_new_programs".
    """
    use_compilation_cache()
    bench = load(job)
    parts = {"single": single, "batch": batch, "mix": mix, "fairness": fairness}
    rows = [row for part in job["parts"] for row in parts[part](bench)]
    return {
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "weights": bench.form.description,
        "rows": rows,
    }


def load(job: dict[str, Any]) -> Bench:
    """The job's model in the form that serves it."""
    from checkpoints_conv import open_checkpoint, read_params

    checkpoint = open_checkpoint(hub.resolve(job["model"]))
    config = checkpoint.config
    form = serving_form(config, read_params(checkpoint), job["dtype"])
    return Bench(form, checkpoint.tokenizer, config, job, np.random.default_rng(job["seed"]))


# The parts


def single(bench: Bench) -> list[dict[str, Any]]:
    """One request alone, beside the pure generate() compiled for its very size."""
    rows = []
    for row_limit in bench.job["row_limits"]:
        engine = bench.engine(max_num_seqs=row_limit)
        for size in bench.job["single_sizes"]:
            name = f"1 request of {size[0]}+{size[1]} tokens, max_num_seqs={row_limit}"
            runs = (partial(serve, engine), partial(run_pure, bench))
            rows.append(compare(bench, "single", name, "pure generate()", engine, [size], *runs))
    return rows


def batch(bench: Bench) -> list[dict[str, Any]]:
    """Requests of one size that come together, beside the pure generate() on all of them."""
    count, size = bench.job["batch_size"], bench.job["batch_tokens"]
    rows = []
    for kv_dtype in bench.job["kv_cache_dtypes"]:
        engine = bench.engine(max_num_seqs=count, kv_cache_dtype=kv_dtype)
        name = f"{count} requests of {size[0]}+{size[1]} tokens, {kv_dtype} KV"
        runs = (partial(serve, engine), partial(run_pure, bench))
        sizes = [size] * count
        rows.append(compare(bench, "batch", name, "pure generate()", engine, sizes, *runs))
    return rows


def mix(bench: Bench) -> list[dict[str, Any]]:
    """Requests of mixed lengths that come together, beside static batches of similar prompts."""
    engine = bench.engine(max_num_seqs=STATIC_ROWS)
    sizes = bench.job["mix"]
    name = f"{len(sizes)} requests of mixed lengths"
    runs = (partial(serve, engine), partial(run_static, bench))
    return [compare(bench, "mix", name, "static batches", engine, sizes, *runs)]


def fairness(bench: Bench) -> list[dict[str, Any]]:
    """What a long prompt does to those behind it, and what a known beginning saves."""
    job = bench.job
    engine = bench.engine(max_num_seqs=8)
    shorts, long = [job["short_tokens"]] * 5, (job["long_tokens"], 1)
    rows = []
    for target, wish in ((None, "no TTFT target"), (1.0, "TTFT target of 1 s")):

        def ttft(sizes, num_long: int, target=target) -> float:
            return first_token_seconds(engine, bench.requests(sizes), num_long, target)

        def alone(ttft=ttft) -> float:
            return ttft(shorts, 0)

        def behind(ttft=ttft) -> float:
            return ttft([long, *shorts], 1)

        name = f"TTFT of 5 requests behind a prompt of {long[0]} tokens, {wish}"
        rows.append(_pairs(bench, "ttft", name, "without it", "seconds", engine, behind, alone))
    name = f"second prompt with the same first {job['shared_tokens']} tokens: computed again"
    again = partial(share_computed_again, bench, engine)
    rows.append(_pairs(bench, "prefix", name, "", "share", engine, again, None))
    return rows


# Comparing


def compare(
    bench: Bench, measure: str, name: str, against: str, engine: Engine,
    sizes: Sequence[Sequence[int]], run: Callable[[Requests], int],
    other: Callable[[Requests], int],
) -> dict[str, Any]:  # fmt: skip
    """Output tokens per second of both on requests of these sizes, from submission to the last."""
    wanted = sum(num_output for _, num_output in sizes)

    def rate(run: Callable[[Requests], int]) -> float:
        requests = bench.requests(sizes)
        started = time.perf_counter()
        num_tokens = run(requests)
        seconds = time.perf_counter() - started
        assert num_tokens == wanted, f"{num_tokens} tokens of {wanted}"
        return num_tokens / seconds

    both = partial(rate, run), partial(rate, other)
    return _pairs(bench, measure, name, against, "tokens/s", engine, *both)


def _pairs(
    bench: Bench, measure: str, name: str, against: str, unit: str, engine: Engine,
    run: Callable[[], float], other: Callable[[], float] | None,
) -> dict[str, Any]:  # fmt: skip
    """A row of the result: each measurement once unread, then both in turn."""
    runs = [run] if other is None else [run, other]
    for each in runs:
        each()
    before, num_programs = engine.metrics(), engine.num_programs
    values: list[list[float]] = [[], []]
    seconds: list[list[float]] = [[], []]
    for _ in range(bench.job["pairs"]):
        for place, each in enumerate(runs):
            started = time.process_time()
            values[place].append(each())
            seconds[place].append(time.process_time() - started)
    after = engine.metrics()
    return {
        "measure": measure,
        "name": name,
        "against": against,
        "unit": unit,
        "values": values[0],
        "others": values[1],
        "cpu_seconds": seconds[0],
        "other_cpu_seconds": seconds[1],
        "metrics": {key: after[key] - before.get(key, 0) for key in _SUMS},
        "num_new_programs": engine.num_programs - num_programs,
    }


_SUMS = (
    "num_steps", "num_rounds", "num_decode_rows", "num_prefill_tokens", "num_output_tokens",
    "num_preemptions", "num_prefix_hit_tokens",
)  # fmt: skip


# What is run


def serve(engine: Engine, requests: Requests) -> int:
    """All requests submitted at once; the number of output tokens."""
    outputs = engine.generate(*zip(*requests, strict=True))
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def run_pure(bench: Bench, requests: Requests) -> int:
    """The pure generate() on requests of one size."""
    prompts = np.array([prompt for prompt, _ in requests], np.int32)
    params = [params for _, params in requests]
    sampling = stack_sampling(params, vocab_size=bench.config.vocab_size)
    output: GenerateOutput = _pure(jax.default_backend())(
        bench.form.model, bench.form.params, prompts,
        np.full(len(prompts), prompts.shape[1], np.int32), sampling,
        max_new_tokens=params[0].max_tokens, num_logprobs=None, cache_dtype=bench.form.cache_dtype,
    )  # fmt: skip
    return int((np.asarray(output.tokens) >= 0).sum())


_jitted: dict[str, Any] = {}


def _pure(platform: str) -> Any:
    """generate() with what the engine's programs are compiled with: on a CPU 1.4x faster."""
    if platform not in _jitted:
        options = COMPILER_OPTIONS.get(platform)
        static = ("model", "max_new_tokens", "num_logprobs", "cache_dtype")
        _jitted[platform] = jax.jit(
            inspect.unwrap(generate), static_argnames=static, compiler_options=options
        )
    return _jitted[platform]


def run_static(bench: Bench, requests: Requests) -> int:
    """Batches of similar prompt length, each run until its longest output ends."""
    num_tokens = 0
    for rows in static_batches(requests):
        *_, finished = run_batch(
            bench.form, bench.tokenizer, rows, max_model_len=bench.config.max_model_len,
            rng=bench.rng,
        )  # fmt: skip
        num_tokens += sum(len(row.token_ids) for row in finished)
    return num_tokens


def static_batches(requests: Requests) -> list[list[Row]]:
    """At most `STATIC_ROWS` requests each, and `STATIC_TOKENS` padded prompt tokens."""
    batches: list[list[Row]] = []
    for prompt, params in sorted(requests, key=lambda request: len(request[0])):
        last = batches[-1] if batches else []
        is_full = len(last) == STATIC_ROWS or (len(last) + 1) * len(prompt) > STATIC_TOKENS
        if not last or is_full:
            batches.append(last := [])
        last.append(Row(prompt, params))
    return batches


def first_token_seconds(
    engine: Engine, requests: Requests, num_unread: int, target_seconds: float | None
) -> float:
    """Mean TTFT of all but the first `num_unread` requests, which alone have no target."""
    outputs: list[Any] = [None] * len(requests)
    numbers = {}

    def note(update) -> None:
        if update.error is not None:
            raise update.error
        if update.stream.request_output is not None:
            outputs[numbers[update.request_id]] = update.stream.request_output

    for index, (prompt, params) in enumerate(requests):
        target = target_seconds if index >= num_unread else None
        number = engine.submit(prompt, params, on_update=note, ttft_target_seconds=target)
        numbers[number] = index
    while engine.has_work:
        engine.step()
    seconds = [output.timings.ttft_seconds for output in outputs[num_unread:]]
    return sum(seconds) / len(seconds)


def share_computed_again(bench: Bench, engine: Engine) -> float:
    """Of a beginning that the engine has just computed: how much it computes for the next one."""
    shared = bench.job["shared_tokens"]
    [(prompt, params)] = bench.requests([(shared, 1)])
    endings = bench.requests([(32, 1), (32, 1)])
    serve(engine, [(prompt + endings[0][0], params)])
    before = engine.metrics()["num_prefill_tokens"]
    serve(engine, [(prompt + endings[1][0], params)])
    return (engine.metrics()["num_prefill_tokens"] - before - len(endings[1][0])) / shared


if __name__ == "__main__":
    result = measure(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
