"""Which sequences does training step s see, and as which arrays?

Sequences of like length form batches of about `tokens_per_batch` tokens, padded to one of a few
widths, so that few programs are compiled. The order is shuffled anew for every pass over the data,
by seed and pass alone: a resumed run goes on with the step's number and nothing else.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from helios_jax.config import require
from helios_jax.distill import store
from helios_jax.distill.losses import Targets
from helios_jax.distill.teacher import pad, width_of
from helios_jax.speculative import DraftVocabulary


class Batch(NamedTuple):
    """B sequences of T tokens, in the student's ids.

    tokens_BT, positions_BT: int32; -1 is the position of padding.
    targets: of B * T positions.
    counts_BT: float32, 1 where the next token is the target's and counts.
    """

    tokens_BT: jax.Array
    positions_BT: jax.Array
    targets: Targets
    counts_BT: jax.Array

    @property
    def num_counted(self) -> int:
        """Tokens that are learnt from."""
        return int(np.sum(self.counts_BT))


class Batches:
    """The batches of a data set, by number.

    Attributes:
      num_per_pass: batches in one pass over the data.
    """

    def __init__(
        self,
        sequences: Sequence[store.Sequence],
        *,
        tokens_per_batch: int,
        seed: int = 0,
        vocabulary: DraftVocabulary | None = None,
        rows_multiple: int = 1,
        max_length: int | None = None,
    ):
        """
        Args:
          vocabulary: the student's; None where its ids are the teacher's.
          rows_multiple: batches have a multiple of so many rows: of the devices that share them.
          max_length: longer sequences are cut.
        """
        require(bool(sequences), "training data: holds no sequences; sample some")
        require(tokens_per_batch >= 1, f"tokens_per_batch={tokens_per_batch}: must be at least 1")
        self._sequences = [_cut(sequence, max_length) for sequence in sequences]
        self._tokens_per_batch, self._seed = tokens_per_batch, seed
        self._rows_multiple = rows_multiple
        self._vocabulary = vocabulary
        self._by_width: dict[int, list[int]] = {}
        for index, sequence in enumerate(self._sequences):
            self._by_width.setdefault(width_of(len(sequence.tokens)), []).append(index)
        self.num_per_pass = sum(
            -(-len(members) // self._num_rows(width)) for width, members in self._by_width.items()
        )
        self._pass: tuple[int, list[tuple[int, list[int]]]] | None = None

    def __getitem__(self, number: int) -> Batch:
        """Batch `number` of all passes."""
        width, members = self._order(number // self.num_per_pass)[number % self.num_per_pass]
        return to_batch(
            [self._sequences[index] for index in members],
            width, self._num_rows(width), self._vocabulary,
        )  # fmt: skip

    def in_order(self) -> list[Batch]:
        """One pass, not shuffled."""
        batches = []
        for width, members in sorted(self._by_width.items()):
            rows = self._num_rows(width)
            for first in range(0, len(members), rows):
                chosen = [self._sequences[index] for index in members[first : first + rows]]
                batches.append(to_batch(chosen, width, rows, self._vocabulary))
        return batches

    def _num_rows(self, width: int) -> int:
        rows = max(1, self._tokens_per_batch // width)
        return -(-rows // self._rows_multiple) * self._rows_multiple

    def _order(self, number: int) -> list[tuple[int, list[int]]]:
        """(width, sequences) of every batch of pass `number`."""
        if self._pass is None or self._pass[0] != number:
            draw = np.random.default_rng([self._seed, number])
            batches = []
            for width, members in sorted(self._by_width.items()):
                shuffled = draw.permutation(members).tolist()
                rows = self._num_rows(width)
                batches += [
                    (width, shuffled[first : first + rows])
                    for first in range(0, len(shuffled), rows)
                ]
            self._pass = number, [batches[i] for i in draw.permutation(len(batches))]
        return self._pass[1]


def to_batch(
    sequences: Sequence[store.Sequence],
    width: int,
    num_rows: int,
    vocabulary: DraftVocabulary | None = None,
) -> Batch:
    """Sequences as arrays of `num_rows` rows of `width` tokens."""
    tokens_BT, positions_BT = pad([sequence.tokens for sequence in sequences], width, num_rows)
    K = sequences[0].labels.logprobs_NK.shape[1]
    has_ids = sequences[0].labels.ids_NK is not None
    ids_BTK = np.full((num_rows, width, K), -1, np.int32) if has_ids else None
    # Positions without a teacher get a finite one, which is not counted.
    logprobs_BTK = np.full((num_rows, width, K), -np.log(K), np.float32)
    tail_BT = np.full((num_rows, width), -np.inf, np.float32)
    counts_BT = np.zeros((num_rows, width), np.float32)
    next_BT = np.full((num_rows, width), -1, np.int32)
    for row, sequence in enumerate(sequences):
        place = slice(sequence.num_prompt - 1, len(sequence.tokens) - 1)
        if ids_BTK is not None:
            assert sequence.labels.ids_NK is not None
            ids_BTK[row, place] = sequence.labels.ids_NK
        logprobs_BTK[row, place] = sequence.labels.logprobs_NK
        tail_BT[row, place] = sequence.labels.tail_N
        counts_BT[row, place] = 1
        next_BT[row, place] = sequence.tokens[sequence.num_prompt :]
    N = num_rows * width
    labels = store.Labels(
        None if ids_BTK is None else ids_BTK.reshape(N, -1),
        logprobs_BTK.reshape(N, -1),
        tail_BT.reshape(N),
    )
    # Of numpy's, until a step takes them.
    tokens_BT, *targets = in_students_ids(vocabulary, tokens_BT, labels, next_BT.reshape(N))
    of_batch: Any = (tokens_BT, positions_BT, Targets(*targets), counts_BT)
    return Batch(*of_batch)


def in_students_ids(
    vocabulary: DraftVocabulary | None, tokens: np.ndarray, labels: store.Labels,
    next_N: np.ndarray,
) -> tuple[Any, ...]:  # fmt: skip
    """(tokens as the student reads them, and the fields of `Targets`) of the teacher's ids.

    Args:
      vocabulary: the student's; None where its ids are the teacher's.
      next_N: the tokens that came next; -1 for none.
    """
    ids_NK, logprobs_NK, tail_N = labels.ids_NK, labels.logprobs_NK, labels.tail_N
    if vocabulary is not None:
        draft_ids_V = vocabulary.draft_ids_V
        tokens = vocabulary.nearest_V[tokens]
        next_N = np.where(next_N >= 0, draft_ids_V[np.maximum(next_N, 0)], -1)
        if ids_NK is not None:
            ids_NK = np.where(ids_NK >= 0, draft_ids_V[np.maximum(ids_NK, 0)], -1)
        else:
            lacking = draft_ids_V < 0
            with np.errstate(divide="ignore"):
                tail_N = np.log(np.exp(logprobs_NK[:, lacking]).sum(axis=-1))
            logprobs_NK = logprobs_NK[:, vocabulary.ids_U]
    return tokens, ids_NK, logprobs_NK, tail_N.astype(np.float32), next_N


def _cut(sequence: store.Sequence, max_length: int | None) -> store.Sequence:
    if max_length is None or len(sequence.tokens) <= max_length:
        return sequence
    require(
        sequence.num_prompt < max_length,
        f"max_length={max_length}: a prompt of {sequence.num_prompt} tokens leaves nothing to "
        "learn; raise it",
    )
    labels = sequence.labels[: max_length - sequence.num_prompt]
    return store.Sequence(
        sequence.tokens[:max_length], sequence.num_prompt, sequence.temperature, labels
    )
