"""How keys and values lie in a KV pool: blocks of uint16 words, and the exact way in and out.

A pool is `uint16 [L * P, K, 8 * H]`: P blocks a layer, K KV heads, H head dimensions. A block and
head is a fixed number of bytes, whatever the precision; it holds 16 tokens of 8-bit values, 8 of
16-bit or 4 of float32, one token after the other. The words of one token:

    8 bits   H / 2 words, planar: word d = element d (bits 7..0) and element d + H / 2 (bits 15..8)
    16 bits  H words: word d = the bits of element d
    float32  2 H words: words 2 d and 2 d + 1 = low and high half of element d

Planar words are what lets a GPU transpose a tile of values 16 bits at a time and then take each
word apart in registers. Stored numbers are value / scale, saturated; NaN stays NaN when written.
Reading is defined on finite codes: an FP8 E4M3 NaN code reads as +-480.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

WORDS_PER_BLOCK = 8  # times H, per KV head


@dataclass(frozen=True)
class KVFormat:
    """One precision of keys and values.

    Attributes:
      name: as in `kv_cache_dtype`.
      bits: per value.
      tokens_per_block: how many tokens a block holds.
      largest: the largest magnitude that can be stored; writers saturate there.
    """

    name: str
    bits: int
    tokens_per_block: int
    largest: float

    def words_per_token(self, head_dim: int) -> int:
        return head_dim * self.bits // 16


FORMATS = {
    fmt.name: fmt
    for fmt in (
        KVFormat("fp8_e4m3", 8, 16, 448.0),
        KVFormat("fp8_e5m2", 8, 16, 57344.0),
        KVFormat("int8", 8, 16, 127.0),
        KVFormat("bfloat16", 16, 8, float(jnp.finfo(jnp.bfloat16).max)),
        KVFormat("float16", 16, 8, 65504.0),
        KVFormat("float32", 32, 4, float(jnp.finfo(jnp.float32).max)),
    )
}


def format_of(kv_dtype: str) -> KVFormat:
    """The format named `kv_dtype`; ValueError where there is none."""
    if kv_dtype not in FORMATS:
        raise ValueError(f"kv_dtype={kv_dtype!r}: must be one of {tuple(FORMATS)}")
    return FORMATS[kv_dtype]


def pool_shape(num_blocks: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """The shape of a pool of uint16 words with `num_blocks` (all layers together) blocks."""
    return (num_blocks, num_kv_heads, WORDS_PER_BLOCK * head_dim)


def to_words(values: jax.Array, kv_dtype: str) -> jax.Array:
    """float [..., H], already divided by the scale -> uint16 words [..., words_per_token].

    Rounds to nearest even and saturates: +-448 for E4M3, where XLA's own cast gives NaN beyond 464.
    """
    fmt = format_of(kv_dtype)
    values = values.astype(jnp.float32)
    limited = jnp.clip(values, -fmt.largest, fmt.largest)
    if kv_dtype == "float32":
        words = lax.bitcast_convert_type(values, jnp.uint16)
        return words.reshape(*values.shape[:-1], 2 * values.shape[-1])
    if fmt.bits == 16:
        return lax.bitcast_convert_type(limited.astype(jnp.dtype(kv_dtype)), jnp.uint16)
    if kv_dtype == "int8":
        codes = lax.bitcast_convert_type(jnp.round(limited).astype(jnp.int8), jnp.uint8)
    else:
        fp8 = jnp.float8_e4m3fn if kv_dtype == "fp8_e4m3" else jnp.float8_e5m2
        codes = lax.bitcast_convert_type(limited.astype(fp8), jnp.uint8)
    low, high = jnp.split(codes.astype(jnp.uint16), 2, axis=-1)
    return low | (high << 8)


def from_words(words: jax.Array, kv_dtype: str) -> jax.Array:
    """The inverse: uint16 [..., words_per_token] -> [..., H] unscaled.

    8-bit and float32 formats come as float32, 16-bit ones in their own dtype.
    """
    fmt = format_of(kv_dtype)
    if kv_dtype == "float32":
        pairs = words.reshape(*words.shape[:-1], words.shape[-1] // 2, 2)
        return lax.bitcast_convert_type(pairs, jnp.float32)
    if fmt.bits == 16:
        return lax.bitcast_convert_type(words, jnp.dtype(kv_dtype))
    codes = jnp.concatenate([words & 0xFF, words >> 8], axis=-1)
    if kv_dtype == "int8":
        return lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.int8).astype(jnp.float32)
    if kv_dtype == "fp8_e5m2":
        return lax.bitcast_convert_type(codes << 8, jnp.float16).astype(jnp.float32)
    # E4M3 keeps its exponent 8 below float16's: shifted into place it reads as value / 256,
    # subnormals included. Integer operations vectorise where a cast from FP8 does not.
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256.0
