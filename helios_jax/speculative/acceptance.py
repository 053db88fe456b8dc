"""Which draft tokens are kept, and which token follows them: exact rejection sampling.

With p the target's and q the draft's distribution at a position, both warped alike, the draft token
x ~ q is accepted with probability min(1, p(x) / q(x)). At the first rejection the token is drawn
from max(p - q, 0), normalised, instead ("recovered"), and the rest of the draft is dropped; where
all are accepted, one more token is drawn from p at the next position ("bonus"). What comes out has
the law p, whatever q is (arXiv 2211.17192, algorithm 1 and appendix A.1; arXiv 2302.01318,
algorithm 2).

Random numbers are a row's own. Of a round that begins with output token i of its row, draft token j
is drawn with stream 1 + 2j of position i, and tested with stream 2 + 2j; the recovered or bonus
token is drawn with stream 0 of its own position, as plain sampling draws it. Rounds begin at
different positions, so that no number is used twice, not even for drafts that were dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.sampling import sample, uniforms


class RowKey(NamedTuple):
    """Where a round's random numbers come from: seed_B2 uint32; position_B int32, the index among
    the row's output tokens of the first token that the round may emit."""

    seed_B2: Array
    position_B: Array


class Verdict(NamedTuple):
    """num_accepted_B: int32, leading draft tokens that are kept; next_token_B: int32, the recovered
    or bonus token after them, -1 where none can be drawn (p is NaN)."""

    num_accepted_B: Array
    next_token_B: Array


# (p_BTV, q_BJV, tokens_BJ, key, num_draft_B) -> Verdict, as `accept`. Where p is one-hot, a rule
# must keep exactly the tokens that p names: batches of greedy rows do not ask it.
AcceptanceRule = Callable[[Array, Array | None, Array, RowKey, Array], Verdict]


def draft_uniforms(key: RowKey, place: int | Array) -> Array:
    """The two numbers that draft token `place` is drawn with, float32 [B, 2]."""
    return uniforms(key.seed_B2, key.position_B, 1 + 2 * place)


def acceptance_uniforms(key: RowKey, num_draft_tokens: int) -> Array:
    """The numbers in [0, 1) that the draft tokens are tested with, float32 [B, J]."""
    stream_J = 2 + 2 * jnp.arange(num_draft_tokens, dtype=jnp.int32)
    draw = jax.vmap(lambda stream: uniforms(key.seed_B2, key.position_B, stream), out_axes=1)
    return draw(stream_J)[:, :, 0]


def accept(
    p_BTV: Array, q_BJV: Array | None, tokens_BJ: Array, key: RowKey, num_draft_B: Array
) -> Verdict:
    """The exact rule of this module's docstring.

    Args:
      p_BTV: float32, T = J + 1: the target's probabilities at the draft's positions and after them.
      q_BJV: float32, the probabilities that the draft tokens were drawn from. None where they were
        not drawn but chosen: q is then one-hot, and no array of its size is made.
      tokens_BJ: int32.
      num_draft_B: int32 in 0..J; further tokens are not looked at, nor is p after them.

    A comparison is strict, so that u = 0 does not accept a token of probability 0; one with NaN is
    a rejection, and the draw from NaN gives -1.
    """
    J = tokens_BJ.shape[1]
    ids_BJ = jnp.maximum(tokens_BJ, 0)
    is_draft_BJ = jnp.arange(J) < num_draft_B[:, None]
    p_BJ = at_tokens(p_BTV[:, :J], ids_BJ)
    q_BJ = jnp.ones_like(p_BJ) if q_BJV is None else at_tokens(q_BJV, ids_BJ)
    is_accepted_BJ = is_draft_BJ & (acceptance_uniforms(key, J) * q_BJ < p_BJ)
    num_accepted_B = count_leading(is_accepted_BJ)

    p_BV = _at(p_BTV, num_accepted_B)
    if J == 0:
        weights_BV = p_BV
    else:
        place_B = jnp.minimum(num_accepted_B, J - 1)
        if q_BJV is None:
            is_token_BV = jnp.arange(p_BV.shape[1]) == jnp.take_along_axis(
                ids_BJ, place_B[:, None], axis=1
            )
            residual_BV = jnp.where(is_token_BV, 0.0, p_BV)
        else:
            residual_BV = jnp.maximum(p_BV - _at(q_BJV, place_B), 0.0)
        is_recovered_B = num_accepted_B < num_draft_B
        # Equal p and q leave nothing to recover from; only rounding can then have rejected.
        is_recovered_B &= jnp.sum(residual_BV, axis=1) > 0
        weights_BV = jnp.where(is_recovered_B[:, None], residual_BV, p_BV)
    uniform_B2 = uniforms(key.seed_B2, key.position_B + num_accepted_B)
    return Verdict(num_accepted_B, sample(weights_BV, uniform_B2))


def count_leading(mask_BJ: Array) -> Array:
    """How many entries of each row are set before the first that is not, int32 [B]."""
    return jnp.sum(jnp.cumprod(mask_BJ.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def at_tokens(values_BJV: Array, tokens_BJ: Array) -> Array:
    """values[b, j, tokens[b, j]], [B, J]."""
    return jnp.take_along_axis(values_BJV, tokens_BJ[..., None], axis=2)[..., 0]


def _at(values_BTV: Array, place_B: Array) -> Array:
    """values[b, place[b]], [B, V]."""
    return jnp.take_along_axis(values_BTV, place_B[:, None, None], axis=1)[:, 0]
