"""On what is a trace served? A scheduler's configuration and step times for a model on a GPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from helios_jax.config import ModelConfig, RopeConfig, require
from helios_jax.profiler import (
    GPUS,
    Formats,
    Hardware,
    kv_bytes_per_token,
    step_seconds,
    weight_bytes,
)
from helios_jax.replay.simulate import StepSeconds, Targets, simulate
from helios_jax.replay.traces import Trace
from helios_jax.scheduler import SchedulerConfig
from helios_jax.scheduler.urgency import fcfs

MODELS = {
    "llama-3-8b": ModelConfig(
        "llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=131_072,
        rope=RopeConfig(
            theta=500_000, rope_type="llama3", factor=8, original_max_position=8192
        ),
    ),
    # The article's model before and after its grouped queries.
    "llama-2-7b": ModelConfig(
        "llama", vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_layers=32,
        num_heads=32, num_kv_heads=32, head_dim=128, max_model_len=4096,
    ),
    "llama-2-7b-gqa": ModelConfig(
        "llama", vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=4096,
    ),
}  # fmt: skip
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Drafts:
    """Speculation by its expected values.

    Attributes:
      acceptance_rate: of each draft token, in [0, 1).
      num_draft_tokens: gamma.
      relative_cost: seconds of a draft step over a plain decode step's.
    """

    acceptance_rate: float
    num_draft_tokens: int = 4
    relative_cost: float = 0.02

    def __post_init__(self):
        require(
            0 <= self.acceptance_rate < 1,
            f"acceptance_rate={self.acceptance_rate}: must be in [0, 1)",
        )
        require(
            self.num_draft_tokens >= 1,
            f"num_draft_tokens={self.num_draft_tokens}: must be at least 1",
        )
        require(self.relative_cost >= 0, f"relative_cost={self.relative_cost}: must be 0 or more")

    @property
    def tokens_per_round(self) -> float:
        """(1 - a^(gamma + 1)) / (1 - a), arXiv 2211.17192."""
        a = self.acceptance_rate
        return (1 - a ** (self.num_draft_tokens + 1)) / (1 - a)


@dataclass(frozen=True)
class RooflineSeconds:
    """A step-time function of `simulate`: the byte model's, see `profiler.step_seconds`.

    Attributes:
      model, formats, hardware: of it; hardware as it is reached.
      drafts: None decodes plainly, in one pass with the chunk. With drafts a chunk is a pass of its
        own, and a token costs its share of a round.
      overhead_seconds: of each event beside: launches and the host.
    """

    model: ModelConfig
    formats: Formats
    hardware: Hardware
    drafts: Drafts | None = None
    overhead_seconds: float = 0.0

    def __call__(
        self, *, num_tokens: Any, num_sampled: Any, kv_tokens: Any, attended_tokens: Any,
        num_decode: Any = 0, decode_kv_tokens: Any = 0, num_rounds: Any = 1,
    ) -> Any:  # fmt: skip
        def seconds(tokens: Any, sampled: Any, kv: Any, attended: Any) -> Any:
            return step_seconds(
                self.model, self.formats, self.hardware, num_tokens=tokens, num_sampled=sampled,
                kv_tokens=kv, attended_tokens=attended,
            )  # fmt: skip

        overhead = self.overhead_seconds / num_rounds
        if self.drafts is None:
            return overhead + seconds(num_tokens, num_sampled, kv_tokens, attended_tokens)
        verified = 1 + self.drafts.num_draft_tokens
        chunk = seconds(
            num_tokens - num_decode, num_sampled - num_decode, kv_tokens - decode_kv_tokens,
            attended_tokens - decode_kv_tokens,
        )  # fmt: skip
        verify = seconds(
            verified * num_decode, verified * num_decode, decode_kv_tokens,
            verified * decode_kv_tokens,
        )  # fmt: skip
        plain = seconds(num_decode, num_decode, decode_kv_tokens, decode_kv_tokens)
        drafting = self.drafts.num_draft_tokens * self.drafts.relative_cost * plain
        return overhead + chunk + (verify + drafting) / self.drafts.tokens_per_round


@dataclass(frozen=True)
class Machine:
    """What `simulate` needs beside a trace, its targets and a policy."""

    config: SchedulerConfig
    step_seconds: StepSeconds
    overlaps: bool = False


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
    drafts: Drafts | None = None,
    overhead_seconds: float = 0.0,
) -> Machine:
    """A model on one GPU, with step times from the byte model (`profiler.step_seconds`).

    Args:
      gpu: a key of `profiler.GPUS`: data-sheet bandwidth, flops and memory.
      efficiency: share of data-sheet bandwidth and flops that is reached.
      gpu_memory_utilization: share of the memory for weights and KV cache.
      kv_cache_bytes: instead of what the weights leave.
      max_model_len: longest request; longer ones are refused. None is the model's.
      drafts, overhead_seconds: see `RooflineSeconds`.

    Raises:
      ValueError: an unknown GPU, a share out of range, or no room for one request.
    """
    require(gpu in GPUS, f"gpu={gpu!r}: must be one of {', '.join(GPUS)}")
    require(0 < efficiency <= 1, f"efficiency={efficiency}: must be in (0, 1]")
    require(
        0 < gpu_memory_utilization <= 1,
        f"gpu_memory_utilization={gpu_memory_utilization}: must be in (0, 1]",
    )
    device = GPUS[gpu]
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
    hardware = Hardware(
        efficiency * device.hardware.bytes_per_second, efficiency * device.hardware.flops_per_second
    )
    seconds = RooflineSeconds(model, formats, hardware, drafts, overhead_seconds)
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
    outcome = simulate(
        together, targets, machine.config, machine.step_seconds, fcfs, overlaps=machine.overlaps
    )
    finish = np.asarray(outcome.finish_time_N)
    config = machine.config
    require(
        bool(np.isfinite(finish).any()),
        f"max_model_len={config.max_model_len}: with {config.num_blocks * BLOCK_TOKENS} tokens of "
        "KV cache no request of this trace fits; raise it, or take a larger GPU",
    )
    return float(finish[np.isfinite(finish)].max())
