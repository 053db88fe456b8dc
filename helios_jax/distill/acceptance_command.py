"""Which proposer does a target accept most of? Measured for a draft beside the baselines.

    python -m helios_jax.distill.acceptance --target smollm2-135m --draft DIR \
        --prompts FILE --json out.json

Beside the rounds as they serve, the teacher-forced acceptance of a draft on the same text.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from helios_jax.config import require
from helios_jax.distill.acceptance import Prompt, read_prompts, run_prompts
from helios_jax.distill.acceptance_report import Row, summarise, to_markdown
from helios_jax.distill.overlap import teacher_forced
from helios_jax.model import DraftHead, Transformer
from helios_jax.speculative import (
    DraftModel,
    HiddenStateDraft,
    ReducedParams,
    Speculation,
    SpeculationParams,
)


def measure(
    name: str,
    target: tuple[Transformer, Any],
    proposer: tuple[Speculation, SpeculationParams],
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    **options: Any,
) -> list[Row]:
    """What one proposer gets, a row for each temperature; teacher-forced where it is a draft.

    Args:
      options: of `run_prompts`.
    """
    counts = run_prompts(target, *proposer, prompts, temperatures, **options)
    draft = draft_of(*proposer)
    overlaps = None if draft is None else teacher_forced(target, draft, counts)
    return summarise(name, counts, overlaps)


def draft_of(
    speculation: Speculation, extra: SpeculationParams
) -> tuple[Transformer | DraftHead, Any] | None:
    """(model or head, params) of what drafts with one; None for another proposer."""
    if isinstance(speculation.proposer, DraftModel | HiddenStateDraft):
        return speculation.proposer.model, extra.proposer
    return None


def untrained(
    target: tuple[Any, Any], manifest: Mapping[str, Any], vocabulary: Any
) -> tuple[Any, Any]:
    """(config, params) that a draft began its training with.

    Args:
      target: (config, params) of the target's checkpoint.
      manifest: the draft's.
    """
    from helios_jax.distill.architectures import PrunedShape, draft_config, initialise, prune

    source = manifest["source"]
    shape = source.get("shape") or {}
    pruned = shape.get("pruned")
    require(
        bool(pruned or shape.get("config")),
        "untrained: the draft's manifest names no shape that it began with; leave --untrained away",
    )
    if not pruned:
        config = draft_config(target[0], vocabulary, **shape["config"])
        key = jax.random.key(source["training"]["seed"])
        return config, initialise(config, key, target[1], vocabulary)
    shape = PrunedShape(**(pruned | {"layers": tuple(pruned["layers"])}))
    return prune(*target, shape, vocabulary)


def main() -> None:
    from checkpoints_conv import open_checkpoint, read_params
    from helios_jax import hub
    from helios_jax.calibrate.record import circumstances
    from helios_jax.distill.bigram import BigramTable, bigram_table
    from helios_jax.distill.store import read_store
    from helios_jax.llm import use_compilation_cache
    from helios_jax.model.forms import draft_form, serving_form
    from helios_jax.speculative import PromptLookup
    from helios_jax.speculative_config import draft_proposer, load_speculation

    parser = argparse.ArgumentParser(
        prog="python -m helios_jax.distill.acceptance", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", required=True, help="a checkpoint, or 'none'")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--kv-cache-dtype", action="append")
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--untrained", action="store_true", help="also the draft as it began")
    parser.add_argument("--lookup", action="store_true", help="also prompt lookup")
    parser.add_argument("--bigram", type=Path, help="also a bigram table of this folder of samples")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.untrained and given.draft == "none":
        parser.error("--untrained: is the draft as it began; name one by --draft")

    use_compilation_cache()
    path = hub.resolve(given.target)
    checkpoint = open_checkpoint(path)
    target_params = read_params(checkpoint)
    tokenizer = checkpoint.tokenizer
    form = serving_form(checkpoint.config, target_params, given.dtype)
    target = form.model, form.params
    J = given.num_draft_tokens
    proposers: dict[str, tuple[Speculation, SpeculationParams]] = {}
    if given.draft != "none":
        config = {"model": given.draft, "num_speculative_tokens": J, "controller": "fixed"}
        proposers["draft"] = load_speculation(config, path, tokenizer, given.dtype)
    if given.untrained:
        folder = hub.resolve_draft(given.draft)
        vocabulary = open_checkpoint(folder).draft_vocabulary
        manifest = json.loads((folder / "manifest.json").read_text())
        began = untrained((checkpoint.config, target_params), manifest, vocabulary)
        begun = draft_form(*began, given.dtype)
        drafting = draft_proposer(begun.model, vocabulary)
        params = begun.params
        params = params if vocabulary is None else ReducedParams.of(params, vocabulary)
        proposers["untrained"] = Speculation(drafting, J), SpeculationParams(params)
    if given.lookup:
        proposers["prompt lookup"] = Speculation(PromptLookup(), J), SpeculationParams()
    if given.bigram is not None:
        sequences = read_store(given.bigram).sequences()
        next_V = bigram_table(sequences, checkpoint.config.vocab_size)
        extra = SpeculationParams(jnp.asarray(next_V))
        proposers["bigram table"] = Speculation(BigramTable(), J), extra
    prompts = read_prompts(given.prompts, tokenizer, given.per_category, given.max_prompt)
    eos = sorted({*checkpoint.config.eos_token_ids, *tokenizer.eos_token_ids})
    rows = []
    for kv_dtype in given.kv_cache_dtype or ["bfloat16"]:
        for name, proposer in proposers.items():
            suffix = f", {kv_dtype} KV" if given.kv_cache_dtype else ""
            rows += measure(
                name + suffix, target, proposer, prompts, given.temperature or [0.0, 1.0],
                max_tokens=given.max_tokens, eos_token_ids=eos, num_rows=given.rows,
                kv_dtype=kv_dtype,
            )  # fmt: skip
            print(to_markdown(rows), flush=True)
            # After each, so that a run that is stopped leaves what it has measured.
            if given.json is not None:
                report = {
                    "circumstances": circumstances(),
                    "num_draft_tokens": J,
                    "max_tokens": given.max_tokens,
                    "rows": [dataclasses.asdict(row) for row in rows],
                }
                given.json.write_text(json.dumps(report, indent=1) + "\n")
                given.json.with_suffix(".md").write_text(to_markdown(rows) + "\n")
