"""Speculative decoding: guess several tokens, verify them in one pass, keep the target's law."""

from helios_jax.speculative.acceptance import (
    AcceptanceRule,
    RowKey,
    Verdict,
    accept,
    acceptance_uniforms,
    draft_uniforms,
)
from helios_jax.speculative.drafting import draw_drafts
from helios_jax.speculative.passes import PagedRows, RowTable, Tree, private_rows, run_rows
from helios_jax.speculative.proposer import (
    Draft,
    Proposer,
    ProposerState,
    RoundRows,
    Verified,
    no_draft,
    only_tokens,
)
from helios_jax.speculative.verification import RoundRecord, verify

__all__ = [
    "AcceptanceRule",
    "Draft",
    "PagedRows",
    "Proposer",
    "ProposerState",
    "RoundRecord",
    "RoundRows",
    "RowKey",
    "RowTable",
    "Tree",
    "Verdict",
    "Verified",
    "accept",
    "acceptance_uniforms",
    "draft_uniforms",
    "draw_drafts",
    "no_draft",
    "only_tokens",
    "private_rows",
    "run_rows",
    "verify",
]
