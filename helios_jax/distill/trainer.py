"""How does training run to its end, however often it is stopped on the way?

    checkpoints/STEP/   Orbax, written while training goes on: the state, and what the host knows
    metrics.jsonl       one line per logged step and per evaluation

A step's batch hangs on its number, so that a run which goes on from a checkpoint computes what the
run without a stop would have: the same bits. Lines of `metrics.jsonl` beyond the checkpoint are
removed. The result is the evaluated checkpoint of the highest acceptance.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from helios_jax.config import require
from helios_jax.distill import store
from helios_jax.distill.batches import Batches
from helios_jax.distill.losses import LossWeights
from helios_jax.distill.positions import PositionBatches
from helios_jax.distill.step import (
    AnyBatch,
    Frozen,
    OptimizerPlan,
    TrainState,
    eval_step,
    init_state,
    state_shardings,
    train_step,
)
from helios_jax.model import DraftHead, Transformer
from helios_jax.model.params import Params
from helios_jax.speculative import DraftVocabulary

_logger = logging.getLogger("helios_jax.distill")

_METRICS = "metrics.jsonl"
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class TrainingPlan:
    """How a student is trained.

    Attributes:
      optimizer, losses: see there.
      tokens_per_batch: about; see `Batches`.
      dtype: that the student computes in, "bfloat16" or "float32"; its parameters are float32.
      num_draft_tokens: of a draft head: how far it is unrolled from every position.
      held_out: share of the sequences that acceptance is measured on and training never sees.
      log_every, evaluate_every, checkpoint_every: steps.
      patience: evaluations without a higher acceptance after which training ends; None: never.
      on_policy: share of the batches that are sampled from the student itself (arXiv 2306.13649).
      on_policy_every: steps after which the student samples anew.
      on_policy_sequences: sampled then.
      seed: of the split and the order.
    """

    optimizer: OptimizerPlan = OptimizerPlan()
    losses: LossWeights = LossWeights()
    tokens_per_batch: int = 4096
    dtype: str = "bfloat16"
    num_draft_tokens: int = 4
    held_out: float = 0.05
    log_every: int = 10
    evaluate_every: int = 100
    checkpoint_every: int = 100
    patience: int | None = 5
    on_policy: float = 0.0
    on_policy_every: int = 200
    on_policy_sequences: int = 64
    seed: int = 0

    def __post_init__(self):
        for name in (
            "tokens_per_batch", "log_every", "evaluate_every", "checkpoint_every",
            "on_policy_every", "on_policy_sequences", "num_draft_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}: must be at least 1")
        require(
            self.dtype in ("bfloat16", "float32"),
            f"dtype={self.dtype!r}: must be 'bfloat16' or 'float32'",
        )
        require(0 < self.held_out < 1, f"held_out={self.held_out}: must be in (0, 1)")
        require(0 <= self.on_policy <= 1, f"on_policy={self.on_policy}: must be in [0, 1]")
        require(
            self.patience is None or self.patience >= 1,
            f"patience={self.patience}: must be at least 1, or None",
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


class Progress(NamedTuple):
    """step, num_steps: batches done, and in all; tokens_per_second: trained on; seconds_left: at
    this rate; metrics: of the step."""

    step: int
    num_steps: int
    tokens_per_second: float
    seconds_left: float
    metrics: dict[str, float]


class Trained(NamedTuple):
    """What training ends with.

    params: the student's, of the best evaluation, float32.
    step: when that was.
    acceptance: teacher-forced, on the held-out sequences, at temperature 1 and of the teacher's top
      K tokens and one event for all others (see `losses`): an upper bound of the true one. Of a
      head the mean over the places of its draft, of which the first has the most.
    stopped_early: whether `patience` ended the training.
    metrics: the file of what was logged.
    """

    params: Params
    step: int
    acceptance: float
    stopped_early: bool
    metrics: Path


# (student's params, round) -> sequences that it samples, labelled by the teacher.
OnPolicy = Callable[[Params, int], list[store.Sequence]]


def train(
    model: Transformer | DraftHead,
    params: Params,
    sequences: Sequence[store.Sequence],
    plan: TrainingPlan,
    folder: Path,
    *,
    vocabulary: DraftVocabulary | None = None,
    on_policy: OnPolicy | None = None,
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Trained:
    """Trains a student on what its teacher made of given sequences; goes on where it was stopped.

    Args:
      model: the student, not fused; its dtype is the plan's. A draft head needs sequences with
        the teacher's hidden states, and `num_draft_tokens` of the plan says how far it learns.
      params: it begins with them, unless there is a checkpoint in `folder`.
      sequences: of a store.
      folder: of this run alone: whoever calls makes sure that it is of the same data and plan.
      vocabulary: the student's, where it has fewer tokens than the teacher.
      on_policy: needed where the plan has a share of it. It must keep what it gave for a round: a
        run that goes on in the middle of one asks again, with other parameters.
      mesh, rules: see `state_shardings`; batches are split over the mesh axis "data".

    Raises:
      ValueError: too few sequences to hold some out, or a share of `on_policy` without a sampler.
      OSError: the disk is full; the last checkpoint stays.
    """
    require(
        len(sequences) >= 2, f"training data: {len(sequences)} sequences; needs at least 2: sample"
    )
    is_head = isinstance(model, DraftHead)
    require(
        not (is_head and plan.on_policy),
        f"on_policy={plan.on_policy}: a draft head learns from the target's hidden states, which "
        "its own samples lack; give 0",
    )
    require(
        plan.on_policy == 0 or on_policy is not None,
        f"on_policy={plan.on_policy}: needs a sampler; give one, or 0",
    )
    model = dataclasses.replace(model, dtype=jnp.dtype(plan.dtype), fused=False)
    training, held_out = split(sequences, plan)
    num_shards = 1 if mesh is None else mesh.shape.get("data", 1)
    options: dict[str, Any] = dict(
        tokens_per_batch=plan.tokens_per_batch, vocabulary=vocabulary, rows_multiple=num_shards
    )  # fmt: skip
    make: Any = partial(Batches, max_length=model.config.max_model_len)
    if is_head:
        make = partial(PositionBatches, num_draft_tokens=plan.num_draft_tokens)
    batches = make(training, seed=plan.seed, **options)
    evaluation = make(held_out, **options).in_order()

    state = init_state(params, plan.optimizer)
    shardings = None
    if mesh is not None:
        tree = state_shardings(model.config, plan.optimizer, mesh, rules)
        state = jax.device_put(state, tree)
        shardings = Frozen(tree)
    hashable: Any = model
    run = train_step(hashable, plan.optimizer, plan.losses, shardings)
    evaluate = eval_step(hashable, plan.losses)

    def place(batch: AnyBatch) -> AnyBatch:
        if mesh is None:
            return batch
        rows = NamedSharding(mesh, PartitionSpec("data"))
        return jax.device_put(batch, jax.tree.map(lambda _: rows, batch))

    folder.mkdir(parents=True, exist_ok=True)
    with _Checkpoints(folder / _CHECKPOINTS) as checkpoints:
        state, best, host = checkpoints.restore(state)
        metrics = _Metrics(folder / _METRICS, host.step)
        num_steps = plan.optimizer.num_steps
        round_batches: tuple[int, Batches] | None = None
        started, tokens = time.monotonic(), 0
        first_step = host.step
        while host.step < num_steps and not host.stopped_early:
            step = host.step
            source = batches
            if on_policy is not None and plan.on_policy and _is_on_policy(plan, step):
                number = step // plan.on_policy_every
                if round_batches is None or round_batches[0] != number:
                    drawn = on_policy(state.params, number)
                    round_batches = number, make(drawn, seed=plan.seed + number, **options)
                source = round_batches[1]
            batch = source[step]
            state, values = run(state, place(batch))
            tokens += batch.num_counted
            host = dataclasses.replace(host, step=step + 1)
            is_last = host.step == num_steps
            if host.step % plan.log_every == 0 or is_last:
                found = {name: float(value) for name, value in jax.device_get(values).items()}
                if not math.isfinite(found["loss"]):
                    raise FloatingPointError(
                        f"step {host.step}: the loss is {found['loss']}; lower the learning rate, "
                        "or compute in float32"
                    )
                metrics.write({"step": host.step, **found})
                rate = tokens / (time.monotonic() - started)
                per_step = (time.monotonic() - started) / (host.step - first_step)
                left = per_step * (num_steps - host.step)
                report(Progress(host.step, num_steps, rate, left, found))
            if host.step % plan.evaluate_every == 0 or is_last:
                found = _evaluate(evaluate, state.params, evaluation, place)
                metrics.write(
                    {"step": host.step, **{f"held_out_{name}": x for name, x in found.items()}}
                )
                acceptance = 1 - found["total_variation"]
                is_best = acceptance > host.best_acceptance
                host = host.evaluated(acceptance, is_best, plan.patience)
                if is_best:
                    best = _copy(state.params)
            if host.step % plan.checkpoint_every == 0 or is_last or host.stopped_early:
                checkpoints.save(state, best, host)
    return Trained(
        jax.device_get(best), host.best_step, host.best_acceptance, host.stopped_early,
        folder / _METRICS,
    )  # fmt: skip


def split(
    sequences: Sequence[store.Sequence], plan: TrainingPlan
) -> tuple[list[store.Sequence], list[store.Sequence]]:
    """(training, held out): sequences of one prompt are on one side."""
    prompts = [bytes(sequence.tokens[: sequence.num_prompt]) for sequence in sequences]
    distinct = list(dict.fromkeys(prompts))
    order = np.random.default_rng(plan.seed).permutation(len(distinct))
    number = min(max(1, round(plan.held_out * len(distinct))), len(distinct) - 1)
    require(
        number >= 1,
        "training data: all sequences have one prompt, so that none can be held out; give more "
        "prompts",
    )
    chosen = {distinct[i] for i in order[:number]}
    sides: tuple[list[store.Sequence], list[store.Sequence]] = [], []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        sides[prompt in chosen].append(sequence)
    return sides


def _is_on_policy(plan: TrainingPlan, step: int) -> bool:
    return np.random.default_rng([plan.seed, 7, step]).random() < plan.on_policy


def _evaluate(evaluate, params: Params, batches: list, place) -> dict[str, float]:
    totals: dict[str, float] = {}
    number = 0.0
    for batch in batches:
        _, means = jax.device_get(evaluate(params, place(batch)))
        count = float(means.pop("positions"))
        number += count
        for name, value in means.items():
            totals[name] = totals.get(name, 0.0) + float(value) * count
    return {name: total / number for name, total in totals.items()}


@dataclass(frozen=True)
class _Host:
    """What goes with a state: step, the best evaluation, and how many came since."""

    step: int = 0
    best_step: int = 0
    best_acceptance: float = -1.0
    num_worse: int = 0
    stopped_early: bool = False

    def evaluated(self, acceptance: float, is_best: bool, patience: int | None) -> "_Host":
        if is_best:
            return dataclasses.replace(
                self, best_step=self.step, best_acceptance=acceptance, num_worse=0
            )
        worse = self.num_worse + 1
        stopped = patience is not None and worse >= patience
        return dataclasses.replace(self, num_worse=worse, stopped_early=stopped)


class _Checkpoints:
    """The folder of Orbax checkpoints of one run: (state, parameters of the best evaluation, host).

    The two newest are kept. A sum over all arrays goes with each, so that a damaged one is noticed;
    the one before it then counts.
    """

    def __init__(self, folder: Path):
        self._folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> "_Checkpoints":
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._manager.close()
        except Exception as unwritten:  # of the last checkpoint, which was waited for
            raise _unwritten(self._folder, unwritten) from unwritten

    def restore(self, like: TrainState) -> tuple[TrainState, Params, _Host]:
        """What the newest sound checkpoint holds; `like` itself, copied, where there is none.

        A damaged one is removed: its step is written again.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                return self._read(step, like)
            except Exception as error:
                if not _is_damage(error):
                    raise
                _logger.warning(
                    "%s: the checkpoint cannot be used, an earlier one is: %s",
                    self._folder / str(step), error,
                )  # fmt: skip
                self._manager.delete(step)
        return like, _copy(like.params), _Host()

    def save(self, state: TrainState, best: Params, host: _Host) -> None:
        """Begins to write; waits for the one before.

        Raises:
          OSError: the one before could not be written.
        """
        # Orbax writes while the next step overwrites what was donated: it gets copies.
        arrays = {"state": _copy(state), "best": _copy(best)}
        content = {"host": dataclasses.asdict(host), "sum": sum_of(arrays)}
        try:
            self._manager.save(
                host.step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(arrays),  # pyright: ignore[reportCallIssue]
                    host=ocp.args.JsonSave(content),  # pyright: ignore[reportCallIssue]
                ),
            )
        except Exception as error:
            raise _unwritten(self._folder, error) from error

    def _read(self, step: int, like: TrainState) -> tuple[TrainState, Params, _Host]:
        wanted = {"state": like, "best": like.params}
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        read = self._manager.restore(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(abstract),  # pyright: ignore[reportCallIssue]
                host=ocp.args.JsonRestore(),
            ),
        )
        arrays, content = read["arrays"], read["host"]
        require(
            sum_of(arrays) == content["sum"], "its arrays do not match their sum: they were damaged"
        )
        return arrays["state"], arrays["best"], _Host(**content["host"])


class _Metrics:
    """Appends to the file of metrics, without lines of steps after `step`."""

    def __init__(self, path: Path, step: int):
        self._path = path
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                # A line that a kill cut short is of a step after the checkpoint.
                with contextlib.suppress(json.JSONDecodeError):
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)

    def write(self, values: dict[str, float]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def sum_of(arrays: Any) -> str:
    """sha256 over all leaves, in the tree's order."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(jax.device_get(arrays)):
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _is_damage(error: Exception) -> bool:
    """Whether a checkpoint's bytes are at fault, and not a disk or memory that fails just now."""
    cause = error.__cause__ or error
    is_known = isinstance(cause, ValueError | KeyError | FileNotFoundError)
    # TensorStore gives errors of the operating system as ValueErrors too.
    return is_known and "os_error_code" not in str(cause)


def _unwritten(folder: Path, error: Exception) -> OSError:
    if os.strerror(errno.ENOSPC) in str(error):
        return OSError(
            errno.ENOSPC,
            "the disk is full: the checkpoint was not written, the one before it stays; free some "
            "space and give the same command again",
            str(folder),
        )
    return OSError(f"{folder}: a checkpoint cannot be written: {error}")
