"""How is an engine set up: its limits, its KV cache, and what follows from them for the step?"""

import math
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from helios_jax.cache.paged import block_bytes
from helios_jax.config import ModelConfig, require
from helios_jax.scheduler import SchedulerConfig
from helios_jax.speculative import Speculation
from pallas_kernels.kv_format import FORMATS, format_of

KV_CACHE_DTYPES = ("auto", *FORMATS)
# On a CPU, unless one sequence of max_model_len needs more.
DEFAULT_CPU_POOL_BYTES = 256 << 20
_WIDE_DTYPE = "bfloat16"
# A CPU computes at the same rate from here on, and pays for padding; a GPU reads the weights anew.
_CPU_TILE_TOKENS = 256


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine, by vLLM's names where it has them.

    Attributes:
      max_model_len: longest sequence, prompt and output; None for the model's own.
      max_num_seqs: requests running at a time.
      max_num_rows: requests in the table, waiting ones included; `submit` refuses more for now.
      max_num_batched_tokens: tokens of a step's prefill chunk and decoding rows together.
      kv_cache_dtype: "fp8_e4m3", "fp8_e5m2", "int8", "bfloat16", "float16", "float32" or "auto":
        float32 for a model served in float32, else FP8 E4M3 on a GPU and bfloat16 on a CPU.
      kv_watermark: with an 8-bit KV cache, rows of more tokens than this use bfloat16 instead; 0
        for all, infinity for none.
      kv_cache_memory_bytes: size of the KV pool; None takes what `gpu_memory_utilization` leaves on
        a GPU, and 256 MiB on a CPU, or what one sequence of max_model_len needs.
      gpu_memory_utilization: share of the device's memory that the process may use in all.
      enable_prefix_caching: whether requests share the KV of equal beginnings.
      max_rounds: decode rounds in a step at most; it bounds how long a token or an arrival waits.
      max_preemptions, max_skips, aging_seconds: see `SchedulerConfig`.
      backend: of the kernels, see `pallas_kernels.dispatch`; None chooses.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_rows: int = 256
    max_num_batched_tokens: int = 512
    kv_cache_dtype: str = "auto"
    kv_watermark: float = 4000
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    max_rounds: int = 16
    max_preemptions: int = 3
    max_skips: int = 16
    aging_seconds: float = 30.0
    backend: str | None = None

    def __post_init__(self):
        require(
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            f"kv_cache_dtype={self.kv_cache_dtype!r}: must be one of {', '.join(KV_CACHE_DTYPES)}",
        )
        require(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization={self.gpu_memory_utilization}: must be in (0, 1]",
        )
        require(
            self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes > 0,
            f"kv_cache_memory_bytes={self.kv_cache_memory_bytes}: must be above 0, or None",
        )
        for name in ("max_num_seqs", "max_num_rows", "max_num_batched_tokens", "max_rounds"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}: must be at least 1")


@dataclass(frozen=True)
class StepConfig:
    """What the compiled step is made for; static.

    Attributes:
      num_layers: of the model.
      num_blocks: of the KV pool, a layer.
      narrow_dtype, wide_dtype: KV formats of rows up to the watermark and beyond; equal where there
        is one.
      max_rounds: decode rounds of a step at most.
      tile_tokens: how many of a prefill chunk's tokens are computed at a time.
      enable_prefix_caching, backend: see `EngineConfig`.
      speculation: None decodes plainly.
    """

    num_layers: int
    num_blocks: int
    narrow_dtype: str
    wide_dtype: str
    max_rounds: int
    tile_tokens: int
    enable_prefix_caching: bool
    backend: str | None
    speculation: Speculation | None = None

    @property
    def num_draft_tokens(self) -> int:
        """Of a row in a round, at most."""
        return self.speculation.max_num_draft_tokens if self.speculation is not None else 0

    @property
    def max_step_tokens(self) -> int:
        """Output tokens of a row in a step's rounds, at most: a step ends with the round that
        brings a row to `max_rounds` tokens."""
        return self.max_rounds + self.num_draft_tokens

    @property
    def max_blocks_per_round(self) -> int:
        """Blocks that a row may need for a round."""
        # A row without drafts fills its last block before it needs another.
        return 1 + math.ceil(self.num_draft_tokens / format_of(self.wide_dtype).tokens_per_block)

    @property
    def has_two_precisions(self) -> bool:
        return self.narrow_dtype != self.wide_dtype


