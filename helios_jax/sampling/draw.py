"""How is a token drawn: seeded uniform numbers and an inverse distribution function."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from helios_jax.sampling.arrays import SamplingArrays
from helios_jax.sampling.history import TokenHistory
from helios_jax.sampling.rows import blocked, first_argmax, first_true
from helios_jax.sampling.warp import adjust_logits, is_greedy, temper_logits


def sample_tokens(
    logits_BV: Array,
    sampling: SamplingArrays,
    history: TokenHistory | None,
    num_output_tokens_B: Array,
) -> Array:
    """The next token of each row, int32 [B]: drawn from `warp_logits`, or its maximum if greedy.

    A row without a finite maximum (a NaN or infinite logit, or every token barred) gives -1: the
    caller must fail its request. A batch of greedy rows pays for a maximum only.

    Args:
      logits_BV: the model's, any float type.
      sampling: the rows' parameters.
      history: of the tokens before; None where `init_history` gave None.
      num_output_tokens_B: int32, output tokens the row has so far: the position of the one drawn,
        which with the row's seed makes its random numbers.
    """

    def draw(adjusted_BV):
        weights_BV = jnp.exp(temper_logits(adjusted_BV, sampling))
        return sample(weights_BV, uniforms(sampling.seed_B2, num_output_tokens_B))

    with jax.named_scope("sampler"):
        adjusted_BV = adjust_logits(logits_BV, sampling, history, num_output_tokens_B)
        return lax.cond(jnp.all(is_greedy(sampling)), first_argmax, draw, adjusted_BV)


def uniforms(seed_B2: Array, position_B: Array, stream: int | Array = 0) -> Array:
    """Two random numbers in [0, 1) for each row, float32 [B, 2], by seed and position alone.

    key = fold_in(fold_in(seed, position), stream), threefry: a row's numbers are the same alone and
    in any batch.

    Args:
      seed_B2: uint32, high word first.
      position_B: int32, index of the token among the row's output tokens.
      stream: which of several independent draws at one position; plain sampling is 0. A scalar
        that may be traced.
    """

    def row(seed_2, position):
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), stream)
        return jax.random.uniform(key, (2,), jnp.float32)

    return jax.vmap(row)(seed_B2, position_B)


def sample(weights_BV: Array, uniform_B2: Array) -> Array:
    """One id per row with probability weight / sum of weights, int32 [B].

    Inverse distribution function in two levels of about sqrt(V): the first number picks a block of
    ids by the blocks' sums, the second an id within it. Two numbers because one of 23 bits could
    not reach every token of a large vocabulary. An id of weight 0 is never drawn, whatever the
    numbers, 0 and 1 included.

    Args:
      weights_BV: float32 >= 0, of any finite sum > 0 (`probs`, or a residual).
      uniform_B2: float32 in [0, 1].

    Returns:
      ids; -1 where the weights have no finite positive sum.
    """
    batch, vocab_size = weights_BV.shape
    blocks_BNC = blocked(weights_BV, _block_size(vocab_size), 0.0)
    block_B = _inverse(jnp.sum(blocks_BNC, axis=2), uniform_B2[:, 0])
    row_B = jnp.arange(batch, dtype=jnp.int32)
    within_B = _inverse(blocks_BNC[row_B, block_B], uniform_B2[:, 1])
    ids_B = block_B * blocks_BNC.shape[2] + within_B
    return jnp.where((block_B >= 0) & (within_B >= 0), ids_B, -1)


def _inverse(weights_BN: Array, uniform_B: Array) -> Array:
    """The first index whose cumulated weight exceeds u times the total, among positive weights.

    The last positive one where rounding (or u = 1) leaves none; -1 where the total is not a finite
    positive number.
    """
    cumulated_BN = jnp.cumsum(weights_BN, axis=1)
    total_B1 = cumulated_BN[:, -1:]
    positive_BN = weights_BN > 0
    index_B = first_true(positive_BN & (cumulated_BN > uniform_B[:, None] * total_B1))
    ids_N = jnp.arange(weights_BN.shape[1], dtype=jnp.int32)
    last_B = jnp.max(jnp.where(positive_BN, ids_N, -1), axis=1)
    index_B = jnp.minimum(index_B, last_B)
    return jnp.where(jnp.isfinite(total_B1[:, 0]), index_B, -1)


def _block_size(vocab_size: int) -> int:
    """A power of two near sqrt(V), one that divides V if such a one is within a factor of 4."""
    size = 1 << ((vocab_size - 1).bit_length() + 1) // 2
    for smaller in (size, size // 2, size // 4):
        if smaller and vocab_size % smaller == 0:
            return smaller
    return size
