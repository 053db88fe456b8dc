"""How probable did the model itself find a token: logprobs of the raw logits, before any filter.

vLLM's default (`logprobs_mode="raw_logprobs"`): temperature, penalties and filters do not show, so
that the numbers are the same with and without speculation.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from helios_jax.sampling.rows import largest


class TokenLogprobs(NamedTuple):
    """Of one token per row: logprob_B float32; rank_B int32, 1 for the most probable token."""

    logprob_B: Array
    rank_B: Array


class TopLogprobs(NamedTuple):
    """Of the K most probable tokens per row, descending: logprobs_BK float32, ids_BK int32."""

    logprobs_BK: Array
    ids_BK: Array


class Logprobs(NamedTuple):
    """Of N tokens per row: what the model itself (before any filter) found of them.

    chosen_BN: float32, log-probability of the token that is there.
    ranks_BN: int32, 1 where it is the most probable one.
    top_BNK, top_ids_BNK: the K most probable tokens, descending; K may be 0.

    Entries beyond a row's tokens mean nothing.
    """

    chosen_BN: Array
    ranks_BN: Array
    top_BNK: Array
    top_ids_BNK: Array


def init_logprobs(batch: int, length: int, num_top: int) -> Logprobs:
    """Room for N = `length` tokens per row."""
    return Logprobs(
        chosen_BN=jnp.zeros((batch, length), jnp.float32),
        ranks_BN=jnp.zeros((batch, length), jnp.int32),
        top_BNK=jnp.zeros((batch, length, num_top), jnp.float32),
        top_ids_BNK=jnp.zeros((batch, length, num_top), jnp.int32),
    )


def score_tokens(logits_BV: Array, tokens_B: Array, num_top: int) -> Logprobs:
    """`Logprobs` of one token per row, without the N axis."""
    chosen = chosen_logprobs(logits_BV, tokens_B)
    if num_top:
        top_BK, ids_BK = top_logprobs(logits_BV, num_top)
    else:
        top_BK, ids_BK = jnp.zeros((len(tokens_B), 0)), jnp.zeros((len(tokens_B), 0), jnp.int32)
    return Logprobs(chosen.logprob_B, chosen.rank_B, top_BK, ids_BK)


def chosen_logprobs(logits_BV: Array, tokens_B: Array) -> TokenLogprobs:
    """Log-softmax of the model's logits at the rows' tokens, and the tokens' ranks.

    The rank is the number of tokens at least as probable (vLLM's: of tied tokens all have the last
    one's). A token of -1 gives NaN and rank 0.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    chosen_B1 = jnp.take_along_axis(logits_BV, jnp.maximum(tokens_B, 0)[:, None], axis=1)
    logprob_B = chosen_B1[:, 0] - _log_normaliser(logits_BV)
    rank_B = jnp.sum(jnp.where(logits_BV >= chosen_B1, 1.0, 0.0), axis=1).astype(jnp.int32)
    valid_B = tokens_B >= 0
    return TokenLogprobs(jnp.where(valid_B, logprob_B, jnp.nan), jnp.where(valid_B, rank_B, 0))


def top_logprobs(logits_BV: Array, k: int) -> TopLogprobs:
    """Log-softmax of the model's logits at the k (static) largest; equal ones by id."""
    logits_BV = logits_BV.astype(jnp.float32)
    values_BK, ids_BK = largest(logits_BV, k)
    return TopLogprobs(values_BK - _log_normaliser(logits_BV)[:, None], ids_BK)


def is_finite(logits_BV: Array) -> Array:
    """Which rows a token can be drawn from, bool [B]: no NaN, no +inf, not all -inf.

    Single entries of -inf are legal: ids beyond the real vocabulary are masked so.
    """
    return jnp.isfinite(jnp.max(logits_BV.astype(jnp.float32), axis=1))


def _log_normaliser(logits_BV: Array) -> Array:
    max_B1 = jnp.max(logits_BV, axis=1, keepdims=True)
    return max_B1[:, 0] + jnp.log(jnp.sum(jnp.exp(logits_BV - max_B1), axis=1))
