"""How is a trace replayed on a checkpoint: what is sent, on what engine, warmed up how?"""

import contextlib
import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helios_jax import hub
from helios_jax.config import require
from helios_jax.engine import Engine
from helios_jax.engine.programs import forget
from helios_jax.engine.variants import MIN_CHUNK_TOKENS, MIN_CONTEXT_TOKENS
from helios_jax.llm import LLM, load_checkpoint
from helios_jax.replay import (
    Targets,
    Trace,
    deal_targets,
    make_prompts,
    read_text,
    read_trace,
    simulate,
    summarize,
)
from helios_jax.replay.calibration import costs_from_json, simulated
from helios_jax.replay.engine_client import EngineClient, StepRecord
from helios_jax.replay.prompts import DEFAULT_TEXT
from helios_jax.replay.report import summarize_run
from helios_jax.replay.serving import ReplayRequest, Run, State, serve
from helios_jax.replay.stream_client import StreamClient
from helios_jax.sampling import SamplingParams
from helios_jax.scheduler import SchedulerConfig, find_policy

Watch = Callable[[State], Any]
# Requests of the trace itself, at its pace, that are served before what is timed.
_REHEARSED = 12
# Tokens that rows decode in a warm-up.
_DECODED = 24


@dataclass(frozen=True)
class Traffic:
    """Which part of a trace is sent, and how.

    Attributes:
      trace: the file.
      start_seconds, window_seconds: of the recording; None is all of it.
      sample: share of the requests that is kept, drawn by `seed`.
      time_stretch: what times are multiplied with; below 1 they come faster.
      length_scale: what lengths are multiplied with.
      max_prompt, max_output: longest; None for half of the engine's max_model_len each.
      ttft_target_seconds: dealt at random, shorter ones with better priority; none without.
      tpot_target_seconds: of all, where there are targets.
      text: a file that prompts are cut from; None for `replay.prompts`' own.
      temperature: of the requests; 0 is greedy.
      seed: of the sample, the targets, the prompts and the sampling.
    """

    trace: str
    start_seconds: float = 0.0
    window_seconds: float | None = None
    sample: float = 1.0
    time_stretch: float = 1.0
    length_scale: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None
    ttft_target_seconds: tuple[float, ...] = ()
    tpot_target_seconds: float = 0.2
    text: str | None = None
    temperature: float = 0.0
    seed: int = 0

    def read(self, max_model_len: int) -> Trace:
        """The trace as it is sent to an engine of this length.

        Raises:
          ValueError: as the readers, or a length that the engine cannot serve.
        """
        half = max_model_len // 2
        prompt = half if self.max_prompt is None else self.max_prompt
        output = half if self.max_output is None else self.max_output
        require(
            prompt + output <= max_model_len,
            f"max_prompt={prompt} and max_output={output}: exceed max_model_len={max_model_len} "
            "together; lower them",
        )
        return read_trace(self.trace).cut(
            start_seconds=self.start_seconds,
            window_seconds=self.window_seconds,
            sample=self.sample,
            time_stretch=self.time_stretch,
            length_scale=self.length_scale,
            max_prompt=prompt,
            max_output=output,
            seed=self.seed,
        )

    def requests(self, trace: Trace, tokenizer: Any) -> list[ReplayRequest]:
        """What is sent of `read`'s trace."""
        prompts = make_prompts(trace, read_text(self.text), tokenizer, self.seed)
        ttft: list[float | None] = [None] * len(trace)
        priority = [0.0] * len(trace)
        if self.ttft_target_seconds:
            targets = deal_targets(
                len(trace), list(self.ttft_target_seconds), self.tpot_target_seconds, self.seed
            )
            ttft, priority = targets.ttft_seconds.tolist(), targets.priority.tolist()
        tpot = self.tpot_target_seconds if self.ttft_target_seconds else None
        return [
            ReplayRequest(
                arrival_seconds=float(trace.arrival_seconds[i]),
                prompt_token_ids=prompts[i],
                num_output=int(trace.num_output[i]),
                priority=priority[i],
                ttft_target_seconds=ttft[i],
                tpot_target_seconds=tpot,
                seed=self.seed + i,
                temperature=self.temperature,
            )
            for i in range(len(trace))
        ]

    def describe(self, trace: Trace) -> dict[str, Any]:
        """JSON: these options, and what they came to."""
        return dataclasses.asdict(self) | {
            "trace": Path(self.trace).name,
            "text": DEFAULT_TEXT if self.text is None else Path(self.text).name,
            "num_requests": len(trace),
            "seconds": float(trace.arrival_seconds[-1]),
            "prompt_tokens": int(trace.num_prompt.sum()),
            "output_tokens": int(trace.num_output.sum()),
            "median_prompt": statistics.median(trace.num_prompt.tolist()),
            "median_output": statistics.median(trace.num_output.tolist()),
        }


