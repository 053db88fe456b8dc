"""What do keys and values lose in a quantised cache, and which scales suit a model?

A paged cache stores value / scale in a few bits (`pallas_kernels.kv_format`), and attention reads
what it stored, of the tokens just written too. Scoring a whole text at once therefore gives what a
chunked prefill through such a cache gives, as long as every key and value goes there and back
before attention sees it: that is `RoundedKV`.

A scale maps the largest magnitude seen on calibration text to the largest that the format holds;
what is larger saturates. Checkpoints state scales for FP8 E4M3; other formats' follow from them.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.cache import attention
from helios_jax.config import ModelConfig, require
from helios_jax.model import Transformer
from pallas_kernels.kv_format import FORMATS, from_words, pool_shape, to_words

# What keys and values are stored as, by the name of the cache's dtype.
KV_DTYPES = {
    "float32": ("float32", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float16": ("float16", "float16"),
    "fp8_e4m3": ("fp8_e4m3", "fp8_e4m3"),
    "fp8_e5m2": ("fp8_e5m2", "fp8_e5m2"),
    "int8": ("int8", "int8"),
    "k16v8": ("bfloat16", "fp8_e4m3"),
}
# Queries attend in this many pieces, each to the keys that exist by its end.
_PIECES = 4


class KVRanges(NamedTuple):
    """The largest magnitudes of keys (after RoPE) and values: float32 [L, K] each."""

    k_LK: np.ndarray
    v_LK: np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedKV:
    """Keeps nothing, but lets attention see keys and values as a quantised cache returns them.

    For texts scored at once: positions count up from 0, padding is at the end.

    Attributes:
      k_scale_LK, v_scale_LK: float32 [L, K]; scales are read for 8-bit formats only.
      k_dtype, v_dtype: names in `FORMATS`.
    """

    k_scale_LK: jax.Array
    v_scale_LK: jax.Array
    k_dtype: str = dataclasses.field(metadata=dict(static=True))
    v_dtype: str = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def create(cls, config: ModelConfig, kv_dtype: str, ranges: KVRanges | None) -> "RoundedKV":
        """For one of `KV_DTYPES`; scales of 1 without `ranges`."""
        check_kv_dtype(kv_dtype)
        k_dtype, v_dtype = KV_DTYPES[kv_dtype]
        if ranges is None:
            ones = jnp.ones((config.num_layers, config.num_kv_heads), jnp.float32)
            return cls(ones, ones, k_dtype, v_dtype)
        return cls(
            scales_of(ranges.k_LK, k_dtype), scales_of(ranges.v_LK, v_dtype), k_dtype, v_dtype
        )

    def begin(self, positions_BT: jax.Array) -> "RoundedKV":
        return self

    def attend(
        self, layer, query_BTNH, key_BTKH, value_BTKH, positions_BT, sliding_window
    ) -> tuple[jax.Array, "RoundedKV"]:
        key_BTKH = there_and_back(key_BTKH, self.k_scale_LK[layer], self.k_dtype)
        value_BTKH = there_and_back(value_BTKH, self.v_scale_LK[layer], self.v_dtype)
        key_BKTH, value_BKTH = (x.transpose(0, 2, 1, 3) for x in (key_BTKH, value_BTKH))
        num_tokens = query_BTNH.shape[1]
        ends = sorted({-(-num_tokens * piece // _PIECES) for piece in range(_PIECES + 1)})
        outputs = [
            attention(
                query_BTNH[:, start:end],
                key_BKTH[:, :, :end],
                value_BKTH[:, :, :end],
                positions_BT[:, start:end],
                positions_BT[:, :end],
                sliding_window=sliding_window,
            )
            for start, end in zip(ends, ends[1:], strict=False)
        ]
        return jnp.concatenate(outputs, axis=1), self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _WatchedKV:
    """Keeps the largest magnitudes of the keys and values that went by, [L, K]."""

    k_LK: jax.Array
    v_LK: jax.Array

    def begin(self, positions_BT: jax.Array) -> "_WatchedKV":
        return self

    def attend(
        self, layer, query_BTNH, key_BTKH, value_BTKH, positions_BT, sliding_window
    ) -> tuple[jax.Array, "_WatchedKV"]:
        output = attention(
            query_BTNH, key_BTKH.transpose(0, 2, 1, 3), value_BTKH.transpose(0, 2, 1, 3),
            positions_BT, positions_BT, sliding_window=sliding_window,
        )  # fmt: skip

        def widened(range_LK, new_BTKH):
            largest_K = jnp.max(jnp.abs(new_BTKH.astype(jnp.float32)), axis=(0, 1, 3))
            return range_LK.at[layer].max(largest_K)

        return output, _WatchedKV(widened(self.k_LK, key_BTKH), widened(self.v_LK, value_BTKH))


def check_kv_dtype(kv_dtype: str) -> None:
    require(kv_dtype in KV_DTYPES, f"kv_cache_dtype={kv_dtype!r}: must be one of {(*KV_DTYPES,)}")


def there_and_back(values_BTKH: jax.Array, scale_K: jax.Array, dtype: str) -> jax.Array:
    """What a cache of format `dtype` returns of `values_BTKH`, float32."""
    scale_K1 = scale_K[:, None] if FORMATS[dtype].bits == 8 else jnp.float32(1)
    stored = to_words(values_BTKH.astype(jnp.float32) / scale_K1, dtype)
    return from_words(stored, dtype).astype(jnp.float32) * scale_K1


def scales_of(range_LK: Any, dtype: str) -> jax.Array:
    """The scales that let `dtype` hold magnitudes up to `range_LK`; 1 where that is 0."""
    scale_LK = jnp.asarray(range_LK, jnp.float32) / FORMATS[dtype].largest
    return jnp.where(scale_LK > 0, scale_LK, 1.0)


def kv_ranges(model: Transformer, params: Any, tokens_BT: np.ndarray) -> KVRanges:
    """The ranges of a model's keys and values on calibration sequences, one at a time.

    Raises:
      ValueError: a key or value is not finite.
    """
    shape = model.config.num_layers, model.config.num_kv_heads
    watched = _WatchedKV(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
    for tokens_T in tokens_BT:
        watched = _watch(model, params, tokens_T[None], watched)
    ranges = KVRanges(np.asarray(watched.k_LK), np.asarray(watched.v_LK))
    for name, range_LK in zip(("keys", "values"), ranges, strict=True):
        layers = np.flatnonzero(~np.isfinite(range_LK).all(axis=1))
        require(
            not layers.size,
            f"layer {layers[:1]}: {name} are not finite on the calibration text; the checkpoint is "
            "damaged, or overflows",
        )
    return ranges


@functools.partial(jax.jit, static_argnums=0)
def _watch(model, params, tokens_BT, watched):
    return model.apply(params, tokens_BT, None, watched, method="hidden")[1]


def kv_bytes_per_sequence(config: ModelConfig, kv_dtype: str, num_tokens: int) -> int:
    """Bytes of the blocks that hold the keys and values of one sequence, all layers."""
    check_kv_dtype(kv_dtype)
    total = 0
    for dtype in KV_DTYPES[kv_dtype]:
        num_blocks = -(-num_tokens // FORMATS[dtype].tokens_per_block) * config.num_layers
        words = np.prod(pool_shape(num_blocks, config.num_kv_heads, config.head_dim))
        total += int(words) * 2
    return total
