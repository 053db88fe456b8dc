"""What does the teacher find of given sequences? Its distributions, teacher-forced, in batches."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from helios_jax.distill.store import Labels
from helios_jax.model import Transformer
from helios_jax.model.compiler import jit
from helios_jax.sampling.rows import largest

# Lengths that sequences are padded to, and tokens that go through the model together.
WIDTHS = (64, 128, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
_BATCH_TOKENS = 4096
# Positions whose logits exist at a time.
_CHUNK = 256


class Teacher:
    """A model that says what it would have drawn from.

    Attributes:
      model, params: in any form that serves.
      top_k: tokens that are kept of a distribution; None for all.
      keep_hidden: labels hold the hidden states too, which a draft head learns from.
    """

    def __init__(
        self, model: Transformer, params: Any, top_k: int | None = 32, keep_hidden: bool = False
    ):
        self.model, self.params = model, params
        self.top_k, self.keep_hidden = top_k, keep_hidden

    def label(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[Labels]:
        """`Labels` of every (tokens, num_prompt): of tokens num_prompt.. given those before."""
        found: list[Labels | None] = [None] * len(sequences)
        by_width: dict[int, list[int]] = {}
        for index, (tokens, _) in enumerate(sequences):
            by_width.setdefault(width_of(len(tokens)), []).append(index)
        for width, members in sorted(by_width.items()):
            num_rows = max(1, _BATCH_TOKENS // width)
            for first in range(0, len(members), num_rows):
                batch = members[first : first + num_rows]
                labels = self._label([sequences[index] for index in batch], width, num_rows)
                for index, label in zip(batch, labels, strict=True):
                    found[index] = label
        return [label for label in found if label is not None]

    def _label(self, sequences, width: int, num_rows: int) -> list[Labels]:
        tokens_BT, positions_BT = pad([tokens for tokens, _ in sequences], width, num_rows)
        hidden_BTD = np.asarray(hidden_states(self.model, self.params, tokens_BT, positions_BT))
        scored_BT = np.zeros((num_rows, width), bool)
        for row, (tokens, num_prompt) in enumerate(sequences):
            scored_BT[row, num_prompt - 1 : len(tokens) - 1] = True
        labels = self.of_hidden(hidden_BTD[scored_BT])
        ends = np.cumsum(scored_BT.sum(axis=1))
        return [
            labels[ends[row] - (len(tokens) - num_prompt) : ends[row]]
            for row, (tokens, num_prompt) in enumerate(sequences)
        ]

    def of_hidden(self, hidden_ND: np.ndarray) -> Labels:
        """`Labels` at final hidden states."""
        parts = []
        for number, hidden_CD in chunks(hidden_ND):
            scored = jax.device_get(_score(self.model, self.params, hidden_CD, self.top_k))
            parts.append(Labels(*scored)[:number])
        ids = [part.ids_NK for part in parts]
        return Labels(
            None if self.top_k is None else np.concatenate(ids),  # pyright: ignore[reportArgumentType]
            np.concatenate([part.logprobs_NK for part in parts]),
            np.concatenate([part.tail_N for part in parts]),
            hidden_ND.astype(ml_dtypes.bfloat16) if self.keep_hidden else None,
        )


def chunks(*arrays_ND: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """(positions, [C, D] of each array): `_CHUNK` positions at a time, the last ones filled up."""
    for first in range(0, len(arrays_ND[0]), _CHUNK):
        parts = [array_ND[first : first + _CHUNK] for array_ND in arrays_ND]
        number = len(parts[0])
        yield number, *(np.pad(part, ((0, _CHUNK - number), (0, 0))) for part in parts)


def width_of(length: int, widths: Sequence[int] = WIDTHS) -> int:
    """The smallest of `widths` that holds so many tokens; beyond them the number itself."""
    return next((width for width in widths if width >= length), length)


def pad(sequences: Sequence[Sequence[int] | np.ndarray], width: int, num_rows: int):
    """tokens_BT and positions_BT, int32; -1 is the position of padding."""
    tokens_BT = np.zeros((num_rows, width), np.int32)
    positions_BT = np.full((num_rows, width), -1, np.int32)
    for row, tokens in enumerate(sequences):
        tokens_BT[row, : len(tokens)] = tokens
        positions_BT[row, : len(tokens)] = np.arange(len(tokens))
    return tokens_BT, positions_BT


@partial(jit, static_argnums=0)
def hidden_states(model: Transformer, params: Any, tokens_BT: Array, positions_BT: Array) -> Array:
    """hidden_BTD: what the head takes, of whole sequences; -1 is the position of padding."""
    result: Any = model.apply(params, tokens_BT, positions_BT, method="hidden")
    return result[0]


@partial(jit, static_argnums=(0, 3))
def _score(
    model: Transformer, params: Any, hidden_CD: Array, top_k: int | None
) -> tuple[Array | None, Array, Array]:
    """ids_CK or None, logprobs_CK, tail_C."""
    logits: Any = model.apply(params, hidden_CD, method="logits")
    max_C1 = jnp.max(logits, axis=1, keepdims=True)
    total_C = jnp.sum(jnp.exp(logits - max_C1), axis=1)
    normaliser_C1 = max_C1 + jnp.log(total_C)[:, None]
    if top_k is None:
        return None, logits - normaliser_C1, jnp.full(len(logits), -jnp.inf)
    top_CK, ids_CK = largest(logits, top_k)
    tail_C = total_C - jnp.sum(jnp.exp(top_CK - max_C1), axis=1)
    # What is left is rounding where the top has all but a millionth.
    tail_C = jnp.where(tail_C > 1e-6 * total_C, tail_C / total_C, 0.0)
    return ids_CK, top_CK - normaliser_C1, jnp.log(tail_C)