@dataclass(frozen=True)
class Serving:
    """On what it is served.

    Attributes:
      model: as for `helios_jax.load`.
      dtype, kv_cache_dtype, kv_watermark: likewise.
      num_kv_heads: heads are repeated (or pooled) to so many; None for the model's.
      speculative_config: who drafts; None for nobody.
      policy: of the scheduler, see `scheduler.find_policy`.
      max_model_len, max_num_seqs, max_num_batched_tokens, kv_cache_memory_bytes,
        enable_prefix_caching: see `EngineConfig`.
    """

    model: str
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_watermark: float = 4000
    num_kv_heads: int | None = None
    speculative_config: Mapping[str, Any] | None = None
    policy: str = "deadline"
    max_model_len: int = 1024
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True

    def load(self) -> LLM:
        """The model, ready to serve.

        Raises:
          ValueError: as `helios_jax.load`.
        """
        from checkpoints_conv import open_checkpoint
        from checkpoints_conv.gqa import checkpoint_with_kv_heads

        checkpoint = open_checkpoint(hub.resolve(self.model))
        if self.num_kv_heads is not None:
            checkpoint = checkpoint_with_kv_heads(checkpoint, self.num_kv_heads)
        return load_checkpoint(
            checkpoint,
            dtype=self.dtype,
            speculative_config=self.speculative_config,
            max_model_len=min(self.max_model_len, checkpoint.config.max_model_len),
            max_num_seqs=self.max_num_seqs,
            seed=0,
            urgency=find_policy(self.policy),
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_watermark=self.kv_watermark,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            enable_prefix_caching=self.enable_prefix_caching,
        )


@dataclass
class Replayed:
    """A run: its report, what each step took, and what was sent to which scheduler."""

    report: dict[str, Any]
    steps: list[StepRecord]
    trace: Trace
    requests: list[ReplayRequest]
    scheduler_config: SchedulerConfig


def replay(
    traffic: Traffic,
    serving: Serving,
    *,
    goodput: Mapping[str, float] | None = None,
    say: Callable[[str], Any] = lambda text: None,
    watch: Watch = lambda state: None,
) -> Replayed:
    """Loads, warms up and serves; the report is `replay.report.summarize_run`'s with `traffic`,
    `serving`, `weights` and `num_new_programs` (compiled while timed) added.

    Raises:
      ValueError: an option, model or trace that cannot be served.
    """
    # What may be wrong is found before the model is loaded.
    trace = traffic.read(serving.max_model_len)
    with loaded(serving, say) as llm:
        requests = traffic.requests(trace, llm.tokenizer)
        say(f"warming up for {len(requests)} requests")
        warm_up(llm.engine, requests)
        run, steps, counters, new_programs = serve_on(llm.engine, requests, watch)
        report = summarize_run(run, counters, model_id=serving.model, goodput=goodput)
        report |= {
            "num_new_programs": new_programs,
            "traffic": traffic.describe(trace),
            "serving": dataclasses.asdict(serving),
            "weights": llm.dtype_report,
        }
        return Replayed(report, steps, trace, requests, llm.engine.scheduler_config)


def replay_to_server(
    traffic: Traffic,
    address: str,
    model: str,
    *,
    max_model_len: int,
    goodput: Mapping[str, float] | None = None,
    say: Callable[[str], Any] = lambda text: None,
    watch: Watch = lambda state: None,
) -> dict[str, Any]:
    """`replay` on a running server (`helios serve`), which is as warm as it is.

    Args:
      address: host:port.
      model: what it serves; its tokenizer makes the prompts, and no weights are loaded.
      max_model_len: of the server; lengths are cut to it.

    Returns:
      `summarize_run`'s report with `traffic` and `server` added; what a server does not tell
      (preemptions, acceptance) is missing.
    """
    from checkpoints_conv import open_checkpoint
    from helios_jax.server.client import Client

    trace = traffic.read(max_model_len)
    tokenizer = open_checkpoint(hub.resolve(model)).tokenizer
    requests = traffic.requests(trace, tokenizer)
    say(f"replaying to {address}")
    with Client(address) as server:
        run = serve(requests, StreamClient(server.stream), watch)
    report = summarize_run(run, {}, model_id=model, backend="helios-server", goodput=goodput)
    return report | {"traffic": traffic.describe(trace), "server": address}


