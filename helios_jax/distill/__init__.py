"""Drafts distilled against the very target, quantised as it is, that they will draft for.

    samples = sample_target(path, llm, prompts, SamplingPlan(), folder / "samples")
    student = make_student(DraftShape(PrunedShape((0, 29)), vocab_tokens=8192), config, params, …)
    trained = train_student(student, samples.sequences(), TrainingPlan(), folder / "training", …)
    write_draft(student, trained.params, tokenizer, out, source, bits=8)

`helios distill` is these functions on the command line. `train` alone trains any student on any
teacher's labels, sharded or not: a model that was converted to fewer KV heads against the one
before, or a draft against a target that was quantised anew (`read_draft`).
"""

from helios_jax.distill.architectures import (
    PrunedShape,
    draft_config,
    initialise,
    prune,
    reduce_vocabulary,
)
from helios_jax.distill.batches import Batch, Batches
from helios_jax.distill.distilling import (
    DraftShape,
    Student,
    load_target,
    make_student,
    read_draft,
    read_prompts,
    sample_target,
    target_identity,
    train_student,
    write_draft,
)
from helios_jax.distill.losses import LossWeights, Targets, losses
from helios_jax.distill.on_policy import sampler
from helios_jax.distill.sampling import SamplingPlan, sample
from helios_jax.distill.step import OptimizerPlan, TrainState, state_shardings, train_step
from helios_jax.distill.store import Labels, Sequence, Store, open_store, read_store
from helios_jax.distill.teacher import Teacher
from helios_jax.distill.trainer import Trained, TrainingPlan, train

__all__ = [
    "Batch",
    "Batches",
    "DraftShape",
    "Labels",
    "LossWeights",
    "OptimizerPlan",
    "PrunedShape",
    "SamplingPlan",
    "Sequence",
    "Store",
    "Student",
    "Targets",
    "Teacher",
    "TrainState",
    "Trained",
    "TrainingPlan",
    "draft_config",
    "initialise",
    "load_target",
    "losses",
    "make_student",
    "open_store",
    "prune",
    "read_draft",
    "read_prompts",
    "read_store",
    "reduce_vocabulary",
    "sample",
    "sample_target",
    "sampler",
    "state_shardings",
    "target_identity",
    "train",
    "train_student",
    "train_step",
    "write_draft",
]
