"""How many of a proposer's tokens does a target accept, prompt by prompt?

    python -m helios_jax.distill.acceptance --target smollm2-135m --draft DIR \
        --prompts FILE --json out.json

Speculative runs as they serve: rounds of draft and verification from every prompt on. Counted per
prompt, so that intervals are over prompts (bootstrap of the ratio accepted / proposed, 95%).
Beside them the teacher-forced acceptance on the same text: sum min(p, q) at every position, 1 or 0
for greedy decoding; what a round of one draft token would accept.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from helios_jax.calibrate.data import read_objects, render
from helios_jax.config import require
from helios_jax.distill.teacher import pad, width_of
from helios_jax.model import Transformer
from helios_jax.model.compiler import jit
from helios_jax.sampling import SamplingParams, stack_sampling
from helios_jax.speculative import (
    ReducedParams,
    Speculation,
    SpeculationParams,
    begin,
    speculative_round,
)
from helios_jax.speculative.draft_vocabulary import model_params, to_draft, to_target

# Widths of prompts: each is a program for each proposer.
_WIDTHS = (128, 512, 1024, 2048, 4096)
_CHUNK = 256


class Prompt(NamedTuple):
    """category: a name; tokens: ids."""

    category: str
    tokens: list[int]


@dataclass(frozen=True)
class Counts:
    """Of one prompt at one temperature.

    Attributes:
      num_proposed, num_accepted: draft tokens.
      num_rounds: verifications.
      tokens: the prompt's and the output's ids.
      num_prompt: of them.
    """

    category: str
    temperature: float
    num_proposed: int
    num_accepted: int
    num_rounds: int
    tokens: tuple[int, ...]
    num_prompt: int


class Interval(NamedTuple):
    """value, and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def run_prompts(
    target: tuple[Transformer, Any],
    speculation: Speculation,
    extra: SpeculationParams,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    *,
    max_tokens: int,
    eos_token_ids: Sequence[int] = (),
    num_rows: int = 8,
    kv_dtype: str = "bfloat16",
    seed: int = 0,
) -> list[Counts]:
    """Every prompt at every temperature; the results are in no particular order."""
    work = [(prompt, t, i) for i, prompt in enumerate(prompts) for t in temperatures]
    by_width: dict[int, list] = {}
    for item in work:
        length = len(item[0].tokens)
        width = next((w for w in _WIDTHS if w >= length), length)
        by_width.setdefault(width, []).append(item)
    results = []
    for width, items in sorted(by_width.items()):
        for first in range(0, len(items), num_rows):
            batch = items[first : first + num_rows]
            results += _run_batch(
                target, speculation, extra, batch, width, num_rows, max_tokens,
                tuple(eos_token_ids), kv_dtype, seed,
            )  # fmt: skip
    return results


def _run_batch(
    target, speculation, extra, batch, width, num_rows, max_tokens, eos, kv_dtype, seed
) -> list[Counts]:
    model, params = target
    tokens_BT, _ = pad([prompt.tokens for prompt, _, _ in batch], width, num_rows)
    lengths = [len(prompt.tokens) for prompt, _, _ in batch] + [0] * (num_rows - len(batch))
    settings = [
        SamplingParams(temperature=t, max_tokens=max_tokens, seed=seed + number)
        for _, t, number in batch
    ]
    settings += [settings[0]] * (num_rows - len(batch))
    sampling = stack_sampling(settings, vocab_size=model.config.vocab_size, eos_token_ids=eos)
    tokens_BS, known_B, proposed_B, accepted_B, rounds_B = jax.device_get(
        _rounds(
            model, params, speculation, extra, jnp.asarray(tokens_BT),
            jnp.asarray(lengths, jnp.int32), sampling, max_tokens, kv_dtype,
        )
    )  # fmt: skip
    return [
        Counts(
            prompt.category, temperature, int(proposed_B[row]), int(accepted_B[row]),
            int(rounds_B[row]), tuple(tokens_BS[row, : known_B[row]].tolist()), lengths[row],
        )
        for row, (prompt, temperature, _) in enumerate(batch)
    ]  # fmt: skip


