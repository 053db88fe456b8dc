"""Caches without paging: one contiguous buffer per layer, or nothing at all."""

import dataclasses
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.cache.attention import attention
from helios_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseCache:
    """Keys and values of B rows with room for S tokens each.

    All rows write to the same slots at the same time: a call with T tokens fills the next T slots
    of every row, whatever the rows' positions are, so a write is one slice update, not a scatter.
    `key_positions_BS` says which position a slot holds; rows whose prompts are padded to a common
    length simply have slots at position -1 between prompt and output.

    Attributes:
      keys, values: a tuple of L arrays [B, K, S, H], one buffer a layer.
      key_positions_BS: int32, -1 where nothing (or padding) was written.
      num_slots_used: int32 scalar.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    key_positions_BS: jax.Array
    num_slots_used: jax.Array

    @classmethod
    def create(cls, config: ModelConfig, batch: int, num_slots: int, dtype=jnp.bfloat16) -> Self:
        """An empty cache for `batch` rows of `num_slots` tokens."""
        shape = (batch, config.num_kv_heads, num_slots, config.head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers)),
            key_positions_BS=jnp.full((batch, num_slots), -1, jnp.int32),
            num_slots_used=jnp.int32(0),
        )

    @property
    def num_slots(self) -> int:
        return self.key_positions_BS.shape[1]

    def begin(self, positions_BT: jax.Array) -> "DenseCache":
        """Takes the next T slots. The caller sees to it that they exist (`num_slots`)."""
        return dataclasses.replace(
            self,
            key_positions_BS=lax.dynamic_update_slice(
                self.key_positions_BS, positions_BT.astype(jnp.int32), (0, self.num_slots_used)
            ),
            num_slots_used=self.num_slots_used + positions_BT.shape[1],
        )

    def attend(
        self,
        layer: int,
        query_BTNH: jax.Array,
        key_BTKH: jax.Array,
        value_BTKH: jax.Array,
        positions_BT: jax.Array,
        sliding_window: int | None,
    ) -> tuple[jax.Array, "DenseCache"]:
        """Writes the new keys and values to the slots that `begin` took, then attends."""
        start = self.num_slots_used - key_BTKH.shape[1]

        def write(buffers, new_BTKH):
            buffer = buffers[layer]
            new_BKTH = new_BTKH.transpose(0, 2, 1, 3).astype(buffer.dtype)
            buffer = lax.dynamic_update_slice(buffer, new_BKTH, (0, 0, start, 0))
            return (*buffers[:layer], buffer, *buffers[layer + 1 :])

        cache = dataclasses.replace(
            self, keys=write(self.keys, key_BTKH), values=write(self.values, value_BTKH)
        )
        output = attention(
            query_BTNH, cache.keys[layer], cache.values[layer],
            positions_BT, self.key_positions_BS, sliding_window=sliding_window,
        )  # fmt: skip
        return output, cache

    def grow(self, num_slots: int) -> "DenseCache":
        """The same contents with room for `num_slots` tokens per row, at least as many as now."""
        added = num_slots - self.num_slots

        def pad(buffer):
            return jnp.pad(buffer, ((0, 0), (0, 0), (0, added), (0, 0)))

        return dataclasses.replace(
            self,
            keys=tuple(map(pad, self.keys)),
            values=tuple(map(pad, self.values)),
            key_positions_BS=jnp.pad(
                self.key_positions_BS, ((0, 0), (0, added)), constant_values=-1
            ),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NoCache:
    """Keeps nothing: the tokens of one call see each other alone (training, scoring)."""

    def begin(self, positions_BT: jax.Array) -> "NoCache":
        return self

    def attend(
        self,
        layer: int,
        query_BTNH: jax.Array,
        key_BTKH: jax.Array,
        value_BTKH: jax.Array,
        positions_BT: jax.Array,
        sliding_window: int | None,
    ) -> tuple[jax.Array, "NoCache"]:
        output = attention(
            query_BTNH, key_BTKH.transpose(0, 2, 1, 3), value_BTKH.transpose(0, 2, 1, 3),
            positions_BT, positions_BT, sliding_window=sliding_window,
        )  # fmt: skip
        return output, self
