"""Which positions does training step s of a draft head see, and as which arrays?

A head takes no context, so that positions of all sequences are shuffled together, anew for every
pass over the data, by seed and pass alone, as `Batches` does with sequences.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from helios_jax.config import require
from helios_jax.distill import store
from helios_jax.distill.batches import in_students_ids
from helios_jax.distill.losses import Targets
from helios_jax.speculative import DraftVocabulary


class PositionBatch(NamedTuple):
    """N positions with the J tokens that came after each, in the student's ids.

    hidden_ND: bfloat16, the target's, at the position.
    tokens_NJ: int32; anything beyond a sequence's end.
    targets: of N * J positions: after each of those tokens.
    counts_NJ: float32, 1 where there is a target.
    """

    hidden_ND: jax.Array
    tokens_NJ: jax.Array
    targets: Targets
    counts_NJ: jax.Array

    @property
    def num_counted(self) -> int:
        """Tokens that are learnt from."""
        return int(np.sum(self.counts_NJ))


class PositionBatches:
    """The batches of a data set, by number.

    Attributes:
      num_per_pass: batches in one pass over the data.
    """

    def __init__(
        self,
        sequences: Sequence[store.Sequence],
        *,
        tokens_per_batch: int,
        num_draft_tokens: int,
        seed: int = 0,
        vocabulary: DraftVocabulary | None = None,
        rows_multiple: int = 1,
    ):
        """
        Args:
          sequences: with the teacher's hidden states.
          num_draft_tokens: J, how far a head is unrolled.
          vocabulary, rows_multiple: as for `Batches`.
        """
        labels = [sequence.labels for sequence in sequences]
        require(
            all(label.hidden_ND is not None for label in labels),
            "training data: holds no hidden states of the target, which a draft head learns from; "
            "sample with keep_hidden=True",
        )
        self._num_draft_tokens, self._vocabulary = num_draft_tokens, vocabulary
        rows = max(1, tokens_per_batch // num_draft_tokens)
        self._num_rows = -(-rows // rows_multiple) * rows_multiple
        self._seed = seed
        joined: Any = [
            None if parts[0] is None else np.concatenate(parts)
            for parts in zip(*labels, strict=True)
        ]
        self._targets = store.Labels(*joined)._replace(hidden_ND=None)
        self._hidden_MD: np.ndarray = joined[-1]
        self._tokens_M = np.concatenate([s.tokens[s.num_prompt :] for s in sequences])
        lengths = np.array([len(label.tail_N) for label in labels])
        # At each sampled token: where its sequence ends.
        self._end_M = np.repeat(np.cumsum(lengths), lengths)
        self._used = np.flatnonzero(self._end_M - np.arange(len(self._end_M)) > 1)
        require(
            len(self._used) > 0,
            "training data: no sequence has two sampled tokens; raise max_tokens",
        )
        self.num_per_pass = -(-len(self._used) // self._num_rows)
        self._pass: tuple[int, np.ndarray] | None = None

    def __getitem__(self, number: int) -> PositionBatch:
        """Batch `number` of all passes."""
        turn, place = divmod(number, self.num_per_pass)
        if self._pass is None or self._pass[0] != turn:
            draw = np.random.default_rng([self._seed, turn])
            self._pass = turn, draw.permutation(self._used)
        return self._batch(self._pass[1][place * self._num_rows :][: self._num_rows])

    def in_order(self) -> list[PositionBatch]:
        """One pass, not shuffled."""
        return [
            self._batch(self._used[first : first + self._num_rows])
            for first in range(0, len(self._used), self._num_rows)
        ]

    def _batch(self, chosen: np.ndarray) -> PositionBatch:
        """The j-th token after hidden state i is sampled token i + j, and what came after it is
        token i + j + 1: label i is of the distribution that sampled token i was drawn from."""
        N, J = self._num_rows, self._num_draft_tokens
        index_N = np.pad(chosen, (0, N - len(chosen)), mode="edge")
        place_NJ = index_N[:, None] + np.arange(1, J + 1)
        counts_NJ = place_NJ < self._end_M[index_N][:, None]
        counts_NJ[len(chosen) :] = False
        place_NJ = np.minimum(place_NJ, len(self._tokens_M) - 1)
        place_M = place_NJ.reshape(-1)
        tokens_NJ, *targets = in_students_ids(
            self._vocabulary, self._tokens_M[place_NJ - 1], self._targets[place_M],
            self._tokens_M[place_M],
        )  # fmt: skip
        of_batch: Any = (
            self._hidden_MD[index_N], tokens_NJ, Targets(*targets), counts_NJ.astype(np.float32),
        )  # fmt: skip
        return PositionBatch(*of_batch)
