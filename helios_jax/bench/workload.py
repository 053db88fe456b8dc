"""What is every engine asked to do? `Workload`, and the prompts it stands for."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Prefills timed per process; one is short enough for a scheduler's hiccup to double it.
NUM_PREFILLS = 3


@dataclass(frozen=True)
class Workload:
    """A model and the sizes to measure it at.

    Attributes:
      model: as for `helios_jax.load`.
      dtype: Helios' form of the weights.
      peer_dtype: transformers' ("bfloat16" or "float32"); llama.cpp computes on the file as it is.
      batch_sizes: rows that decode together, one measurement each.
      prompt_tokens: length of the one prompt whose prefill is timed.
      context_tokens: length of the prompts that decoding starts after.
      output_tokens: decode steps that are timed.
      repeats: processes per engine; the median of them counts.
      seed: of the random token ids.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    peer_dtype: str = "bfloat16"
    batch_sizes: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 512
    context_tokens: int = 32
    output_tokens: int = 128
    repeats: int = 3
    seed: int = 0

    def __post_init__(self):
        if not self.batch_sizes:
            raise ValueError("batch_sizes=(): must hold at least one size, such as 1")
        for size in self.batch_sizes:
            if size < 1:
                raise ValueError(f"batch_size={size}: must be at least 1")
        for name in ("prompt_tokens", "context_tokens", "output_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.peer_dtype not in ("bfloat16", "float32"):
            raise ValueError(f"peer_dtype={self.peer_dtype!r}: must be 'bfloat16' or 'float32'")

    @property
    def metrics(self) -> list[str]:
        """Names of the rates: "decode_b1", …, "prefill_b1"."""
        return [*(f"decode_b{size}" for size in self.batch_sizes), "prefill_b1"]

    def job(self, vocab_size: int) -> dict[str, Any]:
        """What a worker process is told, but for the model's path and its dtype."""
        draw = random.Random(self.seed)

        def prompts(count: int, length: int) -> list[list[int]]:
            return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

        return {
            "prefill_prompt": prompts(1, self.prompt_tokens)[0],
            "decode_prompts": [prompts(size, self.context_tokens) for size in self.batch_sizes],
            "output_tokens": self.output_tokens,
            "num_prefills": NUM_PREFILLS,
        }

    def rates(self, measured: Mapping[str, Any]) -> dict[str, float]:
        """Tokens per second by metric, from a worker's `decode_seconds` and `prefill_seconds`."""
        rates = {
            f"decode_b{size}": size * self.output_tokens / seconds
            for size, seconds in zip(self.batch_sizes, measured["decode_seconds"], strict=True)
        }
        return rates | {"prefill_b1": self.prompt_tokens / measured["prefill_seconds"]}
