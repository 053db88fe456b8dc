"""How likely is a continuation after a context?"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.config import require
from helios_jax.llm import LLM

_BATCH_ROWS = 8


class Likelihood(NamedTuple):
    """Attributes:
    log_probability: natural log of p(continuation | context).
    is_greedy: whether greedy decoding would have produced the continuation.
    """

    log_probability: float
    is_greedy: bool


def split_tokens(context: str, continuation: str, llm: LLM) -> tuple[list[int], int]:
    """Tokens of context and continuation together, and where the continuation's begin.

    White space at the context's end belongs to the continuation: tokens carry it in front. Where
    there is no context, the text's first token is one: nothing is likely before anything was read.

    Raises:
      ValueError: together they are longer than the model takes, or shorter than two tokens.
    """
    stripped = context.rstrip()
    together = llm.tokenizer.encode(context + continuation)
    require(
        2 <= len(together) <= llm.max_model_len,
        f"context and continuation {(context + continuation)[-40:]!r} have {len(together)} tokens: "
        f"must be in 2..{llm.max_model_len} (max_model_len)",
    )
    start = len(llm.tokenizer.encode(stripped)) if stripped else 0
    # A tokenizer may join the context's last letters with the continuation's first.
    return together, min(max(start, 1), len(together) - 1)


def likelihoods(sequences: Sequence[tuple[Sequence[int], int]], llm: LLM) -> list[Likelihood]:
    """Of the tokens from `start` on, for each (tokens, start), start >= 1."""
    found: dict[int, Likelihood] = {}
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i][0]))
    for first in range(0, len(order), _BATCH_ROWS):
        rows = order[first : first + _BATCH_ROWS]
        longest = max(len(sequences[i][0]) for i in rows)
        # Powers of two, so that few shapes are compiled.
        shape = (_BATCH_ROWS, max(16, 1 << (longest - 1).bit_length()))
        tokens_BT, positions_BT = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        counted_BT = np.zeros(shape, bool)
        for row, i in enumerate(rows):
            tokens, start = sequences[i]
            tokens_BT[row, : len(tokens)] = tokens
            positions_BT[row, : len(tokens)] = np.arange(len(tokens))
            counted_BT[row, start - 1 : len(tokens) - 1] = True
        sums_B, greedy_B = _scores(llm.model, llm.params, tokens_BT, positions_BT, counted_BT)
        found |= {
            i: Likelihood(float(total), bool(greedy))
            for i, total, greedy in zip(rows, sums_B, greedy_B, strict=False)
        }
    return [found[i] for i in range(len(sequences))]


def _row_scores(model, params, tokens_BT, positions_BT, counted_BT):
    hidden_BTD, _ = model.apply(params, tokens_BT, positions_BT, method="hidden")
    targets_BT = jnp.roll(tokens_BT, -1, axis=1)

    def row(item):
        hidden_TD, targets_T, counted_T = item
        logits_TV = model.apply(params, hidden_TD, method="logits")
        logp_TV = jax.nn.log_softmax(logits_TV)
        logp_T = jnp.take_along_axis(logp_TV, targets_T[:, None], axis=-1)[:, 0]
        is_best_T = jnp.argmax(logits_TV, axis=-1) == targets_T
        return jnp.sum(jnp.where(counted_T, logp_T, 0)), jnp.all(is_best_T | ~counted_T)

    # Row by row, so that few logits exist at once.
    return jax.lax.map(row, (hidden_BTD, targets_BT, counted_BT))


_scores = jax.jit(_row_scores, static_argnums=0)
