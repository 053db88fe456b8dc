"""Where do the keys and values of many rows live, and how does one forward pass reach them?

Two pools of uint16 words, `[L * P, K, 8 * H]` (`pallas_kernels.kv_format`): a block is a fixed
number of bytes whatever the precision, and layer l's block b is `l * P + b`. `PagedCache` is what
the model sees for one pass; a row's tokens are found through its block table. A pass may hold rows
of two precisions: the attention runs once for each.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache.blocks import Copies
from helios_jax.config import ModelConfig
from pallas_kernels.append_kv import append_kv
from pallas_kernels.kv_format import format_of, from_words, pool_shape, to_words
from pallas_kernels.paged_attention import paged_attention


class KVPools(NamedTuple):
    """k, v: uint16 [L * P, K, 8 * H]."""

    k: Array
    v: Array


class KVScales(NamedTuple):
    """What stored 8-bit keys and values are multiplied with: k_LK, v_LK, float32, per KV head."""

    k_LK: Array
    v_LK: Array


def init_pools(config: ModelConfig, num_blocks: int) -> KVPools:
    """Zeroed pools of `num_blocks` blocks a layer."""
    shape = pool_shape(config.num_layers * num_blocks, config.num_kv_heads, config.head_dim)
    return KVPools(jnp.zeros(shape, jnp.uint16), jnp.zeros(shape, jnp.uint16))


def block_bytes(config: ModelConfig) -> int:
    """Bytes of one block in all layers, keys and values together."""
    _, K, words = pool_shape(1, config.num_kv_heads, config.head_dim)
    return 2 * config.num_layers * K * words * 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowBlocks:
    """The rows of one precision in a pass of T tokens.

    Attributes:
      block_table_BM: int32, block ids within a layer.
      context_len_B: int32, keys of each row, those of this pass included.
      query_start_B, query_len_B: int32, where in the pass a row's tokens are, and how many; 0 for
        rows of another precision.
      slot_T: int32, block id * tokens per block + place, where a token's key and value go; -1 for
        padding and tokens of another precision.
      scales: None for 1.
      kv_dtype: of `pallas_kernels.kv_format`; static.
    """

    block_table_BM: Array
    context_len_B: Array
    query_start_B: Array
    query_len_B: Array
    slot_T: Array
    scales: KVScales | None
    kv_dtype: str = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """The pools and the rows of one pass, as a cache of the model (see `helios_jax.cache`).

    Attributes:
      pools: carried through the pass, written in place.
      rows: one per precision that may be present.
      num_blocks: blocks a layer (P); static.
      max_query_len: most tokens of a row in the pass; static.
      backend: of the kernels, see `pallas_kernels.dispatch`; static.
      tree_mask_BJJ: bool, which of the pass's tokens see each other, see `paged_attention`; None
        for causal rows.
    """

    pools: KVPools
    rows: tuple[RowBlocks, ...]
    num_blocks: int = field(metadata={"static": True})
    max_query_len: int = field(metadata={"static": True})
    backend: str | None = field(metadata={"static": True})
    tree_mask_BJJ: Array | None = None

    def begin(self, positions_BT: Array) -> "PagedCache":
        """The slots are given, so there is nothing to take."""
        return self

    def attend(
        self,
        layer: int,
        query_BTNH: Array,
        key_BTKH: Array,
        value_BTKH: Array,
        positions_BT: Array,
        sliding_window: int | None,
    ) -> tuple[Array, "PagedCache"]:
        """Writes the new keys and values, then attends to all of each row's."""

        def flat(array_BTXH: Array) -> Array:
            return array_BTXH.reshape(-1, *array_BTXH.shape[2:])

        query, key, value = flat(query_BTNH), flat(key_BTKH), flat(value_BTKH)
        options = [self._options(rows, layer) for rows in self.rows]
        # All writes before all reads: a read between two writes makes XLA copy the pools.
        pools = self.pools
        for rows, common in zip(self.rows, options, strict=True):
            with jax.named_scope("kv_write"):
                pools = KVPools(*append_kv(*pools, key, value, rows.slot_T, **common))
        output = None
        for rows, common in zip(self.rows, options, strict=True):
            with jax.named_scope("kv_read"):
                attended = paged_attention(
                    _operand(query, rows.kv_dtype), *pools,
                    rows.block_table_BM, rows.context_len_B, rows.query_start_B, rows.query_len_B,
                    max_query_len=self.max_query_len, sliding_window=sliding_window,
                    tree_mask_BJJ=self.tree_mask_BJJ, **common,
                ).astype(query_BTNH.dtype)  # fmt: skip
            # Tokens of no row of this precision are zeros.
            output = attended if output is None else output + attended
        assert output is not None, "a pass needs rows"
        return output.reshape(query_BTNH.shape), dataclasses.replace(self, pools=pools)

    def _options(self, rows: RowBlocks, layer: int) -> dict[str, Any]:
        """What `append_kv` and `paged_attention` are both told."""
        scales = rows.scales
        return dict(
            kv_dtype=rows.kv_dtype,
            k_scale_K=None if scales is None else scales.k_LK[layer],
            v_scale_K=None if scales is None else scales.v_LK[layer],
            block_offset=layer * self.num_blocks,
            backend=self.backend,
        )


