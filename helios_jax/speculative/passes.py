"""How does a model run over a few tokens of each of B rows, above their paged KV entries?"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.cache.paged import KVPools, KVScales, PagedCache, RowBlocks
from pallas_kernels.kv_format import format_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowTable:
    """The rows of one precision.

    Attributes:
      block_table_BM: int32, block ids within a layer.
      is_mine_B: bool, which of the B rows have this precision.
      kv_dtype: of `pallas_kernels.kv_format`; static.
    """

    block_table_BM: Array
    is_mine_B: Array
    kv_dtype: str = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedRows:
    """Where the keys and values of B rows lie.

    Attributes:
      tables: one per precision that may be present; every row is in one.
      scales: of the 8-bit precisions; None for 1.
      num_blocks: blocks a layer (P); static.
      backend: of the kernels; static.
    """

    tables: tuple[RowTable, ...]
    scales: KVScales | None
    num_blocks: int = field(metadata={"static": True})
    backend: str | None = field(default=None, metadata={"static": True})


class Tree(NamedTuple):
    """Tokens of a pass that branch (arXiv 2401.10774, 2401.15077).

    mask_BTT: bool, token i sees token j of the pass (j <= i) only where set; older keys as ever.
    depth_BT: int32, a token's position, counted from the row's first in the pass.
    """

    mask_BTT: Array
    depth_BT: Array


def private_rows(num_rows: int, num_tokens: int, kv_dtype: str) -> PagedRows:
    """Rows of up to `num_tokens` tokens that own blocks of their own, for use without an engine."""
    M = math.ceil(num_tokens / format_of(kv_dtype).tokens_per_block)
    table_BM = jnp.arange(num_rows * M, dtype=jnp.int32).reshape(num_rows, M)
    table = RowTable(table_BM, jnp.ones(num_rows, bool), kv_dtype)
    return PagedRows((table,), None, num_blocks=num_rows * M)


def run_rows(
    model: Any,
    params: Any,
    pools: KVPools,
    kv: PagedRows,
    tokens_BT: Array,
    starts_B: Array,
    counts_B: Array,
    tree: Tree | None = None,
) -> tuple[Array, KVPools]:
    """The model's final hidden states [B, T, D], and the pools with the tokens' keys and values.

    What the pools hold at these positions and beyond is overwritten or not looked at: rejected
    drafts are rolled back by counting fewer tokens, and by nothing else.

    Args:
      model, params: a `Transformer` and its parameters.
      tokens_BT: int32; the first `counts_B` of a row count, the others give anything.
      starts_B: int32, position of a row's first token; all before it are in the pools.
      counts_B: int32 in 0..T; 0 leaves the row out.
      tree: None for a chain.
    """
    B, T = tokens_BT.shape
    place_T = jnp.arange(T, dtype=jnp.int32)
    slot_position_BT = starts_B[:, None] + place_T
    is_token_BT = place_T < counts_B[:, None]
    depth_BT = place_T[None] if tree is None else tree.depth_BT
    cache = PagedCache(
        pools=pools,
        rows=tuple(
            _row_blocks(table, kv.scales, slot_position_BT, is_token_BT, starts_B, counts_B)
            for table in kv.tables
        ),
        num_blocks=kv.num_blocks,
        max_query_len=T,
        backend=kv.backend,
        tree_mask_BJJ=None if tree is None else tree.mask_BTT,
    )
    positions_BT = jnp.where(is_token_BT, starts_B[:, None] + depth_BT, -1)
    # A draft model's vocabulary may be padded less than its target's.
    ids_BT = jnp.clip(tokens_BT, 0, model.config.vocab_size - 1)
    hidden_BTD, cache = model.apply(params, ids_BT, positions_BT, cache, method="hidden")
    return hidden_BTD, cache.pools


def logits_of(model: Any, params: Any, hidden: Array) -> Array:
    """float32 logits [..., V] of hidden states [..., D]."""
    return model.apply(params, hidden, method="logits")


def _row_blocks(
    table: RowTable, scales: KVScales | None, position_BT: Array, is_token_BT: Array,
    starts_B: Array, counts_B: Array,
) -> RowBlocks:  # fmt: skip
    B, T = position_BT.shape
    fmt = format_of(table.kv_dtype)
    M = table.block_table_BM.shape[1]
    place_BT = jnp.clip(position_BT // fmt.tokens_per_block, 0, M - 1)
    block_BT = jnp.take_along_axis(table.block_table_BM, place_BT, axis=1)
    slot_BT = block_BT * fmt.tokens_per_block + position_BT % fmt.tokens_per_block
    writes_BT = is_token_BT & table.is_mine_B[:, None]
    mine_B = table.is_mine_B & (counts_B > 0)
    return RowBlocks(
        block_table_BM=table.block_table_BM,
        context_len_B=jnp.where(mine_B, starts_B + counts_B, 0),
        query_start_B=jnp.arange(B, dtype=jnp.int32) * T,
        query_len_B=jnp.where(mine_B, counts_B, 0),
        slot_T=jnp.where(writes_BT, slot_BT, -1).reshape(B * T),
        scales=scales if fmt.bits == 8 else None,
        kv_dtype=table.kv_dtype,
    )
