"""A head on the target's hidden states as proposer: it reads the last one, and keeps nothing."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from helios_jax.config import require
from helios_jax.model import DraftHead, Transformer
from helios_jax.speculative.draft_vocabulary import (
    ReducedParams,
    model_params,
    to_draft,
    to_target,
)
from helios_jax.speculative.drafting import draw_drafts
from helios_jax.speculative.proposer import Draft, Proposer, ProposerState, RoundRows


@dataclass(frozen=True)
class HiddenStateDraft(Proposer):
    """Drafts from the hidden state that a row's last token was drawn from (`RoundRows.hidden_BD`).

    `params` are the head's, `ReducedParams` where it has a `DraftVocabulary`.

    Attributes:
      model: the head; its hidden_size is the target's.
      num_target_tokens: tokens of the target that it reads, where it has a `DraftVocabulary`; None
        where its ids are the target's.
    """

    model: DraftHead
    num_target_tokens: int | None = None

    def check(self, model: Transformer) -> None:
        mine, theirs = self.model.config, model.config
        for name, own in (
            ("hidden_size", mine.hidden_size),
            ("vocab_size", self.num_target_tokens or mine.vocab_size),
        ):
            require(
                own == getattr(theirs, name),
                f"draft head: is made for a target of {name}={own}, this one has "
                f"{getattr(theirs, name)}; use the head of this very target",
            )

    def propose(
        self, params: Any, state: ProposerState, rows: RoundRows, num_draft_B: Array,
        max_num_draft_tokens: int,
    ) -> tuple[Draft, ProposerState]:  # fmt: skip
        require(
            isinstance(params, ReducedParams) == (self.num_target_tokens is not None),
            "draft head: ReducedParams and num_target_tokens belong together; give both or none",
        )

        def run(state_BD: Array, tokens_B: Array) -> tuple[Array, Array]:
            result: Any = self.model.apply(
                model_params(params), state_BD, to_draft(params, tokens_B)
            )
            state_BD, logits_BU = result
            return to_target(params, logits_BU), state_BD

        last_B1 = jnp.take_along_axis(rows.tokens_BS, rows.num_known_B[:, None] - 1, axis=1)
        draft, _ = draw_drafts(
            lambda state_BD: run(state_BD, last_B1[:, 0]),
            lambda state_BD, tokens_B, place, active_B: run(state_BD, tokens_B),
            rows.hidden_BD.astype(self.model.dtype), rows.sampling, rows.history,
            rows.num_output_B, num_draft_B, max_num_draft_tokens=max_num_draft_tokens,
            vocab_size=rows.vocab_size,
        )  # fmt: skip
        return draft, state
