"""How do queries attend to contiguous keys and values? (plain XLA, any platform)"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

# Queries are taken in chunks of this many so that the scores of a long prompt never exist at once.
QUERY_CHUNK = 512
# One query of one row: XLA:CPU has no fast dot of that shape, and from jax 0.11 on fuses plain sums
# well (S = 1024, bfloat16, us a layer: 75 against 102; jax 0.10.2: 440 against 199; 8 rows: 501
# against 286).
_ROW_AS_SUMS = jax.__version_info__ >= (0, 11)


def attention(
    query_BTNH: jax.Array,
    key_BKSH: jax.Array,
    value_BKSH: jax.Array,
    query_positions_BT: jax.Array,
    key_positions_BS: jax.Array,
    *,
    sliding_window: int | None = None,
) -> jax.Array:
    """Causal grouped-query attention, softmax(q k^T / sqrt(H)) v in float32.

    A query at position p sees the keys at positions 0..p, with `sliding_window` W those at
    p-W+1..p; keys at position -1 (unwritten or padding) are seen by nobody. Their values must be
    finite all the same, since the masked weights multiply them by zero: `DenseCache` starts zeroed,
    and the model embeds padding as zeros.

    Args:
      query_BTNH: N a multiple of K; query head n reads KV head n // (N // K).
      key_BKSH, value_BKSH: in the cache's dtype; products accumulate in float32.
      query_positions_BT: int32; a padding query (-1) gets zeros.
      key_positions_BS: int32.

    Returns:
      [B, T, N, H] in the dtype of the query.
    """
    batch, num_queries = query_BTNH.shape[:2]
    attend = partial(
        _attend,
        sliding_window=sliding_window,
        as_sums=_ROW_AS_SUMS and batch * num_queries == 1,
    )
    if num_queries <= QUERY_CHUNK:
        return attend(query_BTNH, key_BKSH, value_BKSH, query_positions_BT, key_positions_BS)
    padding = -num_queries % QUERY_CHUNK
    query_BTNH = jnp.pad(query_BTNH, ((0, 0), (0, padding), (0, 0), (0, 0)))
    query_positions_BT = jnp.pad(query_positions_BT, ((0, 0), (0, padding)), constant_values=-1)

    def chunks(array):
        """[B, T, ...] -> [T / QUERY_CHUNK, B, QUERY_CHUNK, ...]"""
        return array.reshape(array.shape[0], -1, QUERY_CHUNK, *array.shape[2:]).swapaxes(0, 1)

    outputs = lax.map(
        lambda chunk: attend(chunk[0], key_BKSH, value_BKSH, chunk[1], key_positions_BS),
        (chunks(query_BTNH), chunks(query_positions_BT)),
    )
    outputs = outputs.swapaxes(0, 1).reshape(query_BTNH.shape)
    return outputs[:, :num_queries]


# Traced once per shape, not for each layer (0.2 s of a start).
@partial(jax.jit, static_argnames=("sliding_window", "as_sums"), inline=True)
def _attend(
    query_BTNH,
    key_BKSH,
    value_BKSH,
    query_positions_BT,
    key_positions_BS,
    *,
    sliding_window,
    as_sums,
):
    B, T, N, H = query_BTNH.shape
    K = key_BKSH.shape[1]
    group = N // K
    operand = jnp.float32 if as_sums else key_BKSH.dtype

    def product(equation, left, right):
        return jnp.einsum(
            equation, left.astype(operand), right.astype(operand),
            preferred_element_type=jnp.float32,
            precision="highest" if operand == jnp.float32 else None,
        )  # fmt: skip

    # The G heads that share a KV head and the T queries become rows of one product: [B, K, G*T, H].
    query = query_BTNH.astype(jnp.float32) * H**-0.5
    query = query.reshape(B, T, K, group, H).transpose(0, 2, 3, 1, 4).reshape(B, K, group * T, H)
    if as_sums:
        scores = jnp.sum(query[:, :, :, None] * key_BKSH[:, :, None].astype(operand), axis=-1)
    else:
        scores = product("bkmh,bksh->bkms", query, key_BKSH)
    visible_BTS = (key_positions_BS >= 0)[:, None, :] & (
        key_positions_BS[:, None, :] <= query_positions_BT[:, :, None]
    )
    if sliding_window is not None:
        oldest_BT1 = query_positions_BT[:, :, None] - sliding_window
        visible_BTS &= key_positions_BS[:, None, :] > oldest_BT1
    scores = scores.reshape(B, K, group, T, -1)
    scores = jnp.where(visible_BTS[:, None, None], scores, -jnp.inf)
    # A query that sees nothing has the maximum -inf; 0 in its place gives zeros instead of NaN.
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0.0))
    weights = weights.reshape(B, K, group * T, -1)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if as_sums:
        output = jnp.sum(weights[..., None] * value_BKSH[:, :, None].astype(operand), axis=3)
    else:
        output = product("bkms,bksh->bkmh", weights, value_BKSH)
    output = output / jnp.where(total > 0, total, 1.0)
    output = output.reshape(B, K, group, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return output.astype(query_BTNH.dtype)
