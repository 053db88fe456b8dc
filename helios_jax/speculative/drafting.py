"""How are draft tokens drawn one after the other from a draft model's warped distribution?"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from helios_jax.sampling import (
    SamplingArrays,
    TokenHistory,
    adjust_logits,
    is_greedy,
    sample,
    temper_logits,
    update_history,
)
from helios_jax.sampling.rows import first_argmax
from helios_jax.speculative.acceptance import RowKey, draft_uniforms
from helios_jax.speculative.proposer import Draft

# (memory) -> (logits_BV, memory): after each row's last known token.
Start = Callable[[Any], tuple[Array, Any]]
# (memory, tokens_B, place, active_B) -> (logits_BV, memory): after draft token `place` (from 0).
Forward = Callable[[Any, Array, Array, Array], tuple[Array, Any]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Drafting:
    """place: the draft token drawn next; memory: what `start` and `forward` carry; active_B: bool,
    rows that go on; tokens_BJ, q_BJV, num_draft_B: the draft so far."""

    place: Array
    memory: Any
    history: TokenHistory | None
    active_B: Array
    tokens_BJ: Array
    q_BJV: Array | None
    num_draft_B: Array


def draw_drafts(
    start: Start,
    forward: Forward,
    memory: Any,
    sampling: SamplingArrays,
    history: TokenHistory | None,
    num_output_tokens_B: Array,
    num_draft_B: Array,
    *,
    max_num_draft_tokens: int,
    vocab_size: int,
    greedy: bool = False,
    min_confidence: float = 0.0,
) -> tuple[Draft, Any]:
    """Draws up to `num_draft_B` tokens a row from `warp_logits` of a draft model's logits.

    The same parameters, history and positions as the target's, so that q is warped as p is. As many
    passes as the longest draft has tokens, none where all are 0. In a batch of greedy rows the
    tokens are maxima, and q_BJV (zeros) is not computed.

    Args:
      start, forward, memory: the draft model; see `Start` and `Forward`. `forward` is asked about
        the rows in `active_B`; what it gives for others is not used.
      max_num_draft_tokens: J, static, >= 1.
      vocab_size: the target's V. Of a draft's further logits nothing is drawn; missing ones are
        never drawn either.
      greedy: take the most probable token in every row; q is then None.
      min_confidence: a row's draft ends before a token for which the draft model's own distribution
        (of the raw logits) has no probability as large as this; 0 never.

    Returns:
      The draft, and the memory.
    """
    B = len(num_draft_B)
    J = max_num_draft_tokens

    def draw(drafting: _Drafting, logits_BV: Array, memory: Any) -> _Drafting:
        place = drafting.place
        logits_BV = fit_vocabulary(logits_BV, vocab_size)
        active_B = drafting.active_B
        if min_confidence > 0:
            active_B &= _confidence(logits_BV) >= min_confidence
        tokens_B, q_BV = _draw(
            logits_BV, sampling, drafting.history, num_output_tokens_B, place, greedy
        )
        active_B &= tokens_B >= 0
        tokens_B = jnp.where(active_B, tokens_B, -1)
        q_BJV = drafting.q_BJV
        if q_BJV is not None:
            q_BJV = lax.dynamic_update_slice_in_dim(q_BJV, q_BV[:, None], place, axis=1)
        return _Drafting(
            place=place + 1,
            memory=memory,
            history=update_history(drafting.history, tokens_B, active_B),
            active_B=active_B & (place + 1 < num_draft_B),
            tokens_BJ=lax.dynamic_update_slice_in_dim(
                drafting.tokens_BJ, tokens_B[:, None], place, axis=1
            ),
            q_BJV=q_BJV,
            num_draft_B=drafting.num_draft_B + active_B,
        )

    def first(_, drafting: _Drafting) -> _Drafting:
        return draw(drafting, *start(drafting.memory))

    def step(drafting: _Drafting) -> _Drafting:
        last_B = lax.dynamic_index_in_dim(
            drafting.tokens_BJ, drafting.place - 1, axis=1, keepdims=False
        )
        logits_BV, memory = forward(drafting.memory, last_B, drafting.place - 1, drafting.active_B)
        return draw(dataclasses.replace(drafting, memory=memory), logits_BV, memory)

    drafting = _Drafting(
        place=jnp.int32(0),
        memory=memory,
        history=history,
        active_B=num_draft_B > 0,
        tokens_BJ=jnp.full((B, J), -1, jnp.int32),
        q_BJV=None if greedy else jnp.zeros((B, J, vocab_size), jnp.float32),
        num_draft_B=jnp.zeros(B, jnp.int32),
    )
    # A loop of no turn or one: under `cond` XLA copies KV pools.
    turns = jnp.any(drafting.active_B).astype(jnp.int32)
    drafting = lax.fori_loop(0, turns, first, drafting)
    drafting = lax.while_loop(lambda drafting: jnp.any(drafting.active_B), step, drafting)
    return Draft(drafting.tokens_BJ, drafting.num_draft_B, drafting.q_BJV), drafting.memory


def fit_vocabulary(logits_BV: Array, vocab_size: int) -> Array:
    """Logits over `vocab_size` ids: padded with -inf, or cut."""
    missing = vocab_size - logits_BV.shape[1]
    if missing > 0:
        return jnp.pad(logits_BV, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    return logits_BV[:, :vocab_size]


def _draw(
    logits_BV: Array, sampling: SamplingArrays, history: TokenHistory | None,
    num_output_tokens_B: Array, place: Array, greedy: bool,
) -> tuple[Array, Array]:  # fmt: skip
    """Tokens [B], -1 where none can be drawn, and what they were drawn from [B, V]."""
    adjusted_BV = adjust_logits(logits_BV, sampling, history, num_output_tokens_B + place)

    def most_probable(adjusted_BV: Array):
        return first_argmax(adjusted_BV), jnp.zeros_like(adjusted_BV)

    def sampled(adjusted_BV: Array):
        weights_BV = jnp.exp(temper_logits(adjusted_BV, sampling))
        key = RowKey(sampling.seed_B2, num_output_tokens_B)
        tokens_B = sample(weights_BV, draft_uniforms(key, place))
        return tokens_B, weights_BV / jnp.sum(weights_BV, axis=1, keepdims=True)

    if greedy:
        return most_probable(adjusted_BV)
    return lax.cond(jnp.all(is_greedy(sampling)), most_probable, sampled, adjusted_BV)


def _confidence(logits_BV: Array) -> Array:
    """The largest probability of the model's own distribution, float32 [B]."""
    logits_BV = logits_BV.astype(jnp.float32)
    shifted_BV = logits_BV - jnp.max(logits_BV, axis=1, keepdims=True)
    return 1 / jnp.sum(jnp.exp(shifted_BV), axis=1)
