"""What does a decode step move and take, beside what it must? Bytes by part, measured and XLA's."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from helios_jax import hub
from helios_jax.bench.bandwidth import measure_read_bandwidth
from helios_jax.cache.paged import init_pools
from helios_jax.calibrate.record import circumstances
from helios_jax.config import ModelConfig, require
from helios_jax.engine.config import kv_dtype_of
from helios_jax.llm import use_compilation_cache
from helios_jax.model.compiler import COMPILER_OPTIONS
from helios_jax.model.forms import ServingForm, serving_form
from helios_jax.profiler import (
    GPUS,
    Formats,
    Weights,
    attention_flops,
    decode_bytes,
    kv_bytes_per_token,
    num_matmul_weights,
    weights_as_stored,
    weights_of_formats,
    weights_of_params,
)
from helios_jax.sampling import SamplingParams, sample_tokens, stack_sampling
from helios_jax.speculative import DraftModel, HiddenStateDraft, SpeculationParams, measure_costs
from helios_jax.speculative.draft_vocabulary import model_params
from helios_jax.speculative.passes import logits_of, private_rows, run_rows
from helios_jax.speculative_config import load_speculation
from pallas_kernels.kv_format import format_of

_TRACED_STEPS = 3


@dataclass(frozen=True)
class ProfileJob:
    """What to profile.

    Attributes:
      num_rows: that decode together.
      context_tokens: cached, of each.
      dtype, kv_cache_dtype: as for `helios_jax.load`.
      speculative_config: who drafts, see `helios_jax.speculative_config`; None for nobody.
      gpus: keys of `profiler.GPUS` to predict for.
      efficiency: share of their data sheets that is taken to be reached.
      repeats: steps that are timed.
      trace: a folder for a trace of `jax.profiler`, whose rows are named after the parts (scopes
        embed, attention, kv_write, kv_read, ffn, logits, sampler); None for none.
    """

    num_rows: int = 1
    context_tokens: int = 512
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    speculative_config: Mapping[str, Any] | None = None
    gpus: Sequence[str] = tuple(GPUS)
    efficiency: float = 1.0
    repeats: int = 20
    trace: str | None = None

    def __post_init__(self):
        for name, least in (("num_rows", 1), ("context_tokens", 1), ("repeats", 1)):
            value = getattr(self, name)
            require(value >= least, f"{name}={value}: must be at least {least}")
        for gpu in self.gpus:
            require(gpu in GPUS, f"gpu={gpu!r}: must be one of {', '.join(GPUS)}")
        require(0 < self.efficiency <= 1, f"efficiency={self.efficiency}: must be in (0, 1]")


def profile(
    model: str, job: ProfileJob, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Counts and measures a decode round of a checkpoint.

    Returns:
      schema 1: {circumstances, model, weights, num_rows, context_tokens, kv_cache_dtype,
      num_draft_tokens, bytes (by part), total_bytes, kv_share, bandwidth, measured, xla, gpus}; see
      `_measured`, `_of_xla` and `predict`.

    Raises:
      ValueError: an unknown model or option, or a context beyond the model's.
    """
    from checkpoints_conv import open_checkpoint, read_params

    use_compilation_cache()
    path = hub.resolve(model)
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    speculation, extra = None, SpeculationParams()
    num_draft_tokens, draft, stored_draft = 0, None, None
    if job.speculative_config is not None:
        speculation, extra = load_speculation(
            job.speculative_config, path, checkpoint.tokenizer, job.dtype
        )
        num_draft_tokens = speculation.max_num_draft_tokens
        if isinstance(speculation.proposer, DraftModel | HiddenStateDraft):
            small = speculation.proposer.model.config
            served = model_params(extra.proposer)
            draft = (small, weights_of_params(served, job.num_rows))
            on_disk = open_checkpoint(hub.resolve_draft(job.speculative_config["model"]))
            stored_draft = (small, weights_as_stored(read_params(on_disk)))
    require(
        job.context_tokens + num_draft_tokens + 1 <= config.max_model_len,
        f"context_tokens={job.context_tokens}: with the tokens of a round it exceeds the model's "
        f"max_model_len={config.max_model_len}; lower it",
    )
    progress("loading")
    params = read_params(checkpoint)
    stored = weights_as_stored(params)
    form = serving_form(config, params, job.dtype)
    kv_dtype = kv_dtype_of(job.kv_cache_dtype, form.cache_dtype)
    pass_rows = job.num_rows * (1 + num_draft_tokens)
    moved = decode_bytes(
        form.model.config,
        weights_of_params(form.params, pass_rows),
        num_rows=job.num_rows,
        context_tokens=job.context_tokens,
        kv_bits=format_of(kv_dtype).bits,
        activation_bits=8 * jnp.dtype(form.model.dtype).itemsize,
        num_draft_tokens=num_draft_tokens,
        draft=draft,
    )
    progress("measuring this machine's read bandwidth")
    bandwidth = measure_read_bandwidth()
    progress("compiling and timing a decode step")
    measured, xla = _measured(form, kv_dtype, job, num_draft_tokens)
    if speculation is not None:
        costs = measure_costs((form.model, form.params), speculation, extra.proposer,
                              num_rows=job.num_rows, kv_dtype=kv_dtype)  # fmt: skip
        measured["draft_seconds"] = float(costs.draft_seconds) * num_draft_tokens
    seconds = measured["seconds"] + measured.get("draft_seconds", 0.0)
    floor = moved.total / bandwidth["bytes_per_second"]
    return {
        "schema": 1,
        "circumstances": circumstances() | {"device": jax.devices()[0].device_kind},
        "model": model,
        "weights": form.description,
        "num_rows": job.num_rows,
        "context_tokens": job.context_tokens,
        "kv_cache_dtype": kv_dtype,
        "num_draft_tokens": num_draft_tokens,
        "bytes": moved._asdict(),
        "total_bytes": moved.total,
        "kv_share": (moved.kv_read + moved.kv_write) / moved.total,
        "bandwidth": bandwidth,
        "measured": measured | {
            "round_seconds": seconds,
            "floor_seconds": floor,
            "roofline_share": floor / seconds,
        },
        "xla": xla,
        "gpus": predict(
            config, stored, job, gpu_kv_bits(job.kv_cache_dtype), num_draft_tokens=num_draft_tokens,
            draft=stored_draft,
        ),
    }  # fmt: skip