def _operand(query: Array, kv_dtype: str) -> Array:
    """Queries in the keys' dtype: products of bfloat16 are several times faster on a CPU."""
    return query.astype(jnp.bfloat16) if kv_dtype == "bfloat16" else query


def copy_blocks(pools: KVPools, copies: Copies, num_layers: int) -> KVPools:
    """Copies blocks in all layers, as they are; one turn of a loop for each."""

    def copy(i, pools: KVPools) -> KVPools:
        P = pools.k.shape[0] // num_layers
        layers = jnp.arange(num_layers) * P
        source, destination = copies.sources_B[i] + layers, copies.destinations_B[i] + layers
        return KVPools(*(pool.at[destination].set(pool[source]) for pool in pools))

    return lax.fori_loop(0, copies.num_copies, copy, pools)


def migrate_blocks(
    pools: KVPools,
    sources_M: Array,
    targets_M: Array,
    num_layers: int,
    narrow_dtype: str,
    wide_dtype: str,
    scales: KVScales | None,
) -> KVPools:
    """Dequantises a row's narrow blocks into wide ones (unscaled), a block a turn.

    Args:
      sources_M: int32, the row's narrow blocks in order, -1 padded; all -1 does nothing.
      targets_M: int32, its wide blocks; source i goes to targets i * ratio .. + ratio - 1, as far
        as there are any. They may not overlap the sources.
    """
    narrow, wide = format_of(narrow_dtype), format_of(wide_dtype)
    ratio = narrow.tokens_per_block // wide.tokens_per_block
    P = pools.k.shape[0] // num_layers
    layers = jnp.arange(num_layers) * P
    M = targets_M.shape[0]

    def migrate(i, pools: KVPools) -> KVPools:
        place = i * ratio + jnp.arange(ratio)
        target = jnp.where(place < M, targets_M[jnp.minimum(place, M - 1)], -1)
        # Past the end where there is none, which a scatter drops.
        where = jnp.where(target >= 0, layers[:, None] + target, num_layers * P)

        def convert(pool: Array, scale_LK: Array | None) -> Array:
            _, K, words = pool.shape
            stored = pool[layers + sources_M[i]]
            stored = stored.reshape(num_layers, K, narrow.tokens_per_block, -1)
            values = from_words(stored, narrow_dtype).astype(jnp.float32)
            if scale_LK is not None:
                values = values * scale_LK[:, :, None, None]
            blocks = to_words(values, wide_dtype).reshape(num_layers, K, ratio, words)
            return pool.at[where].set(jnp.moveaxis(blocks, 2, 1), mode="drop")

        k_scale, v_scale = (None, None) if scales is None else scales
        return KVPools(convert(pools.k, k_scale), convert(pools.v, v_scale))

    return lax.fori_loop(0, jnp.sum(sources_M >= 0, dtype=jnp.int32), migrate, pools)
