"""Is acceptance counted as it happens, and are the baselines what they say?"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.distill import Labels, Sequence
from helios_jax.distill.acceptance import Counts, Prompt, read_prompts, run_prompts
from helios_jax.distill.acceptance_command import draft_of, measure
from helios_jax.distill.acceptance_report import length, rate, summarise, to_markdown
from helios_jax.distill.bigram import BigramTable, bigram_table
from helios_jax.distill.overlap import Overlap, teacher_forced
from helios_jax.model import Transformer
from helios_jax.speculative import DraftModel, Speculation, SpeculationParams
from tests import tiny
from tests.distill.conftest import CONFIG, target_params

MODEL = Transformer(CONFIG)
PROMPTS = [
    Prompt("a" if i % 2 else "b", np.random.default_rng(i).integers(250, size=3 + i).tolist())
    for i in range(5)
]


def drafting(noise: float = 0.3) -> tuple[Speculation, SpeculationParams]:
    """The target with noise of a share of each leaf's standard deviation: one program for all."""
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: (
            leaf
            + np.float32(noise * leaf.std()) * random.normal(size=leaf.shape).astype(np.float32)
        ),
        target_params(),
    )
    return Speculation(DraftModel(Transformer(CONFIG)), 3), SpeculationParams(params)


def run(speculation, extra, temperatures=(0.0, 1.0), **options):
    return run_prompts(
        (MODEL, target_params()), speculation, extra, PROMPTS, temperatures, max_tokens=16,
        num_rows=4, kv_dtype="float32", **options,
    )  # fmt: skip


def test_a_draft_that_is_the_target_is_always_right():
    counts = run(*drafting(noise=0))
    assert len(counts) == 10 and {c.temperature for c in counts} == {0.0, 1.0}
    assert all(c.num_accepted == c.num_proposed > 0 for c in counts if c.temperature == 0)
    assert rate(counts).value > 0.98
    assert all(len(c.tokens) == c.num_prompt + 16 for c in counts)


def test_greedy_acceptance_is_that_of_the_teacher_forced_positions():
    """Walking along the target's text: what a round accepts is the run of matches from there."""
    speculation, extra = drafting()
    counts = run(speculation, extra, temperatures=(0.0,))
    draft = draft_of(speculation, extra)
    assert draft is not None
    overlaps = teacher_forced((MODEL, target_params()), draft, counts)
    assert 0 < np.mean([o.overlap_N.mean() for o in overlaps]) < 1
    for found, overlap in zip(counts, overlaps, strict=True):
        matches = overlap.overlap_N.astype(bool)
        place = proposed = accepted = rounds = 0
        while place < 16:
            asked = min(3, 16 - place - 1)
            run_of = matches[place : place + asked]
            kept = int(np.cumprod(run_of).sum())
            proposed, accepted, rounds = proposed + asked, accepted + kept, rounds + 1
            place += kept + 1
        assert (found.num_proposed, found.num_accepted, found.num_rounds) == (
            proposed, accepted, rounds,
        )  # fmt: skip
        np.testing.assert_array_equal(overlap.context_N, found.num_prompt + np.arange(16))


def test_the_overlap_of_sampled_text_is_the_mass_that_two_laws_share():
    speculation, extra = drafting()
    counts = [c for c in run(speculation, extra, temperatures=(0.7,))][:2]
    draft = draft_of(speculation, extra)
    assert draft is not None
    overlaps = teacher_forced((MODEL, target_params()), draft, counts)
    for text, overlap in zip(counts, overlaps, strict=True):
        tokens = jnp.asarray([text.tokens])

        def law(model, params, tokens=tokens, text=text):
            logits = np.asarray(model.apply(params, tokens))[0, text.num_prompt - 1 : -1] / 0.7
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            return p / p.sum(axis=1, keepdims=True)

        shared = np.minimum(law(MODEL, target_params()), law(*draft)).sum(axis=1)
        np.testing.assert_allclose(overlap.overlap_N, shared, rtol=1e-3, atol=1e-5)


def sequence(tokens, num_prompt):
    number = len(tokens) - num_prompt
    labels = Labels(None, np.zeros((number, 1), np.float32), np.zeros(number, np.float32))
    return Sequence(np.array(tokens, np.int32), num_prompt, 1.0, labels)