def profile_config(name: str, config: ModelConfig, formats: Formats, job: ProfileJob) -> dict:
    """The same of a configuration alone: bytes and predictions, nothing measured."""
    moved = decode_bytes(
        config, weights_of_formats(config, formats), num_rows=job.num_rows,
        context_tokens=job.context_tokens, kv_bits=formats.kv_bits,
    )  # fmt: skip
    return {
        "schema": 1,
        "circumstances": circumstances(),
        "model": name,
        "weights": f"{formats.weight_bits}-bit weights, {formats.head_bits:g}-bit head",
        "num_rows": job.num_rows,
        "context_tokens": job.context_tokens,
        "kv_cache_dtype": f"{formats.kv_bits} bits",
        "num_draft_tokens": 0,
        "bytes": moved._asdict(),
        "total_bytes": moved.total,
        "kv_share": (moved.kv_read + moved.kv_write) / moved.total,
        "gpus": predict(config, weights_of_formats(config, formats), job, formats.kv_bits),
    }


def predict(
    config: ModelConfig,
    weights: Weights,
    job: ProfileJob,
    kv_bits: int,
    *,
    num_draft_tokens: int = 0,
    draft: tuple[ModelConfig, Weights] | None = None,
) -> dict[str, Any]:
    """By GPU: the longer of moving a round's bytes and doing its flops, from the data sheet.

    Args:
      weights: as a GPU reads them; those of `draft` too.
      kv_bits: of its KV cache.

    Returns:
      {gpu: {name, seconds, tokens_per_second (without drafts accepted), total_bytes, limit ("bytes"
      or "flops"), fits, source}}; fits is whether both models and their keys and values take less
      than 90% of the memory.
    """
    moved = decode_bytes(
        config, weights, num_rows=job.num_rows, context_tokens=job.context_tokens, kv_bits=kv_bits,
        num_draft_tokens=num_draft_tokens, draft=draft,
    )  # fmt: skip
    flops = _flops(config, job.num_rows * (1 + num_draft_tokens), job)
    held = _held_bytes(config, weights, job, kv_bits)
    if draft is not None:
        flops += _flops(draft[0], job.num_rows * num_draft_tokens, job)
        held += _held_bytes(*draft, job, kv_bits)
    predictions = {}
    for key in job.gpus:
        gpu = GPUS[key]
        by_bytes = moved.total / (job.efficiency * gpu.hardware.bytes_per_second)
        by_flops = flops / (job.efficiency * gpu.hardware.flops_per_second)
        seconds = max(by_bytes, by_flops)
        predictions[key] = {
            "name": gpu.name,
            "seconds": seconds,
            "tokens_per_second": job.num_rows / seconds,
            "total_bytes": moved.total,
            "limit": "bytes" if by_bytes >= by_flops else "flops",
            "fits": held < 0.9 * gpu.memory_bytes,
            "source": gpu.source,
        }
    return predictions


