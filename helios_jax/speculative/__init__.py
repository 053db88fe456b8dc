"""Speculative decoding: guess several tokens, verify them in one pass, keep the target's law.

    output = speculative_generate((model, params), (draft_model, draft_params), prompts, lengths,
                                  sampling, max_new_tokens=64)
    output = speculative_generate((model, params), PromptLookup(), ...)

Every part is a pure function of arrays with one row per request, or a small frozen object of pure
methods, and may be replaced: the proposer (`Proposer`), the acceptance rule (`accept`), the
draft-length controller (`FixedLength`, `AdaptiveLength`). J, the most draft tokens of a round, is
static; how many a row drafts is a value.

What `verify` costs beside `sample_tokens` for as many positions (J = 4, vocabulary 49,152, one
shared Zen 4 core, jax 0.12.0.1, warm, best of 15), in ms at batch 1 and batch 8:

                     sample_tokens     verify, drawn drafts   verify, chosen drafts (q None)
    greedy           0.09   0.55        0.11   0.61            0.11   0.60
    temperature      0.26   2.49        0.29   2.75            0.30   2.25
    top_k=50         0.31   4.91        0.33   4.10            0.34   6.77
"""

from helios_jax.speculative.acceptance import (
    AcceptanceRule,
    RowKey,
    Verdict,
    accept,
    acceptance_uniforms,
    draft_uniforms,
)
from helios_jax.speculative.controller import (
    AdaptiveLength,
    CostTable,
    FixedLength,
    RowAcceptance,
    assumed_costs,
    expected_tokens,
)
from helios_jax.speculative.costs import measure_costs
from helios_jax.speculative.draft_head import HiddenStateDraft
from helios_jax.speculative.draft_model import DraftModel
from helios_jax.speculative.draft_vocabulary import DraftVocabulary, ReducedParams
from helios_jax.speculative.drafting import draw_drafts
from helios_jax.speculative.generation import (
    Speculation,
    SpeculationParams,
    SpeculativeOutput,
    SpeculativeState,
    begin,
    speculative_generate,
    speculative_round,
)
from helios_jax.speculative.passes import PagedRows, RowTable, Tree, private_rows, run_rows
from helios_jax.speculative.prompt_lookup import PromptLookup
from helios_jax.speculative.proposer import (
    Draft,
    Proposer,
    ProposerState,
    RoundRows,
    Verified,
    no_draft,
    only_tokens,
)
from helios_jax.speculative.telemetry import AcceptanceTelemetry, init_telemetry, record_round
from helios_jax.speculative.telemetry_report import AcceptanceReport, DriftEvent, read_acceptance
from helios_jax.speculative.verification import RoundRecord, verify

__all__ = [
    "AcceptanceReport",
    "AcceptanceRule",
    "AcceptanceTelemetry",
    "AdaptiveLength",
    "CostTable",
    "Draft",
    "DraftModel",
    "DraftVocabulary",
    "DriftEvent",
    "FixedLength",
    "HiddenStateDraft",
    "PagedRows",
    "PromptLookup",
    "Proposer",
    "ProposerState",
    "ReducedParams",
    "RoundRecord",
    "RoundRows",
    "RowAcceptance",
    "RowKey",
    "RowTable",
    "Speculation",
    "SpeculationParams",
    "SpeculativeOutput",
    "SpeculativeState",
    "Tree",
    "Verdict",
    "Verified",
    "accept",
    "acceptance_uniforms",
    "assumed_costs",
    "begin",
    "draft_uniforms",
    "draw_drafts",
    "expected_tokens",
    "init_telemetry",
    "measure_costs",
    "no_draft",
    "only_tokens",
    "private_rows",
    "read_acceptance",
    "record_round",
    "run_rows",
    "speculative_generate",
    "speculative_round",
    "verify",
]
