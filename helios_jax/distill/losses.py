"""How far is a student's distribution from its teacher's, where only the teacher's top is known?

The teacher's mass lies on K listed tokens and on the tail, the rest of the vocabulary taken as one
event. So a divergence here is one between coarser distributions, and never larger than the true one
(data processing inequality); with all tokens listed it is the true one.

A student of fewer tokens has no probability for others: they are listed with id -1. Total
variation, reverse KL and JSD take them as they are (q = 0); forward KL, which would be infinite,
compares with the teacher's distribution on what the student has, renormalised.

Formulas: arXiv 2310.08461 (section 3), 2306.13649; total variation = 1 - sum min(p, q) is 1 minus
the probability that a draft token is accepted (arXiv 2211.17192, corollary 3.6).
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.config import require

# Probabilities below it count as it under a logarithm.
_FLOOR = 1e-7


class Targets(NamedTuple):
    """The teacher at N positions, in the student's ids.

    ids_NK: int32, -1 for a token that the student lacks; None where K is the student's vocabulary,
      in order, and the tail is what it lacks.
    logprobs_NK, tail_N: float, see `Labels`.
    tokens_N: int32, the token that came next; -1 where the student lacks it.
    """

    ids_NK: Array | None
    logprobs_NK: Array
    tail_N: Array
    tokens_N: Array


@dataclass(frozen=True)
class LossWeights:
    """What is minimised: a sum of these, each averaged over the positions that count.

    Attributes:
      forward_kl: sum p log(p / q); wants mass wherever the teacher has some.
      reverse_kl: sum q log(q / p); wants none where it has none.
      jsd: (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2.
      total_variation: 1 - sum min(p, q).
      cross_entropy: -log q(next token), of tokens that the student has.
    """

    forward_kl: float = 1.0
    reverse_kl: float = 0.0
    jsd: float = 0.0
    total_variation: float = 0.0
    cross_entropy: float = 0.0

    def __post_init__(self):
        weights = {field.name: getattr(self, field.name) for field in fields(self)}
        require(
            all(weight >= 0 for weight in weights.values()) and any(weights.values()),
            f"loss weights {weights}: must be at least 0, and one of them more",
        )


def losses(logits_NU: Array, targets: Targets) -> dict[str, Array]:
    """Every loss at every position, [N] each, by the names of `LossWeights`.

    Args:
      logits_NU: the student's, float32 or float64, over its own ids.
    """
    logq_NU = jax.nn.log_softmax(logits_NU, axis=-1)
    ids_NK, logp_NK = targets.ids_NK, targets.logprobs_NK
    p_NK, p_tail_N = jnp.exp(logp_NK), jnp.exp(targets.tail_N)
    if ids_NK is None:
        has_NK = jnp.ones(logp_NK.shape, bool)
        logq_NK = logq_NU
        q_tail_N = jnp.zeros_like(p_tail_N)
        p_known_tail_N = jnp.zeros_like(p_tail_N)
    else:
        has_NK = ids_NK >= 0
        logq_NK = jnp.take_along_axis(logq_NU, jnp.maximum(ids_NK, 0), axis=1)
        q_tail_N = jnp.clip(1 - jnp.sum(jnp.where(has_NK, jnp.exp(logq_NK), 0), axis=1), 0, 1)
        p_known_tail_N = p_tail_N
    q_NK = jnp.where(has_NK, jnp.exp(logq_NK), 0)

    def total(term_NK: Array, term_tail_N: Array) -> Array:
        return jnp.sum(term_NK, axis=1) + term_tail_N

    known_N = total(jnp.where(has_NK, p_NK, 0), p_known_tail_N)
    log_known_N = _log(known_N)
    # The listed tokens' log q is exact however small it is; the tail's is of a difference.
    forward_NK = jnp.where(has_NK, p_NK * (_log(p_NK) - log_known_N[:, None] - logq_NK), 0)
    forward_tail_N = p_known_tail_N * (_log(p_known_tail_N) - log_known_N - _log(q_tail_N))
    forward_N = total(forward_NK, forward_tail_N) / jnp.maximum(known_N, _FLOOR)

    reverse_N = total(
        jnp.where(has_NK, q_NK * (logq_NK - _log(p_NK)), 0),
        q_tail_N * (_log(q_tail_N) - _log(p_tail_N)),
    )

    def to_mean(p: Array, q: Array) -> Array:
        """p log(p / m) + q log(q / m), 0 where both are."""
        log_mean = _log((p + q) / 2)
        return p * (_log(p) - log_mean) + q * (_log(q) - log_mean)

    jsd_N = total(to_mean(p_NK, q_NK), to_mean(p_tail_N, q_tail_N)) / 2
    overlap_N = total(jnp.minimum(p_NK, q_NK), jnp.minimum(p_tail_N, q_tail_N))
    # 1 less the overlap, but 0 where the two are equal and do not sum to 1 exactly.
    variation_N = total(p_NK, p_tail_N) - overlap_N

    tokens_N = targets.tokens_N
    logq_token_N = jnp.take_along_axis(logq_NU, jnp.maximum(tokens_N, 0)[:, None], axis=1)[:, 0]
    return {
        "forward_kl": forward_N,
        "reverse_kl": reverse_N,
        "jsd": jsd_N,
        "total_variation": variation_N,
        "cross_entropy": jnp.where(tokens_N >= 0, -logq_token_N, 0),
    }


def weighted_loss(by_name: dict[str, Array], counts_N: Array, weights: LossWeights) -> Array:
    """The weighted sum of the losses' means over positions where `counts_N` (0 or 1) is set."""
    number = jnp.maximum(jnp.sum(counts_N), 1)
    return sum(
        (
            getattr(weights, name) * jnp.sum(jnp.where(counts_N > 0, values_N, 0)) / number
            for name, values_N in by_name.items()
            if getattr(weights, name)
        ),
        start=jnp.zeros((), counts_N.dtype),
    )


def _log(x: Array) -> Array:
    return jnp.log(jnp.maximum(x, _FLOOR))
