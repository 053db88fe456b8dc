"""Does training learn, and is a resumed run the same as one without a stop?"""

import errno
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from helios_jax.distill import (
    DraftShape,
    LossWeights,
    OptimizerPlan,
    SamplingPlan,
    Teacher,
    TrainingPlan,
    load_target,
    make_student,
    read_prompts,
    read_store,
    sample_target,
    train,
    train_student,
)
from helios_jax.distill import trainer as trainers
from helios_jax.distill.batches import Batches
from helios_jax.model import Transformer
from tests.distill.conftest import CONFIG, target_params

SAMPLING = SamplingPlan(
    num_sequences=24, temperatures=(0.0, 1.0), max_tokens=24, top_k=8, sequences_per_shard=12
)
SHAPE = DraftShape(
    config=(("hidden_size", 16), ("intermediate_size", 32), ("num_layers", 1)), vocab_tokens=128
)


def plan(num_steps: int = 6, **changes) -> TrainingPlan:
    optimizer = OptimizerPlan(learning_rate=3e-3, num_steps=num_steps, num_warmup_steps=1)
    fields: dict[str, Any] = dict(
        optimizer=optimizer, tokens_per_batch=256, dtype="float32", held_out=0.2, log_every=1,
        evaluate_every=2, checkpoint_every=2,
    )  # fmt: skip
    return TrainingPlan(**(fields | changes))


@pytest.fixture(scope="module")
def llm(target: Path):
    # As `helios distill` loads it, so that its tests share the programs.
    return load_target(target, dtype="float32", max_model_len=64, max_num_seqs=32)


@pytest.fixture(scope="module")
def prompts(llm, prompts_file: Path):
    return read_prompts([prompts_file], llm.tokenizer, 40)


@pytest.fixture(scope="module")
def sequences(target: Path, llm, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    return sample_target(target, llm, prompts, SAMPLING, folder).sequences()


@pytest.fixture(scope="module")
def student(sequences):
    return make_student(SHAPE, CONFIG, target_params(), sequences)


def equal(first, second) -> bool:
    return jax.tree.structure(first) == jax.tree.structure(second) and all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


def run(student, sequences, plan: TrainingPlan, folder: Path, **options):
    return train(
        Transformer(student.config), student.params, sequences, plan, folder,
        vocabulary=student.vocabulary, **options,
    )  # fmt: skip


def test_samples_are_the_targets_and_labels_its_distributions(llm, sequences, prompts):
    assert len(sequences) == SAMPLING.num_sequences
    greedy = [sequence for sequence in sequences if sequence.temperature == 0]
    assert len(greedy) == 12
    for sequence in greedy[:4]:
        assert sequence.tokens[: sequence.num_prompt].tolist() in prompts
        logits = np.asarray(llm.model.apply(llm.params, sequence.tokens[None]))[0]
        logp = np.asarray(jax.nn.log_softmax(logits, axis=-1))[sequence.num_prompt - 1 : -1]
        ids = np.argsort(-logp, axis=1, kind="stable")[:, : SAMPLING.top_k]
        # A greedy row took the likeliest token.
        np.testing.assert_array_equal(sequence.tokens[sequence.num_prompt :], ids[:, 0])
        np.testing.assert_array_equal(sequence.labels.ids_NK, ids)
        kept = np.take_along_axis(logp, ids, axis=1)
        np.testing.assert_allclose(sequence.labels.logprobs_NK, kept, atol=1e-4)
        tail = 1 - np.exp(kept.astype(np.float64)).sum(axis=1)
        np.testing.assert_allclose(np.exp(sequence.labels.tail_N), tail, atol=5e-5)


def test_a_damaged_shard_is_sampled_again_with_the_same_bits(
    target, llm, prompts, tmp_path, sequences
):
    sample_target(target, llm, prompts, SAMPLING, tmp_path)
    first, second = sorted(tmp_path.glob("shard_*"))
    content = second.read_bytes()
    second.write_bytes(content[:100])
    told = []
    sample_target(target, llm, prompts, SAMPLING, tmp_path, warn=told.append)
    assert len(told) == 1 and str(second) in told[0]
    assert second.read_bytes() == content and first.exists()


def test_all_of_a_distribution_can_be_kept(llm, sequences, student):
    [labels] = Teacher(llm.model, llm.params, None).label(
        [(sequences[0].tokens.tolist(), sequences[0].num_prompt)]
    )
    assert labels.ids_NK is None and labels.logprobs_NK.shape[1] == CONFIG.vocab_size
    kept = np.take_along_axis(labels.logprobs_NK, sequences[0].labels.ids_NK, axis=1)
    np.testing.assert_allclose(kept, sequences[0].labels.logprobs_NK, atol=1e-5)


def test_a_draft_learns_its_target(sequences, student, tmp_path):
    reports = []
    optimizer = OptimizerPlan(learning_rate=2e-2, num_steps=60, num_warmup_steps=2)
    learning = plan(
        optimizer=optimizer, evaluate_every=20, checkpoint_every=60, tokens_per_batch=1024
    )
    trained = run(student, sequences, learning, tmp_path, report=reports.append)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    held_out = [
        1 - line["held_out_total_variation"] for line in lines if "held_out_loss" not in line
        and "held_out_total_variation" in line
    ]  # fmt: skip
    assert trained.acceptance == max(held_out)
    training = [line["total_variation"] for line in lines if "total_variation" in line]
    assert len(training) == 60
    assert np.mean(training[-5:]) < np.mean(training[:5]) - 0.05
    assert reports[-1].step == 60 and reports[-1].seconds_left == 0
    assert reports[0].tokens_per_second > 0 and reports[0].seconds_left > 0


@pytest.mark.parametrize("on_policy", [0.0, 0.6])
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    sequences, student, llm, tmp_path, on_policy
):
    options = dict(teacher=Teacher(llm.model, llm.params, SAMPLING.top_k), sampling=SAMPLING)
    wanted = plan(on_policy=on_policy, on_policy_every=3, on_policy_sequences=4)

    def begin(folder, **more):
        return train_student(student, sequences, wanted, folder, {}, **options, **more)

    whole = begin(tmp_path / "whole")

    class Stop(Exception):
        pass

    stops = []
    for stop_at in (2, 3, 5):

        def report(progress, stop_at=stop_at):
            if progress.step == stop_at:
                raise Stop

        with pytest.raises(Stop) as stopped:
            begin(tmp_path / "resumed", report=report)
        # Kept, with all that its frames hold: the folder must be free nonetheless.
        stops.append(stopped.value)
    resumed = begin(tmp_path / "resumed")
    assert equal(whole.params, resumed.params) and whole[1:4] == resumed[1:4]
    assert whole.metrics.read_text() == resumed.metrics.read_text()
    stored = [len([*(tmp_path / name).rglob("shard_*")]) for name in ("whole", "resumed")]
    assert stored[0] == stored[1] and (stored[0] > 0) == (on_policy > 0)


