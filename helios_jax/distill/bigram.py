"""Proposing by a table: the token that followed most often in the samples. A baseline."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from helios_jax.distill import store
from helios_jax.speculative import Draft, Proposer, ProposerState, RoundRows


@dataclass(frozen=True)
class BigramTable(Proposer):
    """Drafts next_V[token] from the last token on; `params` is next_V, -1 where nothing is known.

    The draft ends there.
    """

    def propose(
        self, params: Any, state: ProposerState, rows: RoundRows, num_draft_B: Array,
        max_num_draft_tokens: int,
    ) -> tuple[Draft, ProposerState]:  # fmt: skip
        last_B1 = jnp.take_along_axis(rows.tokens_BS, rows.num_known_B[:, None] - 1, axis=1)
        token_B, tokens = last_B1[:, 0], []
        for _ in range(max_num_draft_tokens):
            token_B = jnp.where(token_B >= 0, params[jnp.maximum(token_B, 0)], -1)
            tokens.append(token_B)
        tokens_BJ = jnp.stack(tokens, axis=1)
        known_B = jnp.sum(tokens_BJ >= 0, axis=1, dtype=jnp.int32)
        return Draft(tokens_BJ, jnp.minimum(num_draft_B, known_B), None), state


def bigram_table(sequences: Iterable[store.Sequence], vocab_size: int) -> np.ndarray:
    """next_V: int32, the likeliest successor of each token in what was sampled; of equally frequent
    ones the lowest id."""
    pairs = np.concatenate(
        [
            np.stack([sequence.tokens[:-1], sequence.tokens[1:]])[:, sequence.num_prompt - 1 :]
            for sequence in sequences
        ],
        axis=1,
    )
    distinct, counts = np.unique(pairs, axis=1, return_counts=True)
    next_V = np.full(vocab_size, -1, np.int32)
    # Written in the order of growing counts: the last one stays.
    order = np.lexsort((-distinct[1], counts))
    next_V[distinct[0][order]] = distinct[1][order]
    return next_V