def test_a_bigram_table_knows_what_was_sampled_and_drafts_it():
    samples = [sequence([9, 1, 2, 3, 1, 2, 1, 4], 1), sequence([5, 6, 1, 2], 3)]
    table = bigram_table(samples, 8 + 2)
    # 5 was followed by 6 in a prompt only, 2 by 1 and 3 once each.
    assert table.tolist() == [-1, 2, 1, 1, -1, -1, -1, -1, -1, 1]
    next_V = np.full(CONFIG.vocab_size, -1, np.int32)
    counts = run(
        Speculation(BigramTable(), 3), SpeculationParams(jnp.asarray(next_V)), temperatures=(0.0,)
    )
    assert all(c.num_proposed == 0 and c.num_rounds == 16 for c in counts)
    # A table of what the target says next is right as often as a token decides its successor.
    pairs = [sequence(list(c.tokens), c.num_prompt) for c in counts]
    learnt = jnp.asarray(bigram_table(pairs, CONFIG.vocab_size))
    again = run(Speculation(BigramTable(), 3), SpeculationParams(learnt), temperatures=(0.0,))
    assert [c.tokens for c in again] == [c.tokens for c in counts]
    assert sum(c.num_accepted for c in again) > 0


def counts_of(pairs):
    return [Counts("a", 0.0, proposed, accepted, 4, (1, 2), 1) for accepted, proposed in pairs]


def test_intervals_are_over_prompts():
    even = rate(counts_of([(2, 4)] * 20))
    assert even == (0.5, 0.5, 0.5)
    uneven = rate(counts_of([(0, 4), (4, 4)] * 10))
    # A mean of 20 coin flips: 1.96 * 0.5 / sqrt(20) to each side.
    assert uneven.value == 0.5
    assert uneven.high - uneven.low == pytest.approx(0.44, abs=0.08)
    assert length(counts_of([(2, 4), (6, 16)])).value == 2
    # Eight of eight, or none: 1 + 2, or 1.
    assert length(counts_of([(8, 8)])) == (3, 3, 3)


def test_what_is_measured_of_one_proposer():
    """Rounds of any, and the overlap where it is a draft."""
    options = dict(max_tokens=16, num_rows=4, kv_dtype="float32")
    target = (MODEL, target_params())
    rows = measure("draft", target, drafting(), PROMPTS, (0.0, 1.0), **options)
    assert [(row.proposer, row.temperature) for row in rows] == [("draft", 0.0), ("draft", 1.0)]
    assert all(row.num_prompts == 5 and set(row.by_category) == {"a", "b"} for row in rows)
    assert all(row.teacher_forced is not None and row.teacher_forced.value > 0 for row in rows)
    table = (
        Speculation(BigramTable(), 3),
        SpeculationParams(jnp.full(CONFIG.vocab_size, 7, jnp.int32)),
    )
    [row] = measure("table", target, table, PROMPTS, (0.0,), **options)
    assert row.teacher_forced is None and row.rate.value < 1


def test_the_tables_hold_every_proposer_category_length_and_context():
    counts = [
        Counts(category, 0.0, 4, accepted, 2, tuple(range(num_prompt + 4)), num_prompt)
        for category, accepted, num_prompt in (("a", 4, 126), ("b", 2, 200))
    ]
    overlaps = [
        Overlap(np.array(x), n + np.arange(4)) for x, n in (([1, 1, 0, 0], 126), ([1] * 4, 200))
    ]
    [drafted] = summarise("draft", counts, overlaps)
    [looked] = summarise("lookup", counts[:1], None)
    assert drafted.rate.value == 0.75 and drafted.acceptance_length.value == 2.5
    assert {name: found.value for name, found in drafted.by_category.items()} == {"a": 1, "b": 0.5}
    assert {name: found.value for name, found in drafted.by_prompt_length.items()} == {
        "0 to 127": 1, "128 to 255": 0.5,
    }  # fmt: skip
    by_context = {name: found.value for name, found in drafted.teacher_forced_by_context.items()}
    assert by_context == {"0 to 127": 1, "128 to 255": pytest.approx(4 / 6)}
    titles, *_ = parts = to_markdown([drafted, looked]).split("\n\n")
    assert len(parts) == 4 and "0.750 (0.500 to 1.000)" in titles
    # A proposer that lacks a kind has a dash; one without overlaps has no column.
    assert "draft, 0 | lookup, 0" in parts[1] and parts[1].splitlines()[-1].endswith("| - |")
    assert "draft, 0" in parts[3] and "lookup" not in parts[3]
    # Kinds are told apart where there are several.
    assert "\n\n" not in to_markdown([looked])


def test_prompts_are_read_by_category(tmp_path: Path):
    lines = [
        {"turns": ["one", "two"], "category": "x"}, {"turns": ["three"], "category": "x"},
        {"prompt": "four", "category": "y"}, {"messages": [{"role": "user", "content": "five"}]},
        {"prompt": "a long one" * 20, "category": "y"},
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    tokenizer = tiny.tokenizer()
    found = read_prompts(path, tokenizer, 1, max_length=60)
    assert [prompt.category for prompt in found] == ["x", "y", "all"]
    assert tokenizer.decode(found[0].tokens).startswith("<|user|>one")
    path.write_text('{"text": "what"}')
    with pytest.raises(ValueError, match=":1: must have `prompt`"):
        read_prompts(path, tokenizer, None, max_length=60)