def test_a_damaged_checkpoint_is_told_and_the_one_before_counts(
    sequences, student, tmp_path, caplog
):
    whole = run(student, sequences, plan(6), tmp_path / "whole")
    run(student, sequences, plan(6), tmp_path / "damaged")
    newest = tmp_path / "damaged" / "checkpoints" / "6"
    damaged = 0
    for path in newest.rglob("*"):
        if path.is_file() and path.stat().st_size > 2000:
            content = bytearray(path.read_bytes())
            content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
            path.write_bytes(content)
            damaged += 1
    assert damaged
    again = run(student, sequences, plan(6), tmp_path / "damaged")
    assert "cannot be used" in caplog.text and str(newest) in caplog.text
    assert equal(again.params, whole.params)


def test_training_ends_early_without_progress(sequences, student, tmp_path, monkeypatch):
    found = iter([0.6, 0.4, 0.5, 0.4])
    monkeypatch.setattr(trainers, "_evaluate", lambda *_: {"total_variation": next(found)})
    stuck = plan(evaluate_every=1, patience=2)
    trained = run(student, sequences, stuck, tmp_path)
    assert trained[1:4] == (2, 0.6, True)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 2, 2, 3, 3, 4, 4]
    # Once it has ended, it has ended.
    assert run(student, sequences, stuck, tmp_path)[1:] == trained[1:]
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == lines


def test_accumulated_batches_are_one_update(sequences, student):
    """Two halves of a batch, averaged, move the parameters as the whole does."""
    from helios_jax.distill.step import init_state, train_step

    model: Any = Transformer(student.config)
    losses = LossWeights()
    whole = Batches(sequences[:8], tokens_per_batch=512, vocabulary=student.vocabulary)[0]
    if float(np.sum(whole.counts_BT[:4])) != float(np.sum(whole.counts_BT[4:])):
        whole = whole._replace(
            counts_BT=np.broadcast_to(whole.counts_BT.min(axis=0), whole.counts_BT.shape)
        )
    halves = [
        jax.tree.map(lambda x, part=part: np.split(x, 2)[part], whole) for part in range(2)
    ]  # fmt: skip
    once = OptimizerPlan(num_steps=4, num_warmup_steps=0)
    twice = OptimizerPlan(num_steps=8, num_warmup_steps=0, accumulate=2)
    state, _ = train_step(model, once, losses)(init_state(student.params, once), whole)
    other = init_state(student.params, twice)
    for half in halves:
        other, _ = train_step(model, twice, losses)(other, half)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_the_order_of_batches_hangs_on_seed_and_number_alone(sequences):
    def first_tokens(seed, numbers):
        batches = Batches(sequences, tokens_per_batch=128, seed=seed)
        return [batches[number].tokens_BT.tolist() for number in numbers]

    per_pass = Batches(sequences, tokens_per_batch=128).num_per_pass
    forward = first_tokens(0, range(2 * per_pass))
    assert first_tokens(0, reversed(range(2 * per_pass))) == forward[::-1]
    assert forward[:per_pass] != forward[per_pass:] and first_tokens(1, range(per_pass)) != forward

    def rows(batches):
        return sorted(row for batch in batches for row in batch if any(row))

    assert rows(forward[:per_pass]) == rows(forward[per_pass:])
    assert len(rows(forward[:per_pass])) == len(sequences)


