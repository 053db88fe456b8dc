"""Does a head on the target's hidden states learn what it should, and draft what it learnt?"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_conv import open_checkpoint, read_params, write_checkpoint
from helios_jax import load
from helios_jax.calibrate.quantizing import quantize
from helios_jax.calibrate.recipe import Recipe
from helios_jax.distill import (
    DraftShape,
    Labels,
    OptimizerPlan,
    Sequence,
    Student,
    Teacher,
    TrainingPlan,
    make_student,
    read_draft,
    train,
    write_draft,
)
from helios_jax.distill.acceptance import Prompt, run_prompts
from helios_jax.distill.acceptance_command import draft_of, untrained
from helios_jax.distill.architectures import initialise
from helios_jax.distill.overlap import teacher_forced
from helios_jax.distill.positions import PositionBatches
from helios_jax.model import DraftHead, Transformer, fuse_params, init_params
from helios_jax.speculative import (
    DraftVocabulary,
    HiddenStateDraft,
    Speculation,
    SpeculationParams,
)
from helios_jax.speculative_config import load_speculation
from tests import tiny
from tests.distill.conftest import CONFIG, changed, target_params

V, D = CONFIG.vocab_size, CONFIG.hidden_size
MODEL = Transformer(CONFIG)
SHAPE = DraftShape(
    config=(("is_draft_head", True), ("intermediate_size", 48), ("num_layers", 2)), vocab_tokens=200
)
HEAD_CONFIG = changed(CONFIG, is_draft_head=True)


def sampled(num_sequences: int = 24, length: int = 24) -> list[Sequence]:
    """Greedy text of the target, with its labels and hidden states."""
    tokens_BT = np.zeros((num_sequences, length), np.int32)
    tokens_BT[:, :4] = np.random.default_rng(0).integers(256, size=(num_sequences, 4))
    params = target_params()
    logits = jax.jit(lambda tokens: MODEL.apply(params, tokens))
    for t in range(3, length - 1):
        tokens_BT[:, t + 1] = np.argmax(np.asarray(logits(tokens_BT))[:, t], axis=-1)
    teacher = Teacher(MODEL, target_params(), 8, keep_hidden=True)
    labels = teacher.label([(row, 4) for row in tokens_BT.tolist()])
    return [Sequence(row, 4, 0.0, label) for row, label in zip(tokens_BT, labels, strict=True)]


def test_a_head_unrolls_as_it_steps_whatever_its_layout():
    params = init_params(HEAD_CONFIG, jax.random.key(0))
    random = np.random.default_rng(0)
    hidden_ND = jnp.asarray(random.normal(size=(3, D)), jnp.float32)
    tokens_NJ = jnp.asarray(random.integers(V, size=(3, 4)))
    head = DraftHead(HEAD_CONFIG)
    unrolled_NJV = head.apply(params, hidden_ND, tokens_NJ, method="unroll")
    fused, joined = DraftHead(HEAD_CONFIG, fused=True), fuse_params(params)
    state_ND = hidden_ND
    for place in range(4):
        after_ND = head.apply(params, state_ND, tokens_NJ[:, place], method="hidden")
        state_ND, logits_NV = fused.apply(joined, state_ND, tokens_NJ[:, place])
        np.testing.assert_allclose(logits_NV, unrolled_NJV[:, place], atol=1e-5)
        np.testing.assert_allclose(
            head.apply(params, after_ND, method="logits"), unrolled_NJV[:, place], atol=1e-5
        )


@pytest.mark.parametrize("whole", [False, True])
def test_every_position_meets_the_tokens_and_targets_that_came_after_it(whole):
    random = np.random.default_rng(1)
    sequences = []
    for number, length in enumerate((5, 2, 1, 9)):
        # Every label and state is known by its own number.
        own = 100 * number + np.arange(length, dtype=np.float32)
        ids = None if whole else random.integers(V, size=(length, 3)).astype(np.int32)
        labels = Labels(
            ids, np.tile(-own[:, None], (1, V if whole else 3)), -own, np.tile(own[:, None], (1, 4))
        )
        tokens = random.integers(V, size=3 + length).astype(np.int32)
        sequences.append(Sequence(tokens, 3, 1.0, labels))
    reduced = DraftVocabulary(np.arange(0, V, 2), np.arange(V) // 2)
    for vocabulary in (None, reduced):
        batches = PositionBatches(
            sequences, tokens_per_batch=12, num_draft_tokens=3, vocabulary=vocabulary
        )
        seen = []
        for batch in [batches[n] for n in range(batches.num_per_pass)]:
            counts_NJ = np.asarray(batch.counts_NJ)
            for n in np.flatnonzero(counts_NJ.any(axis=1)):
                number, i = divmod(int(batch.hidden_ND[n, 0]), 100)
                seen.append((number, i))
                drawn = sequences[number].tokens[3:]
                for j in range(3):
                    place = n * 3 + j
                    assert counts_NJ[n, j] == (i + j + 1 < len(drawn))
                    if not counts_NJ[n, j]:
                        continue
                    token, following = drawn[i + j], drawn[i + j + 1]
                    if vocabulary is not None:
                        token, following = token // 2, following // 2 if following % 2 == 0 else -1
                    assert batch.tokens_NJ[n, j] == token
                    assert batch.targets.tokens_N[place] == following
                    assert batch.targets.logprobs_NK[place, 0] == -(100 * number + i + j + 1)
                    if not whole:
                        ids = sequences[number].labels.ids_NK[i + j + 1]  # pyright: ignore[reportOptionalSubscript]
                        if vocabulary is not None:
                            ids = np.where(ids % 2 == 0, ids // 2, -1)
                        np.testing.assert_array_equal(batch.targets.ids_NK[place], ids)  # pyright: ignore[reportOptionalSubscript]
        usable = [(s, i) for s, n in enumerate((5, 2, 1, 9)) for i in range(n - 1)]
        assert sorted(seen) == usable and seen != usable
        assert sum(batch.num_counted for batch in batches.in_order()) == 9 + 1 + 21


@pytest.fixture(scope="module")
def trained() -> tuple[Student, Student, float]:
    """(as it began, trained, held-out acceptance)."""
    sequences = sampled()
    began = make_student(SHAPE, CONFIG, target_params(), sequences)
    plan = TrainingPlan(
        optimizer=OptimizerPlan(learning_rate=1e-2, num_steps=80, num_warmup_steps=2),
        tokens_per_batch=512, dtype="float32", num_draft_tokens=3, held_out=0.2,
        evaluate_every=40, checkpoint_every=80,
    )  # fmt: skip
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = train(
            DraftHead(began.config), began.params, sequences, plan, Path(folder),
            vocabulary=began.vocabulary,
        )  # fmt: skip
    return began, began._replace(params=found.params), found.acceptance


@pytest.fixture(scope="module")
def written(trained, target, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("heads") / "head"
    source = {"shape": SHAPE.to_dict(), "training": {"seed": 0}}
    write_draft(trained[1], trained[1].params, tiny.tokenizer(), out, source, None)
    return out


def speculation_of(head: Path, target: Path, J: int) -> tuple[Speculation, SpeculationParams]:
    config = {"model": str(head), "num_speculative_tokens": J, "controller": "fixed"}
    return load_speculation(config, target, tiny.tokenizer(), "float32")


# What it has learnt the continuations of.
PROMPTS = [Prompt("all", sequence.tokens[:4].tolist()) for sequence in sampled(6, 5)]
RUN: dict = dict(max_tokens=16, num_rows=6, kv_dtype="float32")


def test_it_learns_and_drafts_and_changes_no_token(trained, written, target):
    began, _, acceptance = trained
    speculation, extra = speculation_of(written, target, 3)
    assert isinstance(speculation.proposer, HiddenStateDraft)
    counts = run_prompts((MODEL, target_params()), speculation, extra, PROMPTS, [0.0], **RUN)
    for found in counts:
        logits = np.asarray(MODEL.apply(target_params(), np.array([found.tokens])))[0]
        greedy = logits.argmax(axis=1)[found.num_prompt - 1 : -1]
        np.testing.assert_array_equal(found.tokens[found.num_prompt :], greedy)

    def rate(counts):
        return sum(c.num_accepted for c in counts) / sum(c.num_proposed for c in counts)

    checkpoint = open_checkpoint(written)
    manifest = json.loads((written / "manifest.json").read_text())
    config, params = untrained((CONFIG, target_params()), manifest, checkpoint.draft_vocabulary)
    assert config == began.config
    jax.tree.map(np.testing.assert_array_equal, params, began.params)
    begun = dataclasses.replace(extra.proposer, model=fuse_params(params))
    first = extra._replace(proposer=begun)
    before = run_prompts((MODEL, target_params()), speculation, first, PROMPTS, [0.0], **RUN)
    assert rate(counts) > rate(before) + 0.1
    assert acceptance > 0.2


def test_its_overlap_is_what_rounds_of_one_draft_accept(written, target):
    speculation, extra = speculation_of(written, target, 1)
    counts = run_prompts((MODEL, target_params()), speculation, extra, PROMPTS, [0.0], **RUN)
    draft = draft_of(speculation, extra)
    assert draft is not None
    overlaps = teacher_forced((MODEL, target_params()), draft, counts)
    for found, overlap in zip(counts, overlaps, strict=True):
        place = rounds = accepted = 0
        while place < 16:
            kept = int(place < 15 and overlap.overlap_N[place])
            place, rounds, accepted = place + kept + 1, rounds + 1, accepted + kept
        assert (found.num_rounds, found.num_accepted) == (rounds, accepted)
    assert sum(c.num_accepted for c in counts) > 0


def test_a_head_is_read_back_and_is_no_model(trained, written, target, tmp_path):
    student = read_draft(written, tiny.tokenizer())
    assert student.config == trained[1].config and student.config.is_draft_head
    for a, b in zip(
        jax.tree.leaves(student.params), jax.tree.leaves(trained[1].params), strict=True
    ):
        assert np.abs(a - b).max() <= 0.01 * np.abs(b).max()
    with pytest.raises(ValueError, match="draft head, which generates nothing by itself.*--draft"):
        load(written)
    # One of the target's whole vocabulary too.
    params = jax.tree.map(np.asarray, init_params(HEAD_CONFIG, jax.random.key(0)))
    write_draft(
        Student(HEAD_CONFIG, params, None), params, tiny.tokenizer(), tmp_path / "a", {}, None
    )
    for head in (written, tmp_path / "a"):
        with pytest.raises(ValueError, match="cannot hold"):
            write_checkpoint(open_checkpoint(head), tmp_path / "other", format="huggingface")
        with pytest.raises(ValueError, match="draft head, which generates nothing"):
            quantize(open_checkpoint(head), Recipe(method="rtn"), None, tmp_path / "work")


def test_a_head_of_an_untied_target_begins_with_its_output_head():
    untied = changed(CONFIG, tie_word_embeddings=False)
    params = target_params(untied)
    config = changed(untied, is_draft_head=True)
    began = initialise(config, jax.random.key(0), params)["params"]
    for path in (("embed", "embedding"), ("lm_head", "kernel")):
        np.testing.assert_array_equal(began[path[0]][path[1]], params["params"][path[0]][path[1]])
    scale = params["params"]["final_norm"]["scale"]
    np.testing.assert_allclose(began["final_norm"]["scale"], np.sqrt(np.mean(scale**2)), rtol=1e-6)


def test_a_head_of_another_target_is_refused():
    wrong = HiddenStateDraft(DraftHead(changed(HEAD_CONFIG, hidden_size=64)))
    with pytest.raises(ValueError, match="made for a target of hidden_size=64, this one has 32"):
        wrong.check(MODEL)
    with pytest.raises(ValueError, match="vocab_size=100, this one has 258"):
        HiddenStateDraft(DraftHead(HEAD_CONFIG), num_target_tokens=100).check(MODEL)
    with pytest.raises(ValueError, match="hidden_size=64: a draft head's is its target's"):
        DraftShape(config=(("is_draft_head", True), ("hidden_size", 64))).check(CONFIG)


def test_what_a_head_cannot_learn_from_is_refused(tmp_path):
    sequences = sampled(4, 12)
    bare = [dataclasses.replace(s, labels=s.labels._replace(hidden_ND=None)) for s in sequences]
    params = init_params(HEAD_CONFIG, jax.random.key(0))
    with pytest.raises(ValueError, match="no hidden states of the target.*keep_hidden=True"):
        train(DraftHead(HEAD_CONFIG), params, bare, TrainingPlan(), tmp_path / "a")
    plan = TrainingPlan(on_policy=0.5)
    with pytest.raises(ValueError, match="on_policy=0.5: a draft head"):
        train(DraftHead(HEAD_CONFIG), params, sequences, plan, tmp_path / "b")


def test_a_matrix_head_is_unquantised_on_reading(trained, tmp_path):
    """Eight bits in groups of 64 where the widths allow it."""
    wide = changed(HEAD_CONFIG, hidden_size=64, intermediate_size=64)
    params = jax.tree.map(np.asarray, init_params(wide, jax.random.key(0)))
    write_draft(Student(wide, params, None), params, tiny.tokenizer(), tmp_path / "w", {}, 8)
    stored = read_params(open_checkpoint(tmp_path / "w"))["params"]
    assert stored["layers_0"]["ffn"]["gate"]["kernel"].bits == 8
    again = read_draft(tmp_path / "w", tiny.tokenizer()).params
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        assert np.abs(a - b).max() <= 0.01 * np.abs(b).max()
