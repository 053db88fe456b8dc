"""What does the target's pass over a draft say: which tokens come out of the round?"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from helios_jax.sampling import (
    SamplingArrays,
    TokenHistory,
    adjust_logits,
    is_greedy,
    position_rows,
    probs,
    temper_logits,
)
from helios_jax.sampling.rows import first_argmax
from helios_jax.speculative.acceptance import (
    AcceptanceRule,
    RowKey,
    Verdict,
    accept,
    at_tokens,
    count_leading,
)
from helios_jax.speculative.proposer import Draft


class RoundRecord(NamedTuple):
    """All that happened to the drafts of one round.

    tokens_BJ: int32, the draft tokens, -1 beyond num_draft_B of them.
    p_BJ, q_BJ: float32, their probabilities under target and draft, both warped; of greedy rows 1
      or 0. Beyond the draft they mean nothing.
    num_draft_B, num_accepted_B: int32.
    next_token_B: int32, the token after the accepted ones; -1 where none could be drawn.
    is_bonus_B: bool, whether it is a bonus token (all were accepted) or a recovered one.
    """

    tokens_BJ: Array
    p_BJ: Array
    q_BJ: Array
    num_draft_B: Array
    num_accepted_B: Array
    next_token_B: Array
    is_bonus_B: Array

    @property
    def is_spoilt_B(self) -> Array:
        """Whether a NaN met a row that had drafts, bool [B]. It may be theirs: attention does not
        keep one token's NaN from another of the same pass. The row must be asked without drafts.
        """
        return (self.next_token_B < 0) & (self.num_draft_B > 0)

    @property
    def num_drawn_B(self) -> Array:
        """How many tokens of `drawn_BT` count: one more than accepted, none more if spoilt."""
        return self.num_accepted_B + ~self.is_spoilt_B

    @property
    def drawn_BT(self) -> Array:
        """The round's tokens, int32 [B, J + 1]: the first `num_drawn_B` count."""
        place_T = jnp.arange(self.tokens_BJ.shape[1] + 1)
        drafts_BT = jnp.pad(self.tokens_BJ, ((0, 0), (0, 1)), constant_values=-1)
        is_next_BT = place_T == self.num_accepted_B[:, None]
        return jnp.where(is_next_BT, self.next_token_B[:, None], drafts_BT)


def verify(
    logits_BTV: Array,
    draft: Draft,
    sampling: SamplingArrays,
    history: TokenHistory | None,
    num_output_tokens_B: Array,
    rule: AcceptanceRule = accept,
) -> RoundRecord:
    """Judges a draft by the target's logits.

    p is `warp_logits` at every position, its history advanced through the draft tokens before, so
    that every sampling parameter acts as in plain decoding; a row of no draft tokens draws exactly
    the token that `sample_tokens` would. A batch of greedy rows pays for maxima only, and its
    tokens are the target's argmax.

    Args:
      logits_BTV: the target's, T = J + 1: after the last known token, and after each draft token.
      draft: see `Draft`; J may be 0.
      sampling, history, num_output_tokens_B: as `sample_tokens`' arguments before the round.
      rule: decides between p and q.
    """
    B, T, V = logits_BTV.shape
    J = T - 1
    is_draft_BJ = jnp.arange(J) < draft.num_draft_B[:, None]
    tokens_BJ = jnp.where(is_draft_BJ, draft.tokens_BJ, -1)
    ids_BJ = jnp.maximum(tokens_BJ, 0)
    rows = position_rows(sampling, history, num_output_tokens_B, tokens_BJ)
    adjusted = adjust_logits(logits_BTV.reshape(B * T, V), *rows)

    def greedy(adjusted: Array):
        best_BT = first_argmax(adjusted).reshape(B, T)
        is_best_BJ = is_draft_BJ & (best_BT[:, :J] == tokens_BJ)
        num_accepted_B = count_leading(is_best_BJ)
        next_B = jnp.take_along_axis(best_BT, num_accepted_B[:, None], axis=1)[:, 0]
        return Verdict(num_accepted_B, next_B), is_best_BJ.astype(jnp.float32)

    def sampled(adjusted: Array):
        p_BTV = probs(temper_logits(adjusted, rows.sampling)).reshape(B, T, V)
        key = RowKey(sampling.seed_B2, num_output_tokens_B)
        verdict = rule(p_BTV, draft.q_BJV, tokens_BJ, key, draft.num_draft_B)
        return verdict, at_tokens(p_BTV[:, :J], ids_BJ)

    all_greedy = jnp.all(is_greedy(sampling))
    verdict, p_BJ = lax.cond(all_greedy, greedy, sampled, adjusted)
    q_BJ = jnp.ones((B, J), jnp.float32)
    if draft.q_BJV is not None:
        q_BJ = jnp.where(is_greedy(sampling)[:, None], 1.0, at_tokens(draft.q_BJV, ids_BJ))
    return RoundRecord(
        tokens_BJ=tokens_BJ,
        p_BJ=p_BJ,
        q_BJ=q_BJ,
        num_draft_B=draft.num_draft_B,
        num_accepted_B=verdict.num_accepted_B,
        next_token_B=verdict.next_token_B,
        is_bonus_B=verdict.num_accepted_B == draft.num_draft_B,
    )