def resolve_config(
    config: EngineConfig,
    model: ModelConfig,
    *,
    cache_dtype: Any,
    memory_in_use_bytes: int = 0,
    speculation: Speculation | None = None,
) -> tuple[SchedulerConfig, StepConfig]:
    """The scheduler's and the step's configuration.

    Args:
      model: the served model's.
      cache_dtype: of keys and values where `kv_cache_dtype` is "auto" and the platform a CPU.
      memory_in_use_bytes: what the process holds of the device already: weights, and the room that
        a step's temporaries need.
      speculation: None for none. The KV pool's bytes are shared with its proposer's pools.

    Raises:
      ValueError: options contradict each other, or the KV pool would be too small for one sequence.
    """
    platform = jax.default_backend()
    max_model_len = model.max_model_len if config.max_model_len is None else config.max_model_len
    require(
        2 <= max_model_len <= model.max_model_len,
        f"max_model_len={max_model_len}: must be in 2..{model.max_model_len}, the model's own "
        "limit",
    )
    narrow = kv_dtype_of(config.kv_cache_dtype, cache_dtype)
    has_two = format_of(narrow).bits == 8 and config.kv_watermark < max_model_len
    wide = _WIDE_DTYPE if has_two else narrow
    narrow_tokens, wide_tokens = (format_of(name).tokens_per_block for name in (narrow, wide))
    bytes_per_block = pool_block_bytes(model, speculation)
    longest_blocks = math.ceil(max_model_len / wide_tokens)
    pool_bytes = config.kv_cache_memory_bytes
    if pool_bytes is None and platform == "gpu":
        pool_bytes = _free_bytes(config.gpu_memory_utilization, memory_in_use_bytes)
    if pool_bytes is None:
        pool_bytes = max(DEFAULT_CPU_POOL_BYTES, longest_blocks * bytes_per_block)
    if platform == "cpu":
        # The system would grant the pool and end the process once it is written to.
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        require(
            pool_bytes < installed,
            f"the KV pool of {pool_bytes / 2**30:.1f} GiB does not fit this machine's "
            f"{installed / 2**30:.1f} GiB of memory; lower kv_cache_memory_bytes or max_model_len",
        )
    num_blocks = pool_bytes // bytes_per_block
    require(
        num_blocks >= longest_blocks,
        f"the KV pool holds {pool_bytes / 2**20:.0f} MiB = {num_blocks} blocks: one sequence of "
        f"max_model_len={max_model_len} needs {longest_blocks} blocks of "
        f"{bytes_per_block / 2**10:.0f} KiB; lower max_model_len, raise kv_cache_memory_bytes"
        + (" or gpu_memory_utilization" if platform == "gpu" else ""),
    )
    # More than every row's longest sequence is of no use, but for what stays findable.
    num_blocks = min(num_blocks, 2 * config.max_num_rows * longest_blocks)
    scheduler = SchedulerConfig(
        num_blocks=num_blocks,
        max_num_rows=max(config.max_num_rows, config.max_num_seqs),
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        narrow_block_tokens=narrow_tokens,
        wide_block_tokens=wide_tokens,
        kv_watermark=config.kv_watermark if has_two else math.inf,
        num_draft_tokens=speculation.max_num_draft_tokens if speculation is not None else 0,
        max_rounds=config.max_rounds,
        max_preemptions=config.max_preemptions,
        max_skips=config.max_skips,
        aging_seconds=config.aging_seconds,
    )
    step = StepConfig(
        num_layers=model.num_layers,
        num_blocks=num_blocks,
        narrow_dtype=narrow,
        wide_dtype=wide,
        max_rounds=config.max_rounds,
        tile_tokens=_CPU_TILE_TOKENS if platform == "cpu" else scheduler.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        backend=config.backend,
        speculation=speculation,
    )
    return scheduler, step


def kv_dtype_of(kv_cache_dtype: str, cache_dtype: Any) -> str:
    """What `EngineConfig.kv_cache_dtype` means for a model served with `cache_dtype`."""
    if kv_cache_dtype != "auto":
        return kv_cache_dtype
    if jnp.dtype(cache_dtype) == jnp.float32:
        return "float32"
    return "fp8_e4m3" if jax.default_backend() == "gpu" else "bfloat16"


def pool_block_bytes(model: ModelConfig, speculation: Speculation | None) -> int:
    """Bytes of a block in all layers, with what the proposer keeps for it."""

    if speculation is None:
        return block_bytes(model)
    proposer = speculation.proposer

    def shared_bytes(num_blocks: int) -> int:
        state = jax.eval_shape(lambda: proposer.init_state(1, num_blocks))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.shared))

    return block_bytes(model) + shared_bytes(2) - shared_bytes(1)


def _free_bytes(utilization: float, in_use_bytes: int) -> int:
    """What the default device may still give to the pool."""
    stats = jax.devices()[0].memory_stats() or {}
    total = stats.get("bytes_limit", 0)
    free = int(total * utilization) - max(stats.get("bytes_in_use", 0), in_use_bytes)
    require(
        free > 0,
        f"gpu_memory_utilization={utilization}: of {total / 2**30:.1f} GiB nothing is left for the "
        "KV pool beside the weights; raise it, or serve fewer bytes of weights (dtype='int4')",
    )
    return free
