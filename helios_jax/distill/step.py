"""What is one training step? Pure functions of a donated state; the jitted one is at the end.

Master parameters are float32; the model computes in its own dtype (a linear multiplies in the
narrower of activations' and weights'). Gradients of `accumulate` steps are averaged before one
update of AdamW (arXiv 1711.05101), clipped by their global norm, at a learning rate that rises
linearly and falls as a cosine (arXiv 1608.03983).
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from helios_jax.config import require
from helios_jax.distill.batches import Batch
from helios_jax.distill.losses import LossWeights, losses, weighted_loss
from helios_jax.distill.positions import PositionBatch
from helios_jax.model import DraftHead, Transformer, param_shardings
from helios_jax.model.compiler import jit
from helios_jax.model.params import Params


@dataclass(frozen=True)
class OptimizerPlan:
    """Attributes:
    learning_rate: the highest.
    num_steps: batches in all; num_warmup_steps: of them, while the rate rises.
    final_learning_rate: share of the highest that is left at the end.
    weight_decay: of matrices; vectors (norms, biases) have none.
    max_grad_norm: of all gradients together.
    accumulate: batches per update.
    """

    learning_rate: float = 1e-3
    num_steps: int = 1000
    num_warmup_steps: int = 50
    final_learning_rate: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    accumulate: int = 1
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self):
        for name in ("learning_rate", "max_grad_norm"):
            value = getattr(self, name)
            require(value > 0, f"{name}={value}: must be greater than 0")
        for name in ("num_steps", "accumulate"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}: must be at least 1")
        require(
            0 <= self.num_warmup_steps < self.num_steps,
            f"num_warmup_steps={self.num_warmup_steps}: must be in 0..{self.num_steps - 1}",
        )
        require(
            0 <= self.final_learning_rate <= 1,
            f"final_learning_rate={self.final_learning_rate}: must be in [0, 1]",
        )
        require(self.weight_decay >= 0, f"weight_decay={self.weight_decay}: must be at least 0")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """params: float32 masters; optimizer: optax's state."""

    params: Params
    optimizer: Any


@functools.lru_cache
def make_optimizer(plan: OptimizerPlan) -> optax.GradientTransformation:
    """See the module."""
    num_updates = max(1, plan.num_steps // plan.accumulate)
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if plan.num_warmup_steps else plan.learning_rate,
        peak_value=plan.learning_rate,
        warmup_steps=plan.num_warmup_steps // plan.accumulate,
        decay_steps=num_updates,
        end_value=plan.learning_rate * plan.final_learning_rate,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(plan.max_grad_norm),
        optax.adamw(
            schedule, plan.beta1, plan.beta2, weight_decay=plan.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
        ),
    )  # fmt: skip
    if plan.accumulate == 1:
        return optimizer
    return optax.MultiSteps(optimizer, plan.accumulate).gradient_transformation()


def init_state(params: Params, plan: OptimizerPlan) -> TrainState:
    """The state before the first step; `params` is copied, as the state is donated."""
    masters = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
    return TrainState(masters, make_optimizer(plan).init(masters))


def state_shardings(
    config: Any, plan: OptimizerPlan, mesh: Mesh, rules: dict[str, str] | None = None
) -> TrainState:
    """Where each array of a state lies: parameters by the logical-axis table, moments beside them.

    Args:
      config: the student's.
      rules: see `param_shardings`; the default is FSDP: the residual stream's axis over "data".
    """
    rules = {"embed": "data"} if rules is None else rules
    params = param_shardings(config, mesh, rules)
    whole = NamedSharding(mesh, PartitionSpec())
    optimizer = make_optimizer(plan)
    shapes = jax.eval_shape(
        lambda: optimizer.init(jax.tree.map(lambda _: jnp.zeros((1, 1)), params))
    )
    moments = optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, shapes, params,
        transform_non_params=lambda _: whole,
    )  # fmt: skip
    return TrainState(params, moments)


AnyBatch = Batch | PositionBatch


def batch_loss(
    model: Transformer | DraftHead, weights: LossWeights, params: Params, batch: AnyBatch
) -> tuple[Array, dict[str, Array]]:
    """The weighted loss of a batch, and the means of all losses, with `positions` counted.

    Of a head, over all places of its draft alike.
    """
    logits: Any
    if isinstance(batch, PositionBatch):
        logits = model.apply(params, batch.hidden_ND, batch.tokens_NJ, method="unroll")
        counts_N = batch.counts_NJ.reshape(-1)
    else:
        logits = model.apply(params, batch.tokens_BT, batch.positions_BT)
        counts_N = batch.counts_BT.reshape(-1)
    by_name = losses(logits.reshape(-1, logits.shape[-1]), batch.targets)
    number = jnp.sum(counts_N)
    means = {
        name: jnp.sum(jnp.where(counts_N > 0, values_N, 0)) / jnp.maximum(number, 1)
        for name, values_N in by_name.items()
    }
    return weighted_loss(by_name, counts_N, weights), means | {"positions": number}


def update(
    model: Transformer | DraftHead,
    plan: OptimizerPlan,
    weights: LossWeights,
    state: TrainState,
    batch: AnyBatch,
) -> tuple[TrainState, dict[str, Array]]:
    """One batch: the next state, and metrics: `loss`, the losses' means, `grad_norm`."""
    loss_of = functools.partial(batch_loss, model, weights)
    (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params, batch)
    updates, optimizer = make_optimizer(plan).update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics |= {"loss": loss, "grad_norm": optax.tree.norm(gradients)}
    return TrainState(params, optimizer), metrics  # pyright: ignore[reportArgumentType]


@functools.lru_cache
def train_step(
    model: Transformer | DraftHead,
    plan: OptimizerPlan,
    weights: LossWeights,
    shardings: Any = None,
):
    """The compiled `update`, (state, batch) -> (state, metrics); the state is donated.

    Args:
      shardings: `Frozen` shardings that the new state keeps; None on one device.
    """
    more: dict[str, Any] = {} if shardings is None else {"out_shardings": (shardings.tree, None)}
    return jit(functools.partial(update, model, plan, weights), donate_argnames="state", **more)


@functools.lru_cache
def eval_step(model: Transformer | DraftHead, weights: LossWeights):
    """The compiled `batch_loss`, (params, batch) -> (loss, means)."""
    return jit(functools.partial(batch_loss, model, weights))


class Frozen:
    """A tree that may be an argument of a cached function: known by itself, not by its value."""

    def __init__(self, tree: Any):
        self.tree = tree
