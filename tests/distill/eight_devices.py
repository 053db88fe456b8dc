"""Do eight devices train what one does? Run by `test_sharding.py` in a process of its own."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from checkpoints_conv import with_kv_heads
from helios_jax.distill import OptimizerPlan, Sequence, Teacher, TrainingPlan, train
from helios_jax.model import Transformer
from tests.distill.conftest import CONFIG, changed, target_params

MHA = changed(CONFIG, num_kv_heads=CONFIG.num_heads, vocab_size=264)


def make_mesh(**axes: int):
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


@pytest.fixture(scope="module")
def sequences():
    """Of a multi-head teacher."""
    assert len(jax.devices()) == 8
    teacher = Teacher(Transformer(MHA), target_params(MHA), None)
    random = np.random.default_rng(0)
    texts = [random.integers(256, size=24).tolist() for _ in range(40)]
    labels = teacher.label([(text, 4) for text in texts])
    return [
        Sequence(np.array(text, np.int32), 4, 1.0, label)
        for text, label in zip(texts, labels, strict=True)
    ]


PLAN = TrainingPlan(
    optimizer=OptimizerPlan(learning_rate=1e-2, num_steps=30, num_warmup_steps=2),
    tokens_per_batch=512, dtype="float32", held_out=0.2, evaluate_every=15, checkpoint_every=10,
    log_every=1,
)  # fmt: skip


def uptrain(sequences, folder, **mesh):
    """A student with grouped queries, made of the teacher."""
    params, config = with_kv_heads(target_params(MHA), MHA, 2)
    params = jax.tree.map(np.asarray, params)
    reports = []
    trained = train(
        Transformer(config), params, sequences, PLAN, folder, report=reports.append, **mesh
    )
    return trained, reports


@pytest.fixture(scope="module")
def one_device(sequences, tmp_path_factory):
    return uptrain(sequences, tmp_path_factory.mktemp("one"))


def test_a_gqa_student_comes_closer_to_its_mha_teacher(one_device):
    trained, reports = one_device
    # Each is of its batch before the step that learns from it: the first is the start's.
    losses = [report.metrics["forward_kl"] for report in reports]
    assert len(losses) == 30 and np.mean(losses[-3:]) < 0.5 * losses[0]
    began = 1 - reports[0].metrics["total_variation"]
    assert trained.acceptance > began + 0.02


@pytest.mark.parametrize(
    "axes, rules",
    [
        ({"data": 8}, {}),
        ({"data": 8}, None),
        ({"data": 4, "model": 2}, {"embed": "data", "heads": "model", "ffn": "model"}),
    ],
    ids=["data parallel", "fsdp", "fsdp and tensor parallel"],
)
def test_devices_train_what_one_trains(sequences, one_device, tmp_path, axes, rules):
    mesh = make_mesh(**axes)
    trained, reports = uptrain(sequences, tmp_path, mesh=mesh, rules=rules)
    expected, expected_reports = one_device
    for found, wanted in zip(reports, expected_reports, strict=True):
        assert found.metrics["loss"] == pytest.approx(wanted.metrics["loss"], rel=2e-2)
    assert trained.acceptance == pytest.approx(expected.acceptance, abs=5e-3)


def test_a_state_is_split_as_the_table_says():
    from helios_jax.distill import state_shardings
    from helios_jax.distill.step import init_state

    mesh = make_mesh(data=8)
    shardings = state_shardings(MHA, PLAN.optimizer, mesh)
    state = jax.device_put(init_state(target_params(MHA), PLAN.optimizer), shardings)
    kernel = state.params["params"]["layers_0"]["ffn"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (4, 64)
    moments = [
        leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
        if "up" in jax.tree_util.keystr(path) and leaf.ndim == 2
    ]
    assert len(moments) == 4  # two layers, two moments
    assert all(leaf.sharding.shard_shape(leaf.shape) == (4, 64) for leaf in moments)


def test_a_sharded_run_goes_on_from_its_checkpoint(sequences, tmp_path):
    mesh = make_mesh(data=8)
    whole, _ = uptrain(sequences, tmp_path / "whole", mesh=mesh)

    class Stop(Exception):
        pass

    def report(progress):
        if progress.step == 20:
            raise Stop

    params, config = with_kv_heads(target_params(MHA), MHA, 2)
    params = jax.tree.map(np.asarray, params)
    with pytest.raises(Stop):
        train(Transformer(config), params, sequences, PLAN, tmp_path / "resumed", report=report,
              mesh=mesh)  # fmt: skip
    resumed, _ = uptrain(sequences, tmp_path / "resumed", mesh=mesh)
    for a, b in zip(jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True):
        np.testing.assert_array_equal(a, b)
