"""How many bytes must a decode step or a prefill chunk move, by part, and how long must it take?

A lower bound on traffic to device memory: every weight is read once a step whatever the number of
tokens, every cached key and value of a row once, what is written once; activations stay on chip.
Token counts may be ints or JAX arrays, so that the simulator evaluates the same functions.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from helios_jax.config import ModelConfig, require


@dataclass(frozen=True)
class Formats:
    """How numbers are stored.

    Attributes:
      weight_bits: of the linears; 16 and more is unquantised.
      group_size: input channels that share a scale and a zero; None for all of a weight's. Ignored
        from 16 bits on.
      scale_bits: of a scale.
      zero_bits: of a group's zero or offset; None for weight_bits, as AWQ and GPTQ files pack it; 0
        where there is none (symmetric codes).
      head_bits: of the embedding and the output head, scales included.
      kv_bits: of a cached element.
    """

    weight_bits: int = 4
    group_size: int | None = 128
    scale_bits: int = 16
    zero_bits: int | None = None
    head_bits: float = 16
    kv_bits: int = 8

    def __post_init__(self):
        for name in ("weight_bits", "group_size", "scale_bits", "head_bits", "kv_bits"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value}: must be at least 1")
        require(
            self.zero_bits is None or self.zero_bits >= 0,
            f"zero_bits={self.zero_bits}: must be 0 or more, or None for weight_bits",
        )

    @property
    def group_bits(self) -> int:
        """Of a group's scale and zero."""
        return self.scale_bits + (self.weight_bits if self.zero_bits is None else self.zero_bits)


@dataclass(frozen=True)
class Hardware:
    """What a device can do, per second: bytes from memory and multiply-adds counted twice."""

    bytes_per_second: float
    flops_per_second: float

    def __post_init__(self):
        for name in ("bytes_per_second", "flops_per_second"):
            value = getattr(self, name)
            require(value > 0, f"{name}={value}: must be above 0")


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
    layer = sum(inputs * outputs for inputs, outputs in linear_shapes(config))
    return config.num_layers * layer, config.vocab_size * config.hidden_size


def linear_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of each linear of a layer: q, k, v, o, gate, up, down.

    Of a draft head: gate and up, which see state and token, and down.
    """
    D, F = config.hidden_size, config.intermediate_size
    if config.is_draft_head:
        return [(2 * D, F), (2 * D, F), (F, D)]
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [(D, query), (D, kv), (D, kv), (query, D), (D, F), (D, F), (F, D)]


def linear_bytes(config: ModelConfig, formats: Formats) -> float:
    """Of all linears of the layers, scales and zeros included."""
    bits = 0
    for inputs, outputs in linear_shapes(config):
        bits += inputs * outputs * formats.weight_bits
        if formats.weight_bits < 16:
            bits += (
                outputs * math.ceil(inputs / (formats.group_size or inputs)) * formats.group_bits
            )
    return config.num_layers * bits / 8


def vector_bytes(config: ModelConfig) -> int:
    """Of norms and biases, which are served in float32."""
    D, F = config.hidden_size, config.intermediate_size
    if config.is_draft_head:
        return 4 * (config.num_layers * (D + (2 * F + D) * config.mlp_bias) + 2 * D)
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = 2 * D + 2 * config.head_dim * config.qk_norm
    layer += (query + 2 * kv) * config.qkv_bias + D * config.attention_output_bias
    layer += (2 * F + D) * config.mlp_bias
    return 4 * (config.num_layers * layer + D)


def weight_bytes(config: ModelConfig, formats: Formats) -> float:
    """Of linears, head and embedding (once if tied) in memory; norms and biases aside."""
    head = num_matmul_weights(config)[1]
    copies = 1 if config.tie_word_embeddings else 2
    return linear_bytes(config, formats) + copies * head * formats.head_bits / 8


def kv_bytes_per_token(config: ModelConfig, kv_bits: int) -> int:
    """Keys and values of one token in all layers; a draft head has none."""
    if config.is_draft_head:
        return 0
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bits // 8


def attention_flops(config: ModelConfig) -> float:
    """Of one query position and one key position in all layers; a draft head has none."""
    if config.is_draft_head:
        return 0.0
    return 4.0 * config.num_layers * config.num_heads * config.head_dim


def step_bytes(
    config: ModelConfig, formats: Formats, *, num_tokens: Any, num_sampled: Any, kv_tokens: Any
) -> StepBytes:
    """One pass over the model.

    Args:
      num_tokens: tokens computed: one a row in plain decoding, the chunk's in a prefill.
      num_sampled: positions whose logits are needed.
      kv_tokens: cached tokens read, summed over rows.
    """
    head = num_matmul_weights(config)[1]
    kv_bytes = kv_bytes_per_token(config, formats.kv_bits)
    runs = jnp.minimum(num_tokens, 1)
    samples = jnp.minimum(num_sampled, 1)
    return StepBytes(
        linears=runs * linear_bytes(config, formats),
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
    flops = 2.0 * linears * num_tokens + 2.0 * head * num_sampled
    flops += attention_flops(config) * attended_tokens
    return jnp.maximum(moved / hardware.bytes_per_second, flops / hardware.flops_per_second)
