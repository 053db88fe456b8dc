"""On what is a trace served? A scheduler's configuration and step times for a model on a GPU."""

import functools
from dataclasses import dataclass

import numpy as np

from helios_jax.config import ModelConfig, RopeConfig, require
from helios_jax.profiler import Formats, Hardware, kv_bytes_per_token, step_seconds, weight_bytes
from helios_jax.replay.simulate import StepSeconds, Targets, simulate
from helios_jax.replay.traces import Trace
from helios_jax.scheduler import SchedulerConfig
from helios_jax.scheduler.urgency import fcfs
from pallas_kernels.devices import DEVICES

MODELS = {
    "llama-3-8b": ModelConfig(
        "llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=131_072,
        rope=RopeConfig(
            theta=500_000, rope_type="llama3", factor=8, original_max_position=8192
        ),
    ),
}  # fmt: skip
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Machine:
    """What `simulate` needs beside a trace, its targets and a policy."""

    config: SchedulerConfig
    step_seconds: StepSeconds


def machine(
    model: ModelConfig,
    gpu: str,
    formats: Formats,
    *,
    efficiency: float = 0.6,
    gpu_memory_utilization: float = 0.9,
    kv_cache_bytes: float | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 2048,
    max_num_rows: int = 1024,
    max_rounds: int = 16,
) -> Machine:
    """A model on one GPU, with step times from the byte model (`profiler.step_seconds`).

    Args:
      gpu: a key of `pallas_kernels.devices.DEVICES`: data-sheet bandwidth, flops and memory.
      efficiency: share of data-sheet bandwidth and flops that is reached.
      gpu_memory_utilization: share of the memory for weights and KV cache.
      kv_cache_bytes: instead of what the weights leave.
      max_model_len: longest request; longer ones are refused. None is the model's.

    Raises:
      ValueError: an unknown GPU, a share out of range, or no room for one request.
    """
    require(gpu in DEVICES, f"gpu={gpu!r}: must be one of {', '.join(DEVICES)}")
    require(0 < efficiency <= 1, f"efficiency={efficiency}: must be in (0, 1]")
    require(
        0 < gpu_memory_utilization <= 1,
        f"gpu_memory_utilization={gpu_memory_utilization}: must be in (0, 1]",
    )
    device = DEVICES[gpu]
    weights = weight_bytes(model, formats)
    if kv_cache_bytes is None:
        kv_cache_bytes = gpu_memory_utilization * device.memory_bytes - weights
    block_bytes = BLOCK_TOKENS * kv_bytes_per_token(model, formats.kv_bits)
    require(
        kv_cache_bytes >= block_bytes,
        f"kv_cache_bytes={kv_cache_bytes:.3g}: less than a block of {block_bytes} bytes, the "
        f"weights being {weights / 1e9:.1f} GB of {gpu}'s {device.memory_bytes / 1e9:.1f}; "
        "give weights fewer bits, or take a larger GPU",
    )
    hardware = Hardware(efficiency * device.bandwidth, efficiency * device.tensor_flops)
    seconds = functools.partial(step_seconds, model, formats, hardware)
    tokens = max_num_batched_tokens
    chunk_seconds = seconds(
        num_tokens=tokens, num_sampled=1, kv_tokens=0, attended_tokens=tokens * (tokens + 1) / 2
    )
    config = SchedulerConfig(
        num_blocks=int(kv_cache_bytes // block_bytes),
        max_num_rows=max_num_rows,
        max_model_len=max_model_len or model.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        narrow_block_tokens=BLOCK_TOKENS,
        kv_watermark=float("inf"),
        max_rounds=max_rounds,
        prefill_tokens_per_second=tokens / float(chunk_seconds),
    )
    return Machine(config, seconds)


def deal_targets(
    num_requests: int, ttft_seconds: list[float], tpot_seconds: float, seed: int = 0
) -> Targets:
    """One of the TTFT targets for each request, at random; shorter ones have better priority."""
    require(
        len(ttft_seconds) > 0 and min(ttft_seconds) > 0,
        f"ttft_seconds={ttft_seconds}: must be one or more numbers above 0",
    )
    require(tpot_seconds > 0, f"tpot_seconds={tpot_seconds}: must be above 0")
    ascending = np.unique(ttft_seconds)
    priority = np.random.default_rng(seed).integers(len(ascending), size=num_requests)
    return Targets(ascending[priority], np.full(num_requests, tpot_seconds), priority)


def saturation_seconds(trace: Trace, machine: Machine) -> float:
    """How long the machine takes for the trace if all requests are there from the start.

    Raises:
      ValueError: it can serve none of them.
    """
    together = trace.at_load(1e9)
    never = np.full(len(trace), np.inf)
    targets = Targets(never, never, np.zeros(len(trace)))
    outcome = simulate(together, targets, machine.config, machine.step_seconds, fcfs)
    finish = np.asarray(outcome.finish_time_N)
    config = machine.config
    require(
        bool(np.isfinite(finish).any()),
        f"max_model_len={config.max_model_len}: with {config.num_blocks * BLOCK_TOKENS} tokens of "
        "KV cache no request of this trace fits; raise it, or take a larger GPU",
    )
    return float(finish[np.isfinite(finish)].max())