@partial(jit, static_argnums=(0, 2, 7, 8))
def _rounds(
    model, params, speculation, extra, tokens_BT, lengths_B, sampling, max_tokens, kv_dtype
):
    target = model, params
    kv, state = begin(
        target, speculation, extra, tokens_BT, lengths_B, sampling,
        max_new_tokens=max_tokens, kv_dtype=kv_dtype,
    )  # fmt: skip

    def turn(carry):
        state, proposed_B, accepted_B, rounds_B = carry
        running_B = state.running_B
        state, record = speculative_round(target, speculation, extra, kv, sampling, state)
        return (
            state,
            proposed_B + jnp.where(running_B, record.num_draft_B, 0),
            accepted_B + jnp.where(running_B, record.num_accepted_B, 0),
            rounds_B + running_B,
        )

    zeros_B = jnp.zeros(len(lengths_B), jnp.int32)
    state, *counts = lax.while_loop(
        lambda carry: jnp.any(carry[0].running_B), turn, (state, zeros_B, zeros_B, zeros_B)
    )
    return state.tokens_BS, state.num_known_B, *counts


class Overlap(NamedTuple):
    """Of one text: overlap_N and context_N, teacher-forced acceptance and tokens before it, at
    every output token."""

    overlap_N: np.ndarray
    context_N: np.ndarray


