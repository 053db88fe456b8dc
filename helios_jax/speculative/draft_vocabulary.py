"""How does a draft model that knows few of the target's tokens draft for it?

Most of what a small draft reads and computes is its head over the vocabulary, and most of the
target's tokens are rare. A draft of U tokens has a table from its ids to the target's. As inputs,
all tokens of the target are known by the draft's nearest one. Those it lacks are never drafted
(q = 0), so that the output's law stays the target's: they come from the target alone.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from helios_jax.config import require


@dataclass(frozen=True)
class DraftVocabulary:
    """Attributes:
    ids_U: int32, the target's id of each of the draft's, ascending.
    nearest_V: int32, the draft's id that stands for each of the target's when it is read; of those
      in `ids_U` their own.
    """

    ids_U: np.ndarray
    nearest_V: np.ndarray

    def __post_init__(self):
        ids, nearest = self.ids_U, self.nearest_V
        require(
            ids.ndim == nearest.ndim == 1 and 1 <= len(ids) <= len(nearest),
            f"draft vocabulary: {ids.shape} ids and {nearest.shape} nearest ones: must be rows, "
            "the first no longer",
        )
        require(
            bool(np.all(np.diff(ids) > 0)) and ids[0] >= 0 and ids[-1] < len(nearest),
            f"draft vocabulary: its ids must ascend in 0..{len(nearest) - 1}",
        )
        require(
            bool(np.all((nearest >= 0) & (nearest < len(ids))))
            and np.array_equal(nearest[ids], np.arange(len(ids))),
            "draft vocabulary: nearest_V must name the draft's own id for each of ids_U, and one "
            "of its ids for every other token",
        )

    @cached_property
    def draft_ids_V(self) -> np.ndarray:
        """int32, the draft's id of each of the target's tokens, -1 where it has none."""
        found = np.full(len(self.nearest_V), -1, np.int32)
        found[self.ids_U] = np.arange(len(self.ids_U), dtype=np.int32)
        return found


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReducedParams:
    """What `DraftModel` and `HiddenStateDraft` take as `params`, with a `DraftVocabulary`.

    Attributes:
      model: the model's own parameters.
      nearest_V, draft_ids_V: int32, see `DraftVocabulary`.
    """

    model: Any
    nearest_V: Array
    draft_ids_V: Array

    @classmethod
    def of(cls, model_params: Any, vocabulary: DraftVocabulary) -> "ReducedParams":
        nearest, ids = jnp.asarray(vocabulary.nearest_V), jnp.asarray(vocabulary.draft_ids_V)
        return cls(model_params, nearest, ids)


def to_draft(params: Any, tokens: Array) -> Array:
    """The target's token ids as the draft model reads them; anything for what is no token."""
    if not isinstance(params, ReducedParams):
        return tokens
    return params.nearest_V.at[jnp.maximum(tokens, 0)].get(mode="clip")


def to_target(params: Any, logits_BU: Array) -> Array:
    """Logits over the target's ids; -inf for those that the draft lacks."""
    if not isinstance(params, ReducedParams):
        return logits_BU
    ids_V = params.draft_ids_V
    logits_BV = jnp.take(logits_BU, jnp.maximum(ids_V, 0), axis=1)
    return jnp.where(ids_V >= 0, logits_BV, -jnp.inf)


def model_params(params: Any) -> Any:
    """The model's own parameters."""
    return params.model if isinstance(params, ReducedParams) else params
