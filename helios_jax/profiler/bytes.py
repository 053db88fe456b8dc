"""How many bytes must a decode step or a prefill chunk move, by part, and how long must it take?

A lower bound on traffic to device memory: every weight is read once a step whatever the number of
tokens, every cached key and value of a row once, what is written once; activations stay on chip.
Token counts may be ints or JAX arrays, so that the simulator evaluates the same functions.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from helios_jax.config import ModelConfig, require


@dataclass(frozen=True)
class Formats:
    """How numbers are stored.

    Attributes:
      weight_bits: of the linears; 16 is unquantised.
      group_size: weights that share a scale (and an integer zero of weight_bits); ignored at 16.
      scale_bits: of a scale.
      head_bits: of the embedding and the output head.
      kv_bits: of a cached element.
    """

    weight_bits: int = 4
    group_size: int = 128
    scale_bits: int = 16
    head_bits: int = 16
    kv_bits: int = 8

    def __post_init__(self):
        for name in ("weight_bits", "group_size", "scale_bits", "head_bits", "kv_bits"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}: must be at least 1")

    @property
    def bits_per_weight(self) -> float:
        """Of the linears, scales and zeros included."""
        if self.weight_bits >= 16:
            return self.weight_bits
        return self.weight_bits + (self.scale_bits + self.weight_bits) / self.group_size


@dataclass(frozen=True)
class Hardware:
    """What a device can do, per second: bytes from memory and multiply-adds counted twice."""

    bytes_per_second: float
    flops_per_second: float

    def __post_init__(self):
        for name in ("bytes_per_second", "flops_per_second"):
            value = getattr(self, name)
            require(value > 0, f"{name}={value}: must be above 0")


# Data sheet: 3.35 TB/s, 989 TFLOP/s dense bfloat16. What is reached in practice is less.
H100_SXM = Hardware(bytes_per_second=3.35e12, flops_per_second=989e12)


class StepBytes(NamedTuple):
    """Bytes of one step by part; ints or arrays."""

    linears: Any
    head: Any
    embedding: Any
    kv_read: Any
    kv_written: Any

    @property
    def total(self) -> Any:
        return sum(self)


def num_matmul_weights(config: ModelConfig) -> tuple[int, int]:
    """Weights of all linears of the layers, and of the output head."""
    D, H = config.hidden_size, config.head_dim
    attention = 2 * D * config.num_heads * H + 2 * D * config.num_kv_heads * H
    ffn = 3 * D * config.intermediate_size
    return config.num_layers * (attention + ffn), config.vocab_size * D


def weight_bytes(config: ModelConfig, formats: Formats) -> float:
    """Of linears, head and embedding (once if tied) in memory."""
    linears, head = num_matmul_weights(config)
    copies = 1 if config.tie_word_embeddings else 2
    return (linears * formats.bits_per_weight + copies * head * formats.head_bits) / 8


def kv_bytes_per_token(config: ModelConfig, kv_bits: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bits // 8


def step_bytes(
    config: ModelConfig, formats: Formats, *, num_tokens: Any, num_sampled: Any, kv_tokens: Any
) -> StepBytes:
    """One pass over the model.

    Args:
      num_tokens: tokens computed: one a row in plain decoding, the chunk's in a prefill.
      num_sampled: positions whose logits are needed.
      kv_tokens: cached tokens read, summed over rows.
    """
    linears, head = num_matmul_weights(config)
    kv_bytes = kv_bytes_per_token(config, formats.kv_bits)
    runs = jnp.minimum(num_tokens, 1)
    samples = jnp.minimum(num_sampled, 1)
    return StepBytes(
        linears=runs * (linears * formats.bits_per_weight / 8),
        head=samples * (head * formats.head_bits / 8),
        embedding=num_tokens * (config.hidden_size * formats.head_bits / 8),
        kv_read=kv_tokens * float(kv_bytes),
        kv_written=num_tokens * float(kv_bytes),
    )


def step_seconds(
    config: ModelConfig,
    formats: Formats,
    hardware: Hardware,
    *,
    num_tokens: Any,
    num_sampled: Any,
    kv_tokens: Any,
    attended_tokens: Any,
) -> Any:
    """The longer of moving `step_bytes` and of computing (roofline).

    Args:
      attended_tokens: pairs of query and key positions, summed over the computed tokens.
    """
    moved = step_bytes(
        config, formats, num_tokens=num_tokens, num_sampled=num_sampled, kv_tokens=kv_tokens
    ).total
    linears, head = num_matmul_weights(config)
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim
    flops = 2.0 * linears * num_tokens + 2.0 * head * num_sampled + attention * attended_tokens
    return jnp.maximum(moved / hardware.bytes_per_second, flops / hardware.flops_per_second)
