"""Parameters trees: initial values, and the rearrangements that serve faster.

A tree is `{"params": {"embed": …, "layers_0": …, "final_norm": …}}`, what `model.apply` takes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from helios_jax.config import ModelConfig
from helios_jax.model.draft_head import DraftHead
from helios_jax.model.transformer import Transformer
from helios_jax.quant import QuantTensor, join_outputs

Params = dict[str, Any]
Model = Transformer | DraftHead

_FUSED = (
    ("attention", "qkv", ("q", "k", "v")),
    ("ffn", "gate_up", ("gate", "up")),
)


def model_of(config: ModelConfig, dtype: Any = jnp.float32, fused: bool = False) -> Model:
    """The module that a configuration describes."""
    kind = DraftHead if config.is_draft_head else Transformer
    return kind(config, dtype, fused)


def init_params(config: ModelConfig, key: jax.Array, dtype=jnp.float32) -> Params:
    """Random parameters to start training from; under `jit` with out_shardings, made sharded."""
    token = jnp.zeros((1, 1), jnp.int32)
    if config.is_draft_head:
        state = jnp.zeros((1, 1, config.hidden_size), jnp.float32)
        params = DraftHead(config).init(key, state, token)
    else:
        params = Transformer(config).init(key, token)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def fuse_params(params: Params) -> Params:
    """Joins q, k, v into `qkv` and gate, up into `gate_up`, for `Transformer(fused=True)`.

    Takes dense arrays and QuantTensors. Codes of equal form are joined, not changed; parts that
    differ in form (bits, groups, act-order, one of them dense) become one dense float32 array.
    """
    tree = dict(params["params"])
    for name in [name for name in tree if name.startswith("layers_")]:
        layer = dict(tree[name])
        for module, fused, parts in _FUSED:
            if module not in layer:  # a draft head has no attention
                continue
            linears = dict(layer[module])
            linears[fused] = _join([linears.pop(part) for part in parts])
            layer[module] = linears
        tree[name] = layer
    return {"params": tree}


def separate_head(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Gives a tied model a head of its own with the embedding's values.

    The head reads all of its weights for every token and the embedding a row, so they are best kept
    in different forms.
    """
    if not config.tie_word_embeddings:
        return config, params
    table = params["params"]["embed"]["embedding"]
    kernel = table if isinstance(table, QuantTensor) else table.T
    fields = config.to_dict() | {"tie_word_embeddings": False}
    return ModelConfig.from_dict(fields), {
        "params": params["params"] | {"lm_head": {"kernel": kernel}}
    }


def _join(linears: list[Params]) -> Params:
    return {name: _join_leaves([linear[name] for linear in linears]) for name in linears[0]}


def _join_leaves(leaves: list):
    """Output channels side by side: the last axis of an array or bias."""
    if all(isinstance(leaf, QuantTensor) for leaf in leaves):
        joined = join_outputs(leaves)
        if joined is not None:
            return joined
    if any(isinstance(leaf, QuantTensor) for leaf in leaves):
        leaves = [
            leaf.dequantize().T if isinstance(leaf, QuantTensor) else jnp.asarray(leaf, jnp.float32)
            for leaf in leaves
        ]
    return jnp.concatenate(leaves, axis=-1)
