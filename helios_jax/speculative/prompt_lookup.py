"""Proposing by looking up: what followed the last time these tokens came?

The longest suffix of the known tokens (prompt and output), of `min_ngram` to `max_ngram` tokens,
that occurred before; of equally long matches the latest, since text repeats what is near. The draft
is what followed it. Where that runs into the end of the text, the text from the match to the end is
taken to repeat, so that a loop is drafted at full length from its first repetition on.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from helios_jax.config import require
from helios_jax.speculative.proposer import Draft, Proposer, ProposerState, RoundRows


@dataclass(frozen=True)
class PromptLookup(Proposer):
    """No model and no state; O(S * max_ngram) per row, on the device.

    Attributes:
      max_ngram, min_ngram: longest and shortest suffix that is looked for.
    """

    max_ngram: int = 4
    min_ngram: int = 2

    def __post_init__(self):
        require(
            1 <= self.min_ngram <= self.max_ngram,
            f"min_ngram={self.min_ngram}, max_ngram={self.max_ngram}: must be 1 <= min_ngram <= "
            "max_ngram",
        )

    def propose(
        self, params: Any, state: ProposerState, rows: RoundRows, num_draft_B: Array,
        max_num_draft_tokens: int,
    ) -> tuple[Draft, ProposerState]:  # fmt: skip
        end_B = find_suffix(rows.tokens_BS, rows.num_known_B, self.min_ngram, self.max_ngram)
        period_B1 = (rows.num_known_B - 1 - end_B)[:, None]
        place_J = jnp.arange(max_num_draft_tokens, dtype=jnp.int32)
        index_BJ = end_B[:, None] + 1 + place_J % jnp.maximum(period_B1, 1)
        tokens_BJ = jnp.take_along_axis(rows.tokens_BS, jnp.maximum(index_BJ, 0), axis=1)
        return Draft(tokens_BJ, jnp.where(end_B >= 0, num_draft_B, 0), None), state


def find_suffix(tokens_BS: Array, lengths_B: Array, min_ngram: int, max_ngram: int) -> Array:
    """Where the longest suffix of each row ended before, int32 [B]; -1 where it never did.

    Args:
      tokens_BS: int32, anything beyond `lengths_B` tokens.
      min_ngram, max_ngram: static.
    """
    S = tokens_BS.shape[1]
    place_S = jnp.arange(S, dtype=jnp.int32)
    is_match_BS = place_S < (lengths_B - 1)[:, None]
    matched_BS = jnp.zeros(tokens_BS.shape, jnp.int32)
    for n in range(min(max_ngram, S)):
        # The token n before the end, against the token n before each place.
        wanted_B1 = jnp.take_along_axis(
            tokens_BS, jnp.maximum(lengths_B - 1 - n, 0)[:, None], axis=1
        )
        before_BS = jnp.pad(tokens_BS, ((0, 0), (n, 0)))[:, :S]
        is_match_BS &= (place_S >= n) & (before_BS == wanted_B1)
        matched_BS += is_match_BS
    longest_B1 = jnp.max(matched_BS, axis=1, keepdims=True)
    is_best_BS = (matched_BS == longest_B1) & (longest_B1 >= min_ngram)
    return jnp.max(jnp.where(is_best_BS, place_S, -1), axis=1)
