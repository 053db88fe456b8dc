"""paged_attention in plain jnp: what every backend must compute, and the path a CPU serves.

Keys are taken a tile at a time, so that work follows the keys there are and not the width of the
block table. Few queries a row (decode, verify): the tiles of all rows, several a turn. Many
(prefill): tiles of queries one after the other, so that scores never exist for a whole prompt.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.kv_format import from_words
from pallas_kernels.paged_attention.problem import Problem

# Queries a tile of the prefill path holds, and the most for which rows are taken all at once.
QUERY_TILE = 64
FEW_QUERIES = 16
# Keys of a tile, and the most tiles of few queries that are computed side by side.
KEY_TILE = 256
TILES_AT_ONCE = 8


class _Part(NamedTuple):
    """Attention to some of the keys: R = Q * G queries of each KV head.

    largest: of the scores, -inf where none is visible, [..., K, R]; total: of exp(score - largest);
    out: the sum of the values, weighted so, [..., K, R, H].
    """

    largest: Array
    total: Array
    out: Array


def attention(
    q_TNH, k_pool, v_pool, block_table_BM, context_len_B, query_start_B, query_len_B,
    k_scale_K, v_scale_K, block_offset, tree_mask_BJJ, problem: Problem,
):  # fmt: skip
    """See `api.paged_attention`. Returns [T, N, H]; tokens of no row are zeros."""
    B, block_tokens = problem.num_rows, problem.format.tokens_per_block
    tile_blocks = min(KEY_TILE // block_tokens, problem.max_blocks)
    tile_keys = tile_blocks * block_tokens
    max_tiles = -(-problem.max_blocks // tile_blocks)
    table_BM = jnp.pad(block_table_BM, ((0, 0), (0, max_tiles * tile_blocks - problem.max_blocks)))

    def queries(b, first_query, num_queries):
        """A row's queries first_query .. + num_queries: [Q, N, H], places and positions, [Q]."""
        index = first_query + jnp.arange(num_queries)
        is_query = index < query_len_B[b]
        token = jnp.where(is_query, query_start_B[b] + index, problem.num_tokens)
        position = jnp.where(is_query, context_len_B[b] - query_len_B[b] + index, -1)
        return q_TNH.at[token].get(mode="fill", fill_value=0), token, position, index

    def part(b, tile, q, position, index) -> _Part:
        """What queries of row b see in one tile of its keys."""
        context_len = context_len_B[b]
        first = tile * tile_keys
        s = first + jnp.arange(tile_keys)
        written = s < context_len
        in_use = first + jnp.arange(tile_blocks) * block_tokens < context_len
        table_M = lax.dynamic_slice(table_BM, (b, tile * tile_blocks), (1, tile_blocks))[0]
        blocks = jnp.where(in_use, table_M + block_offset, 0)
        keys = _gather(k_pool, blocks, problem, k_scale_K)
        values = _gather(v_pool, blocks, problem, v_scale_K)
        values = jnp.where(written[None, :, None], values, 0)
        visible = (s[None] <= position[:, None]) & written[None]
        if problem.sliding_window is not None:
            visible &= s[None] > position[:, None] - problem.sliding_window
        if tree_mask_BJJ is not None:
            tree_JJ = tree_mask_BJJ[b]
            J = tree_JJ.shape[-1]
            new = s - (context_len - query_len_B[b])
            ancestors = tree_JJ[jnp.clip(index, 0, J - 1)][:, jnp.clip(new, 0, J - 1)]
            visible &= (new < 0)[None] | ancestors
        return _attend(q, keys, values, visible, problem)

    def write(out, outputs, tokens):
        return out.at[tokens].set(outputs, mode="drop")

    out = jnp.zeros_like(q_TNH)
    Q = problem.max_query_len
    if Q <= FEW_QUERIES:
        q_BQNH, token_BQ, position_BQ, index_BQ = jax.vmap(lambda b: queries(b, 0, Q))(
            jnp.arange(B)
        )

        def parts(b_W, tile_W) -> _Part:
            return jax.vmap(part)(b_W, tile_W, q_BQNH[b_W], position_BQ[b_W], index_BQ[b_W])

        if max_tiles == 1:
            whole = parts(jnp.arange(B), jnp.zeros(B, jnp.int32))
        else:
            whole = _over_tiles(parts, context_len_B, query_len_B, tile_keys, max_tiles, problem)
        outputs = jax.vmap(lambda part: _normalize(part, problem))(whole)
        return write(
            out, outputs.reshape(-1, *q_TNH.shape[1:]).astype(q_TNH.dtype), token_BQ.reshape(-1)
        )
    query_tiles_B = -(-query_len_B // QUERY_TILE)
    end_B = jnp.cumsum(query_tiles_B)

    # As many turns as there are tiles; a `cond` for those that are not would have the pools copied.
    def query_tile(t, out):
        b = jnp.searchsorted(end_B, t, side="right")
        first = (t - (end_B[b] - query_tiles_B[b])) * QUERY_TILE
        q, token, position, index = queries(b, first, QUERY_TILE)

        def add(tile, so_far: _Part) -> _Part:
            new = part(b, tile, q, position, index)
            return _sum(jax.tree.map(lambda *x: jnp.stack(x), so_far, new))

        num_tiles = jnp.max(position) // tile_keys + 1
        attended = lax.fori_loop(0, num_tiles, add, _nothing((), QUERY_TILE, problem))
        return write(out, _normalize(attended, problem).astype(out.dtype), token)

    return lax.fori_loop(0, end_B[B - 1], query_tile, out)


def _over_tiles(parts, context_len_B, query_len_B, tile_keys, max_tiles, problem) -> _Part:
    """All keys of all rows: every turn takes the next tiles, whichever rows they are of.

    A row's tiles are added up in their order at the end, whenever they were computed, so that the
    other rows do not change its rounding.
    """
    B = problem.num_rows
    W = min(max(B, 4), TILES_AT_ONCE)
    tiles_B = jnp.where(query_len_B > 0, -(-context_len_B // tile_keys), 0)
    end_B = jnp.cumsum(tiles_B)

    def turn(t, found: _Part) -> _Part:
        place_W = t * W + jnp.arange(W)
        b_W = jnp.minimum(jnp.searchsorted(end_B, place_W, side="right"), B - 1)
        tile_W = jnp.where(place_W < end_B[-1], place_W - (end_B - tiles_B)[b_W], 0)
        new = parts(b_W, tile_W)
        b_W = jnp.where(place_W < end_B[-1], b_W, B)
        return jax.tree.map(lambda all_, x: all_.at[tile_W, b_W].set(x, mode="drop"), found, new)

    nothing = _nothing((max_tiles, B), problem.max_query_len, problem)
    return _sum(lax.fori_loop(0, -(-end_B[-1] // W), turn, nothing))


def _nothing(shape, num_queries: int, problem: Problem) -> _Part:
    shape = (*shape, problem.num_kv_heads, num_queries * problem.group)
    zeros = jnp.zeros(shape, jnp.float32)
    return _Part(jnp.full(shape, -jnp.inf), zeros, jnp.zeros((*shape, problem.head_dim)))


def _sum(parts: _Part) -> _Part:
    """Attention to all the keys of the parts along the first axis."""
    largest = jnp.max(parts.largest, axis=0)
    # Where nothing is visible nor finite, the weights are what they are.
    is_finite = jnp.isfinite(parts.largest)
    shift = jnp.where(is_finite, parts.largest - jnp.where(jnp.isfinite(largest), largest, 0), 0)
    weight = jnp.exp(shift)
    return _Part(
        largest,
        jnp.sum(weight * parts.total, axis=0),
        jnp.sum(weight[..., None] * parts.out, axis=0),
    )


def _gather(pool, blocks_M, problem: Problem, scale_K):
    """The row's keys or values, [K, S, H]: float32, or the stored dtype where 16 bits unscaled."""
    fmt = problem.format
    words = pool[blocks_M].reshape(
        blocks_M.shape[0], problem.num_kv_heads, fmt.tokens_per_block, -1
    )
    words = jnp.moveaxis(words, 1, 0).reshape(
        problem.num_kv_heads, blocks_M.shape[0] * fmt.tokens_per_block, words.shape[-1]
    )
    values = from_words(words, problem.kv_dtype)
    if scale_K is not None:
        values = values.astype(jnp.float32) * scale_K.astype(jnp.float32)[:, None, None]
    return values


def _attend(q_QNH, keys_KSH, values_KSH, visible_QS, problem: Problem) -> _Part:
    """The visible keys' part of softmax(q k^T) v."""
    Q, K, G, H = q_QNH.shape[0], problem.num_kv_heads, problem.group, problem.head_dim
    # One axis of queries (heads and tokens): with two, XLA:CPU refuses some bfloat16 products.
    q_KRH = jnp.moveaxis(q_QNH.reshape(Q, K, G, H), 1, 0).reshape(K, Q * G, H)
    # bfloat16 against bfloat16 is the fast product on a CPU, but for few queries: 8 rows of 256
    # keys, 30 layers, took 9.6 ms so and 6.7 in float32 (Zen 5; jax 0.10.2: 7.9 and 6.8).
    native = q_KRH.dtype == keys_KSH.dtype == values_KSH.dtype == jnp.bfloat16
    native &= problem.max_query_len > FEW_QUERIES
    dtype = jnp.bfloat16 if native else jnp.float32
    precision = None if native else lax.Precision.HIGHEST
    visible = jnp.repeat(visible_QS, G, axis=0)
    scores = jnp.einsum(
        "krh,ksh->krs", q_KRH.astype(dtype), keys_KSH.astype(dtype),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    scores = scores * problem.softmax_scale
    if problem.soft_cap is not None:
        scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, 0)[..., None])
    weights = jnp.where(visible, weights, 0)
    out = jnp.einsum(
        "krs,ksh->krh", weights.astype(dtype), values_KSH.astype(dtype),
        precision=precision, preferred_element_type=jnp.float32,
    )  # fmt: skip
    return _Part(largest, jnp.sum(weights, axis=-1), out)


def _normalize(part: _Part, problem: Problem) -> Array:
    """The outputs [Q, N, H]; a query that sees no key gets zeros, a NaN stays one."""
    K, R, H = part.out.shape
    total = part.total[..., None]
    # Whoever draws from a NaN must notice.
    out = jnp.where(total == 0, 0, part.out / jnp.where(total == 0, 1, total))
    out = jnp.moveaxis(out.reshape(K, R // problem.group, problem.group, H), 0, 1)
    return out.reshape(R // problem.group, problem.num_heads, H)