def gpu_kv_bits(kv_cache_dtype: str) -> int:
    """Of a cached element on a GPU; "auto" is 8 there."""
    return 8 if kv_cache_dtype == "auto" else format_of(kv_cache_dtype).bits


def _flops(config: ModelConfig, num_tokens: int, job: ProfileJob) -> float:
    """Of the passes of so many tokens, each after the job's context."""
    weights = 2.0 * sum(num_matmul_weights(config))
    return num_tokens * (weights + attention_flops(config) * (job.context_tokens + 1))


def _held_bytes(config: ModelConfig, weights: Weights, job: ProfileJob, kv_bits: int) -> float:
    """All of a model, and its rows' keys and values; tied weights are the embedding too."""
    embedding = 0.0 if config.tie_word_embeddings else weights.per_token * config.vocab_size
    cached = job.num_rows * job.context_tokens * kv_bytes_per_token(config, kv_bits)
    return weights.once + embedding + cached


def _measured(
    form: ServingForm, kv_dtype: str, job: ProfileJob, num_draft_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pass with its sampling, compiled with the context it is given.

    Returns:
      {seconds (median), best_seconds, repeats}, and what XLA says of the program.
    """
    model, params = form.model, form.params
    B, T = job.num_rows, 1 + num_draft_tokens
    kv = private_rows(B, job.context_tokens + T, kv_dtype)
    starts_B = jnp.full(B, job.context_tokens, jnp.int32)
    counts_B = jnp.full(B, T, jnp.int32)
    tokens_BT = jnp.ones((B, T), jnp.int32)
    greedy = [SamplingParams(temperature=0.0, seed=0)] * B
    sampling = stack_sampling(greedy, vocab_size=model.config.vocab_size)

    @partial(
        jax.jit, donate_argnums=0, compiler_options=COMPILER_OPTIONS.get(jax.default_backend())
    )
    def step(pools, params, sampling, tokens_BT):
        hidden_BTD, pools = run_rows(model, params, pools, kv, tokens_BT, starts_B, counts_B)
        logits_BTV = logits_of(model, params, hidden_BTD)
        zeros_B = jnp.zeros(B, jnp.int32)
        drawn = [sample_tokens(logits_BTV[:, t], sampling, None, zeros_B) for t in range(T)]
        return pools, jnp.stack(drawn, axis=1)

    pools = init_pools(model.config, kv.num_blocks)
    compiled = step.lower(pools, params, sampling, tokens_BT).compile()

    def run(pools):
        return jax.block_until_ready(compiled(pools, params, sampling, tokens_BT))[0]

    pools = run(run(pools))
    times = []
    for _ in range(job.repeats):
        started = time.perf_counter()
        pools = run(pools)
        times.append(time.perf_counter() - started)
    if job.trace is not None:
        with jax.profiler.trace(job.trace):
            for _ in range(_TRACED_STEPS):
                pools = run(pools)
    measured = {
        "seconds": statistics.median(times),
        "best_seconds": min(times),
        "repeats": job.repeats,
    }
    return measured, _of_xla(compiled)


def _of_xla(compiled: Any) -> dict[str, Any]:
    """What the compiler says of its program; None where it says nothing.

    bytes_accessed counts operands and results of every instruction, cached or not; the others are
    sizes of buffers.
    """
    costs = compiled.cost_analysis() or {}
    costs = costs[0] if isinstance(costs, list) else costs
    memory = compiled.memory_analysis()
    return {
        "bytes_accessed": costs.get("bytes accessed"),
        "flops": costs.get("flops"),
        "argument_bytes": getattr(memory, "argument_size_in_bytes", None),
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
    }