@contextlib.contextmanager
def loaded(serving: Serving, say: Callable[[str], Any] = lambda text: None) -> Iterator[LLM]:
    """A loaded model, whose programs are freed afterwards."""
    say(f"loading {serving.model}")
    try:
        yield serving.load()
    finally:
        forget()
        gc.collect()


def serve_on(
    engine: Engine, requests: Sequence[ReplayRequest], watch: Watch = lambda state: None
) -> tuple[Run, list[StepRecord], dict[str, float], int]:
    """An open loop on a warm engine: the run, its steps, what was counted and compiled in it."""
    before, num_programs = engine.metrics(), engine.num_programs
    client = EngineClient(engine)
    try:
        run = serve(requests, client, watch)
        after = client.counters()
    finally:
        client.close()
    counters = {name: value - before.get(name, 0) for name, value in after.items()}
    return run, client.steps, counters, engine.num_programs - num_programs


def warm_up(engine: Engine, requests: Sequence[ReplayRequest]) -> None:
    """Compiles what the requests will need, as far as it can be foreseen.

    Batches of every size in powers of two at every length in powers of four, chunks of every size
    alone and beside a row that decodes, then the first requests at their own pace; all of random
    tokens, which no later prompt finds.
    """
    rng = np.random.default_rng(0)
    temperature = requests[0].temperature
    longest = max(len(each.prompt_token_ids) + each.num_output for each in requests)
    longest_prompt = max(len(each.prompt_token_ids) for each in requests)
    limits = engine.scheduler_config
    chunks = [MIN_CHUNK_TOKENS]
    while chunks[-1] < min(longest_prompt, limits.max_num_batched_tokens):
        chunks.append(4 * chunks[-1])

    def submit(num_prompt: int, num_output: int) -> None:
        prompt = rng.integers(0, engine.model_config.vocab_size, num_prompt).tolist()
        params = SamplingParams(
            temperature=temperature, max_tokens=num_output, ignore_eos=True, seed=0
        )
        engine.submit(prompt, params)

    def drain() -> None:
        while engine.has_work:
            engine.step()

    context = MIN_CONTEXT_TOKENS
    while True:
        reach = min(context, longest)
        prompt = max(1, reach - _DECODED)
        num_rows = 1
        while num_rows < 2 * limits.max_num_seqs:
            rows = min(num_rows, limits.max_num_seqs)
            for number in range(rows):
                submit(prompt if number == 0 else 8, min(_DECODED, reach - 1))
            drain()
            num_rows *= 2
        for chunk in chunks:
            size = max(1, min(chunk, longest_prompt) - 1)
            submit(min(size, reach - 2), 2)
            drain()
            submit(prompt, min(_DECODED, reach - 1))
            # Until the first is decoding, so that the second's chunk runs beside it.
            rounds = engine.metrics()["num_rounds"]
            while engine.has_work and engine.metrics()["num_rounds"] == rounds:
                engine.step()
            submit(min(size, reach - 2), 2)
            drain()
        if reach == longest:
            break
        context *= 4
    rehearsed = [
        dataclasses.replace(
            each,
            prompt_token_ids=rng.integers(
                0, engine.model_config.vocab_size, len(each.prompt_token_ids)
            ).tolist(),
        )
        for each in requests[:_REHEARSED]
    ]
    serve_on(engine, rehearsed)


def predicted(replayed: Replayed, costs: Mapping[str, Any]) -> dict[str, Any]:
    """The same requests in simulated time, by costs of another run.

    Args:
      costs: what `replay.calibration.to_json` gave.

    Returns:
      `replay.summarize`'s figures, and "ratios" of the simulated median TTFT and output throughput
      to the measured ones; None where nothing was measured.
    """
    requests, report = replayed.requests, replayed.report

    def column(name: str) -> np.ndarray:
        values = [getattr(each, name) for each in requests]
        return np.array([np.inf if value is None else value for value in values])

    targets = Targets(
        column("ttft_target_seconds"), column("tpot_target_seconds"), column("priority")
    )
    outcome = simulate(
        replayed.trace, targets, simulated(replayed.scheduler_config), costs_from_json(costs),
        find_policy(report["serving"]["policy"]), overlaps=True,
    )  # fmt: skip
    found = summarize(replayed.trace, targets, outcome)
    pairs = {
        "median_ttft": (1e3 * found["ttft_p50_seconds"], report["median_ttft_ms"]),
        "output_throughput": (found["output_throughput"], report["output_throughput"]),
    }
    ratios = {name: ours / theirs if theirs else None for name, (ours, theirs) in pairs.items()}
    return found | {"ratios": ratios}
