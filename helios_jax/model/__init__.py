"""The transformer: a frozen Flax Linen module and functions on its plain parameters tree.

    model = Transformer(config)
    params = init_params(config, jax.random.key(0))       # or a checkpoint's
    logits_BTV = model.apply(params, tokens_BT)           # differentiable

This is the only package that imports Flax.
"""

from helios_jax.model.draft_head import DraftHead
from helios_jax.model.params import fuse_params, init_params, model_of, separate_head
from helios_jax.model.sharding import logical_axes, param_shardings
from helios_jax.model.transformer import Transformer

__all__ = [
    "DraftHead",
    "Transformer",
    "fuse_params",
    "init_params",
    "logical_axes",
    "model_of",
    "param_shardings",
    "separate_head",
]
