"""Which requests is the serving engine measured with?"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("single", "batch", "mix", "fairness")


@dataclass(frozen=True)
class ServingWorkload:
    """A model, the parts of the benchmark, and their sizes in tokens.

    Attributes:
      model: as for `helios_jax.load`.
      dtype: Helios' form of the weights.
      parts: of `PARTS`.
      single_sizes: (prompt, output) of the requests that are served alone.
      row_limits: the engine's `max_num_seqs` that they are served with.
      batch_size, batch_tokens: requests that come together, and (prompt, output) of each.
      kv_cache_dtypes: of the engine, for these.
      mix_requests: number of the requests of mixed lengths, which come together too.
      mix_medians, mix_sigmas: of their lognormal prompt and output lengths. The sigmas are those of
        the Azure conversation trace (LLM inference 2023), whose medians are 1,020 and 129.
      trace: a file to take the first `mix_requests` lengths from instead, see `replay.read_trace`.
      trace_scale: what its lengths are multiplied with.
      long_tokens: of the prompt that five short ones stand behind; at most what the model takes.
      short_tokens: (prompt, output) of those.
      shared_tokens: of the beginning that two prompts share.
      pairs: measurements of each kind in a process, in turn with what they are compared with.
      repeats: processes.
      seed: of token ids and lengths.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    parts: tuple[str, ...] = PARTS
    single_sizes: tuple[tuple[int, int], ...] = ((128, 128), (32, 128))
    row_limits: tuple[int, ...] = (8, 256)
    batch_size: int = 8
    batch_tokens: tuple[int, int] = (128, 128)
    kv_cache_dtypes: tuple[str, ...] = ("bfloat16", "fp8_e4m3")
    mix_requests: int = 64
    mix_medians: tuple[int, int] = (128, 48)
    mix_sigmas: tuple[float, float] = (0.99, 0.86)
    trace: str | None = None
    trace_scale: float = 1.0
    long_tokens: int = 8192
    short_tokens: tuple[int, int] = (64, 16)
    shared_tokens: int = 2000
    pairs: int = 3
    repeats: int = 1
    seed: int = 0

    def __post_init__(self):
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"part={part!r}: must be one of {', '.join(PARTS)}")
        for name in ("batch_size", "mix_requests", "pairs", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if not self.trace_scale > 0:
            raise ValueError(f"trace_scale={self.trace_scale}: must be above 0")

    def mix(self, max_model_len: int) -> list[tuple[int, int]]:
        """(prompt, output) tokens of the mixed requests, as far as a model takes them."""
        if self.trace is None:
            draw = random.Random(self.seed)
            lengths = [
                tuple(
                    median * draw.lognormvariate(0, sigma)
                    for median, sigma in zip(self.mix_medians, self.mix_sigmas, strict=True)
                )
                for _ in range(self.mix_requests)
            ]
        else:
            from helios_jax.replay import read_trace

            trace = read_trace(Path(self.trace)).head(self.mix_requests)
            pairs = zip(trace.num_prompt.tolist(), trace.num_output.tolist(), strict=True)
            lengths = [tuple(self.trace_scale * length for length in pair) for pair in pairs]
        half = max_model_len // 2
        return [
            (max(1, min(round(prompt), half)), max(1, min(round(output), half)))
            for prompt, output in lengths
        ]

    def job(self, vocab_size: int, max_model_len: int) -> dict[str, Any]:
        """What a worker process is told, but for the model's path."""
        return {
            "dtype": self.dtype,
            "parts": list(self.parts),
            "vocab_size": vocab_size,
            "single_sizes": [list(size) for size in self.single_sizes],
            "row_limits": list(self.row_limits),
            "batch_size": self.batch_size,
            "batch_tokens": list(self.batch_tokens),
            "kv_cache_dtypes": list(self.kv_cache_dtypes),
            "mix": [list(size) for size in self.mix(max_model_len)] if "mix" in self.parts else [],
            "long_tokens": min(self.long_tokens, max_model_len - 1),
            "short_tokens": list(self.short_tokens),
            "shared_tokens": self.shared_tokens,
            "pairs": self.pairs,
            "seed": self.seed,
        }