def test_one_prompts_sequences_are_on_one_side(sequences):
    training, held_out = trainers.split(sequences, plan())
    sides = [{bytes(s.tokens[: s.num_prompt]) for s in side} for side in (training, held_out)]
    assert not sides[0] & sides[1] and len(training) + len(held_out) == len(sequences)


def test_another_training_is_beside_and_the_same_one_is_done(sequences, student, tmp_path):
    def begin(student, wanted):
        reports = []
        trained = train_student(
            student, sequences, wanted, tmp_path, {"data": 1}, report=reports.append
        )
        return trained, len(reports)

    first, num_steps = begin(student, plan(2))
    assert num_steps == 2
    params = jax.tree.map(lambda leaf: 2 * leaf, student.params)
    others = [begin(student, plan(3))[0], begin(student._replace(params=params), plan(2))[0]]
    assert {found.metrics.parents[1] for found in (first, *others)} == {tmp_path}
    assert len({found.metrics for found in (first, *others)}) == 3
    again, num_steps = begin(student, plan(2))
    assert num_steps == 0 and again[1:] == first[1:] and equal(again.params, first.params)


def test_the_student_never_goes_on_from_a_held_out_prompt(sequences, student, llm, tmp_path):
    wanted = plan(3, on_policy=1.0, on_policy_sequences=32)
    trained = train_student(
        student, sequences, wanted, tmp_path, {}, sampling=SAMPLING,
        teacher=Teacher(llm.model, llm.params, SAMPLING.top_k),
    )  # fmt: skip
    own = read_store(trained.metrics.parent / "on_policy").sequences()
    sides = [
        {bytes(s.tokens[: s.num_prompt]) for s in side}
        for side in (own, *trainers.split(sequences, wanted))
    ]
    drawn, training, held_out = sides
    assert drawn == training and held_out and not drawn & held_out


def test_a_full_disk_is_told_and_survivable(sequences, student, tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    def full(*args, **kwargs):
        raise ValueError("tensorstore: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        with pytest.raises(OSError, match="the disk is full: the checkpoint was not written"):
            run(student, sequences, plan(), tmp_path)
    assert run(student, sequences, plan(), tmp_path).step > 0


def test_a_last_checkpoint_that_could_not_be_written_is_told(tmp_path, monkeypatch):
    """It is written while nothing else happens: only the end waits for it."""

    def full():
        raise ValueError("tensorstore: No space left on device")

    checkpoints = trainers._Checkpoints(tmp_path)
    with pytest.raises(OSError, match="the disk is full: the checkpoint was not written"):
        with checkpoints:
            monkeypatch.setattr(checkpoints._manager, "wait_until_finished", full)
    monkeypatch.undo()
    checkpoints._manager.close()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError()])
def test_a_checkpoint_that_cannot_be_read_now_stays(
    sequences, student, tmp_path, monkeypatch, error
):
    import orbax.checkpoint as ocp

    def fail(*args, **kwargs):
        raise error

    whole = run(student, sequences, plan(2), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "restore", fail)
        with pytest.raises(type(error)):
            run(student, sequences, plan(2), tmp_path)
    reports = []
    again = run(student, sequences, plan(2), tmp_path, report=reports.append)
    assert not reports and equal(again.params, whole.params)


def test_a_checkpoint_whose_files_cannot_be_opened_stays(sequences, student, tmp_path):
    run(student, sequences, plan(2), tmp_path)
    checkpoint = tmp_path / "checkpoints" / "2"
    large = [p for p in checkpoint.rglob("d/*") if p.stat().st_size > 2000]
    assert large
    for path in large:
        path.unlink()
        path.symlink_to(path.name)
    with pytest.raises(Exception, match="error while reading"):
        run(student, sequences, plan(2), tmp_path)
    assert checkpoint.is_dir()
