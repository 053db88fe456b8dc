"""What distribution is a token drawn from: the model's logits after every filter, in one order.

    allowed ids, bad words, min_tokens | logit_bias | repetition, frequency, presence penalties
    | temperature | min-p | top-k | top-p

the same for plain decoding and for speculative verification, and vLLM's. The parts before the
temperature (`adjust_logits`) act on greedy rows too.

Measured per decode step with a vocabulary of 49,152, see `helios_jax.sampling`.
"""

import jax.numpy as jnp
from jax import Array, lax

from helios_jax.sampling.arrays import MinTokens, Penalties, SamplingArrays
from helios_jax.sampling.history import TokenCounts, TokenHistory
from helios_jax.sampling.params import GREEDY_TEMPERATURE
from helios_jax.sampling.rows import first_argmax
from helios_jax.sampling.threshold import keep_threshold


def warp_logits(
    logits_BV: Array,
    sampling: SamplingArrays,
    history: TokenHistory | None,
    num_output_tokens_B: Array,
) -> Array:
    """The logits of the distribution that the next token of each row is drawn from.

    Args:
      logits_BV: the model's, any float type.
      sampling: the rows' parameters.
      history: of the tokens before, `init_history`'s; None where it gave None.
      num_output_tokens_B: int32, output tokens the row has so far.

    Returns:
      float32 [B, V]: the largest entry of a row is 0, a token that cannot be drawn is -inf; their
      softmax (`probs`) is the distribution. A greedy row is one-hot at its most probable token, the
      lowest id of equal ones. A row without a finite maximum (a NaN or infinite logit, or every
      token barred) is NaN.
    """
    adjusted_BV = adjust_logits(logits_BV, sampling, history, num_output_tokens_B)
    return temper_logits(adjusted_BV, sampling)


def adjust_logits(
    logits_BV: Array,
    sampling: SamplingArrays,
    history: TokenHistory | None,
    num_output_tokens_B: Array,
) -> Array:
    """The first half of `warp_logits`: everything before the temperature, float32 [B, V].

    Barred tokens are -inf. Parts of `sampling` that are None cost nothing.
    """
    x_BV = logits_BV.astype(jnp.float32)
    if sampling.allowed_BV is not None:
        x_BV = jnp.where(sampling.allowed_BV, x_BV, -jnp.inf)
    if sampling.bad_words_BWX is not None:
        if history is None or history.recent_BX is None:
            raise ValueError(
                "history: rows with bad words need their last tokens; pass init_history(...)"
            )
        x_BV = _bar(x_BV, _bad_word_ids(sampling.bad_words_BWX, history.recent_BX))
    if sampling.min_tokens is not None:
        x_BV = _bar(x_BV, _early_ids(sampling.min_tokens, num_output_tokens_B))
    if sampling.logit_bias is not None:
        row_B1, ids_BI = _scatter_index(x_BV, sampling.logit_bias.ids_BI)
        x_BV = x_BV.at[row_B1, ids_BI].add(sampling.logit_bias.values_BI, mode="drop")
    if sampling.penalties is not None:
        if history is None or history.counts is None:
            raise ValueError(
                "history: rows with penalties need their token counts; pass init_history(...)"
            )
        x_BV = _penalise(x_BV, sampling.penalties, history.counts)
    return x_BV


def temper_logits(adjusted_BV: Array, sampling: SamplingArrays) -> Array:
    """The second half of `warp_logits`: temperature, min-p, top-k, top-p; greedy rows one-hot."""
    greedy_B = is_greedy(sampling)
    # The maximum first: (1e4 - 1e4) / 1e-5 is 0, exp(1e4 / 1e-5) is not a number to divide by.
    shifted_BV = adjusted_BV - jnp.max(adjusted_BV, axis=1, keepdims=True)
    temperature_B = jnp.where(greedy_B, 1.0, sampling.temperature_B)
    y_BV = shifted_BV / temperature_B[:, None]
    threshold_B = keep_threshold(
        y_BV,
        jnp.where(greedy_B, 0, sampling.top_k_B),
        jnp.where(greedy_B, 1.0, sampling.top_p_B),
        jnp.where(greedy_B, 0.0, sampling.min_p_B),
    )
    best_B1 = first_argmax(adjusted_BV)[:, None]
    ids_V = jnp.arange(adjusted_BV.shape[1], dtype=jnp.int32)
    keep_BV = jnp.where(greedy_B[:, None], ids_V == best_B1, y_BV >= threshold_B[:, None])
    # first_argmax is -1 where the maximum is not finite.
    return jnp.where(best_B1 >= 0, jnp.where(keep_BV, y_BV, -jnp.inf), jnp.nan)


def probs(warped_BV: Array) -> Array:
    """The probabilities of warped logits, float32 [B, V]: softmax of rows whose maximum is 0."""
    weights_BV = jnp.exp(warped_BV)
    return weights_BV / jnp.sum(weights_BV, axis=1, keepdims=True)


def is_greedy(sampling: SamplingArrays) -> Array:
    """Which rows take their most probable token, bool [B]."""
    return sampling.temperature_B < GREEDY_TEMPERATURE


def _penalise(x_BV: Array, penalties: Penalties, counts: TokenCounts) -> Array:
    repetition_B1, presence_B1, frequency_B1 = (penalty_B[:, None] for penalty_B in penalties)

    def penalise(x_BV):
        count_BV = counts.output_BV.astype(jnp.float32)
        in_output_BV = count_BV > 0
        factor_BV = jnp.where(in_output_BV | counts.in_prompt_BV, repetition_B1, 1.0)
        x_BV = jnp.where(x_BV > 0, x_BV / factor_BV, x_BV * factor_BV)
        x_BV = x_BV - frequency_B1 * count_BV
        return x_BV - jnp.where(in_output_BV, presence_B1, 0.0)

    active = jnp.any((repetition_B1 != 1) | (presence_B1 != 0) | (frequency_B1 != 0))
    # A branch also gives its result a buffer of its own: recomputed inside each user, the products
    # may be fused into different roundings, and then no entry would equal the maximum.
    return lax.cond(active, penalise, lambda x_BV: x_BV, x_BV)


def _bad_word_ids(words_BWX: Array, recent_BX: Array) -> Array:
    """The ids that would complete a bad word, int32 [B, W]; -1 where none would."""
    before_BWX = words_BWX[:, :, :-1]
    matches_BWX = (before_BWX < 0) | (before_BWX == recent_BX[:, None, :])
    return jnp.where(jnp.all(matches_BWX, axis=2), words_BWX[:, :, -1], -1)


def _early_ids(min_tokens: MinTokens, num_output_tokens_B: Array) -> Array:
    """The ids that would end a row before its minimum, int32 [B, E]; -1 where none would."""
    early_B = num_output_tokens_B < min_tokens.min_tokens_B
    return jnp.where(early_B[:, None], min_tokens.suppressed_ids_BE, -1)


def _bar(x_BV: Array, ids_BI: Array) -> Array:
    """x with -inf at the ids >= 0."""
    row_B1, ids_BI = _scatter_index(x_BV, ids_BI)
    return x_BV.at[row_B1, ids_BI].set(-jnp.inf, mode="drop")


def _scatter_index(x_BV: Array, ids_BI: Array) -> tuple[Array, Array]:
    """Row and column indices of ids; a negative id is sent past the end, where scatters drop it."""
    batch, vocab_size = x_BV.shape
    row_B1 = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return row_B1, jnp.where(ids_BI < 0, vocab_size, ids_BI)