def teacher_forced(
    target: tuple[Transformer, Any],
    draft: tuple[Transformer, Any],
    texts: Sequence[Counts],
    num_rows: int = 4,
) -> list[Overlap]:
    """Sum min(p, q) at the temperature of each text; see the module.

    Args:
      draft: (model, params); the params may be `ReducedParams`.
    """
    found = []
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    for first in range(0, len(order), num_rows):
        batch = [texts[i] for i in order[first : first + num_rows]]
        longest = max(len(text.tokens) for text in batch)
        tokens_BT, positions_BT = pad([text.tokens for text in batch], width_of(longest), num_rows)
        p_BTD, q_BTD = _both_hidden(*target, *draft, tokens_BT, positions_BT)
        for row, text in enumerate(batch):
            place = np.arange(text.num_prompt - 1, len(text.tokens) - 1)
            overlap = [
                np.asarray(
                    _overlap(
                        *target, *draft, _filled(p_BTD[row, chunk]), _filled(q_BTD[row, chunk]),
                        jnp.float32(text.temperature),
                    )
                )[: len(chunk)]
                for chunk in np.array_split(place, -(-len(place) // _CHUNK) or 1)
            ]  # fmt: skip
            found.append((order[first + row], Overlap(np.concatenate(overlap), place + 1)))
    return [overlap for _, overlap in sorted(found, key=lambda item: item[0])]


def _filled(hidden_ND):
    return jnp.pad(hidden_ND, ((0, _CHUNK - len(hidden_ND)), (0, 0)))


@partial(jit, static_argnums=(0, 2))
def _both_hidden(model, params, draft, draft_params, tokens_BT, positions_BT):
    def hidden(model, params, tokens_BT):
        result: Any = model.apply(params, tokens_BT, positions_BT, method="hidden")
        return result[0]

    mine = to_draft(draft_params, tokens_BT)
    return hidden(model, params, tokens_BT), hidden(draft, model_params(draft_params), mine)


@partial(jit, static_argnums=(0, 2))
def _overlap(model, params, draft, draft_params, p_ND, q_ND, temperature):
    p_NV: Any = model.apply(params, p_ND, method="logits")
    q_NU: Any = draft.apply(model_params(draft_params), q_ND, method="logits")
    q_NV = to_target(draft_params, q_NU)
    shared = min(p_NV.shape[1], q_NV.shape[1])
    same_N = jnp.argmax(p_NV, axis=1) == jnp.argmax(q_NV, axis=1)
    heat = jnp.where(temperature > 0, temperature, 1)
    p_NV, q_NV = jax.nn.softmax(p_NV / heat), jax.nn.softmax(q_NV / heat)
    both_N = jnp.sum(jnp.minimum(p_NV[:, :shared], q_NV[:, :shared]), axis=1)
    return jnp.where(temperature > 0, both_N, same_N)


def rate(counts: Sequence[Counts], seed: int = 0) -> Interval:
    """accepted / proposed, with its interval over prompts."""
    pairs = np.array([(c.num_accepted, c.num_proposed) for c in counts], np.float64)
    return ratio(pairs[:, 0], pairs[:, 1], seed)


def ratio(above: np.ndarray, below: np.ndarray, seed: int = 0) -> Interval:
    """sum(above) / sum(below) and its 95% bootstrap interval; 0 where nothing is below."""
    draws = np.random.default_rng(seed).integers(len(above), size=(2000, len(above)))
    sums = above[draws].sum(1), np.maximum(below[draws].sum(1), 1e-12)
    low, high = np.quantile(sums[0] / sums[1], [0.025, 0.975])
    return Interval(float(above.sum() / max(below.sum(), 1e-12)), float(low), float(high))


def length(counts: Sequence[Counts]) -> float:
    """Tokens per verification: 1 + accepted / rounds."""
    return 1 + sum(c.num_accepted for c in counts) / max(1, sum(c.num_rounds for c in counts))


def read_prompts(
    path: Path, tokenizer: Any, per_category: int | None, max_length: int
) -> list[Prompt]:
    """Prompts of a JSONL file, in its order; the first `per_category` of each category.

    A line is as for `conversation_of`; it may have a `category`. Longer prompts than `max_length`
    tokens are left out.

    Raises:
      ValueError: naming the line.
    """
    found: dict[str, list[Prompt]] = {}
    for where, fields in read_objects(path):
        tokens = tokenizer.encode(render(where, fields, tokenizer))
        category = fields.get("category", "all")
        members = found.setdefault(category, [])
        if len(tokens) <= max_length and (per_category is None or len(members) < per_category):
            members.append(Prompt(category, tokens))
    return [prompt for members in found.values() for prompt in members]


@dataclass(frozen=True)
class Row:
    """What one proposer got at a temperature; by category, prompt tokens and context within it."""

    proposer: str
    temperature: float
    rate: Interval
    acceptance_length: float
    num_prompts: int
    by_category: Mapping[str, Interval]
    by_prompt_length: Mapping[str, Interval]
    teacher_forced: Interval | None = None
    teacher_forced_by_context: Mapping[str, Interval] = dataclasses.field(default_factory=dict)


_EDGES = (128, 256, 512, 1024, 2048)


def _ranges() -> list[tuple[str, int, int]]:
    """(name, first, end) of ranges of tokens."""
    ends = (*_EDGES, 10**9)
    return [
        (f"{low} to {high - 1}" if high < 10**9 else f"from {low}", low, high)
        for low, high in zip((0, *_EDGES), ends, strict=True)
    ]


def summarise(name: str, counts: Sequence[Counts], overlaps: Sequence[Overlap] | None) -> list[Row]:
    """One row per temperature."""
    rows = []
    for temperature in sorted({c.temperature for c in counts}):
        chosen = [i for i, c in enumerate(counts) if c.temperature == temperature]
        mine = [counts[i] for i in chosen]
        categories = dict.fromkeys(sorted(c.category for c in mine))
        forced, by_context = None, {}
        if overlaps is not None:
            texts = [overlaps[i] for i in chosen]
            forced = ratio(
                np.array([o.overlap_N.sum() for o in texts]),
                np.array([float(len(o.overlap_N)) for o in texts]),
            )
            for name_of, low, high in _ranges():
                inside = [(o.context_N >= low) & (o.context_N < high) for o in texts]
                number = np.array([float(mask.sum()) for mask in inside])
                if number.sum():
                    sums = np.array(
                        [o.overlap_N[mask].sum() for o, mask in zip(texts, inside, strict=True)]
                    )
                    by_context[name_of] = ratio(sums, number)
        by_length = {
            name_of: rate(found)
            for name_of, low, high in _ranges()
            if (found := [c for c in mine if low <= c.num_prompt < high])
        }
        rows.append(
            Row(
                name, temperature, rate(mine), length(mine), len(mine),
                {category: rate([c for c in mine if c.category == category])
                 for category in categories},
                by_length,
                forced, by_context,
            )
        )  # fmt: skip
    return rows


def to_markdown(rows: Sequence[Row]) -> str:
    """Tables: rates by proposer and temperature; by category; teacher-forced by context."""
    from helios_jax.calibrate.evaluation import table

    def cell(interval: Interval | None) -> str:
        if interval is None:
            return "-"
        return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"

    parts = [
        table(
            ["Proposer", "temperature", "accepted / proposed", "tokens per verification",
             "teacher-forced", "prompts"],
            [
                [row.proposer, f"{row.temperature:g}", cell(row.rate),
                 f"{row.acceptance_length:.2f}", cell(row.teacher_forced), str(row.num_prompts)]
                for row in rows
            ],
        )
    ]  # fmt: skip
    names = list(dict.fromkeys(name for row in rows for name in row.by_category))
    if len(names) > 1:
        titles = [f"{row.proposer}, {row.temperature:g}" for row in rows]
        lines = [
            [name, *(cell(row.by_category[name]) if name in row.by_category else "-"
                     for row in rows)]
            for name in names
        ]  # fmt: skip
        parts.append(table(["Category", *titles], lines))
    lengths = list(dict.fromkeys(name for row in rows for name in row.by_prompt_length))
    if len(lengths) > 1:
        titles = [f"{row.proposer}, {row.temperature:g}" for row in rows]
        lines = [
            [name, *(cell(row.by_prompt_length.get(name)) for row in rows)] for name in lengths
        ]
        parts.append(table(["Tokens of the prompt", *titles], lines))
    contexts = list(dict.fromkeys(name for row in rows for name in row.teacher_forced_by_context))
    if contexts:
        forced = [row for row in rows if row.teacher_forced_by_context]
        titles = [f"{row.proposer}, {row.temperature:g}" for row in forced]
        lines = [
            [name, *(cell(row.teacher_forced_by_context.get(name)) for row in forced)]
            for name in contexts
        ]
        parts.append(table(["Context, teacher-forced", *titles], lines))
    return "\n\n".join(parts)


def draft_of(extra: SpeculationParams, speculation: Speculation) -> tuple[Transformer, Any] | None:
    """(model, params) of a `DraftModel`; None for another proposer."""
    model = getattr(speculation.proposer, "model", None)
    return None if model is None else (model, extra.proposer)


def untrained(
    target: tuple[Any, Any], manifest: Mapping[str, Any], vocabulary: Any
) -> tuple[Any, Any]:
    """(config, params) that a pruned draft began its training with.

    Args:
      target: (config, params) of the target's checkpoint.
      manifest: the draft's.
    """
    from helios_jax.distill.architectures import PrunedShape, prune

    pruned = ((manifest["source"].get("shape") or {}).get("pruned")) or None
    require(
        pruned is not None,
        "untrained: the draft's manifest names no pruned shape; leave --untrained away",
    )
    assert pruned is not None
    shape = PrunedShape(**(pruned | {"layers": tuple(pruned["layers"])}))
    return prune(*target, shape, vocabulary)


def main() -> None:
    from checkpoints_conv import open_checkpoint, read_params
    from helios_jax import hub
    from helios_jax.calibrate.record import circumstances
    from helios_jax.distill.bigram import BigramTable, bigram_table
    from helios_jax.distill.store import read_store
    from helios_jax.llm import use_compilation_cache
    from helios_jax.model.forms import serving_form
    from helios_jax.speculative import DraftModel, PromptLookup
    from helios_jax.speculative_config import load_speculation

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
        folder = hub.resolve(given.draft)
        vocabulary = open_checkpoint(folder).draft_vocabulary
        manifest = json.loads((folder / "manifest.json").read_text())
        began = untrained((checkpoint.config, target_params), manifest, vocabulary)
        begun = serving_form(*began, given.dtype)
        count = None if vocabulary is None else len(vocabulary.nearest_V)
        proposer = DraftModel(begun.model, catch_up_tokens=64, num_target_tokens=count)
        params = begun.params
        params = params if vocabulary is None else ReducedParams.of(params, vocabulary)
        proposers["untrained"] = Speculation(proposer, J), SpeculationParams(params)
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
        for name, (speculation, extra) in proposers.items():
            counts = run_prompts(
                target, speculation, extra, prompts, given.temperature or [0.0, 1.0],
                max_tokens=given.max_tokens, eos_token_ids=eos, num_rows=given.rows,
                kv_dtype=kv_dtype,
            )  # fmt: skip
            draft = draft_of(extra, speculation)
            overlaps = None if draft is None else teacher_forced(target, draft, counts)
            suffix = f", {kv_dtype} KV" if given.kv_cache_dtype else ""
            rows += summarise(name + suffix, counts, overlaps)
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


if __name__ == "__main__":
    main()
