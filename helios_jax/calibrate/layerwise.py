"""How is one layer quantised, given the activations that reach it?

Linears that share their inputs form a stage. Stages are quantised in the order of computation, each
with the inputs that the layer, quantised so far, gives it: errors already made are seen, and no
layer calibrates on activations that it will never meet.

AWQ's scales are folded into what makes a stage's inputs, which costs nothing at inference:

    q, k, v     the attention norm's scale
    o           v's output channels (with grouped queries, one for several inputs of o)
    gate, up    the ffn norm's scale
    down        up's output channels, which the gate only multiplies
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.calibrate.recipe import Recipe
from helios_jax.config import ModelConfig
from helios_jax.model.blockwise import linear_inputs, run_block
from helios_jax.quant import (
    InputStatistics,
    QuantTensor,
    Scheme,
    gptq,
    output_error,
    rtn,
    scale_outputs,
    search_clip,
    search_scales,
)

Tree = dict[str, Any]


class Stage(NamedTuple):
    """linears: names within a layer of linears with the same inputs. source: what makes them."""

    linears: tuple[str, ...]
    source: str


STAGES = (
    Stage(("attention/q", "attention/k", "attention/v"), "attention_norm"),
    Stage(("attention/o",), "attention/v"),
    Stage(("ffn/gate", "ffn/up"), "ffn_norm"),
    Stage(("ffn/down",), "ffn/up"),
)


_LARGEST_WEIGHT = float(jnp.finfo(jnp.float16).max)


class LayerResult(NamedTuple):
    """Attributes:
    params: the layer's tree, with QuantTensors where linears were quantised; other leaves as they
      came, except that AWQ's scales are folded in.
    errors: per quantised linear, the mean squared error of its outputs relative to the outputs;
      {} for "rtn", which sees no activations.
    alphas: per stage that AWQ scaled, by its first linear, the exponent that was chosen.
    """

    params: Tree
    errors: dict[str, float]
    alphas: dict[str, float]


def quantize_layer(
    name: str,
    config: ModelConfig,
    params: Tree,
    recipe: Recipe,
    batches: Sequence[np.ndarray],
    note: Callable[[], None] = lambda: None,
) -> LayerResult:
    """Quantises the linears of one layer.

    Args:
      name: "layers_3"; the recipe's rules see it before the linears' names.
      params: the tree below it; kernels dense or quantised already (they are requantised).
      batches: hidden states [B, T, D] that enter the layer; unused for "rtn".
      note: called after each stage.

    Raises:
      ValueError: naming the linear whose inputs or weights are not finite, or too large.
    """
    layer = Layer(config, params)
    errors, alphas = {}, {}
    for stage in STAGES:
        schemes = {
            linear: scheme
            for linear in stage.linears
            if (scheme := recipe.scheme_of(f"{name}/{linear}")) is not None
        }
        if schemes:
            for linear in schemes:
                _check_weights(f"{name}/{linear}", layer.kernel(linear))
            if recipe.method == "rtn":
                for linear, scheme in schemes.items():
                    layer.replace(linear, rtn(layer.kernel(linear).T, scheme))
            else:
                statistics = layer.collect(stage.linears[0], batches)
                _check_finite(f"{name}/{stage.linears[0]}: its inputs", statistics.moment_KK)
                if recipe.method == "awq" and len(schemes) == len(stage.linears):
                    statistics, alphas[stage.linears[0]] = fold_scales(
                        layer, stage, schemes, statistics
                    )
                for linear, scheme in schemes.items():
                    errors[linear] = _quantize_linear(layer, linear, scheme, recipe, statistics)
        note()
    return LayerResult(layer.leaves, errors, alphas)


def advance(config: ModelConfig, params: Tree, batches: Sequence[np.ndarray]) -> None:
    """Replaces the hidden states of every batch, in place, by those behind the layer."""
    dense = dense_layer(params)
    for batch in batches:
        batch[...] = _run(config, dense, batch)


def dense_layer(params: Tree) -> Tree:
    """float32 arrays throughout, kernels [in, out]."""
    return jax.tree.map(_dense, params, is_leaf=_is_quant)


class Layer:
    """A layer on its way from one form to the other.

    leaves: what will be stored. dense: the same values as float32, for computing.
    """

    def __init__(self, config: ModelConfig, params: Tree):
        self.config = config
        self.leaves = _copied(params)
        self.dense = dense_layer(params)

    def kernel(self, linear: str) -> jax.Array:
        return _at(self.dense, linear)["kernel"]

    def replace(self, linear: str, weight: QuantTensor) -> None:
        _at(self.leaves, linear)["kernel"] = weight
        _at(self.dense, linear)["kernel"] = _dense(weight)

    def collect(self, linear: str, batches: Sequence[np.ndarray]) -> InputStatistics:
        statistics = InputStatistics.empty(self.kernel(linear).shape[0])
        for batch in batches:
            statistics = _accumulate(self.config, linear, self.dense, statistics, batch)
        return statistics

    def multiply_source(self, source: str, factor: jax.Array) -> None:
        """Multiplies what `source`, a norm or a linear, puts out, channel by channel."""
        leaves, dense = _at(self.leaves, source), _at(self.dense, source)
        for name, leaf in leaves.items():
            dense[name] = dense[name] * factor
            # The last axis of a dense kernel, a bias or a norm's scale is the output channel.
            is_quant = _is_quant(leaf)
            leaves[name] = scale_outputs(leaf, factor) if is_quant else dense[name]
            if is_quant:
                dense[name] = _dense(leaves[name])


def _quantize_linear(
    layer: Layer, linear: str, scheme: Scheme, recipe: Recipe, statistics: InputStatistics
) -> float:
    weight_NK = layer.kernel(linear).T
    if recipe.method == "gptq":
        quantised = gptq(weight_NK, scheme, statistics.moment_KK, recipe.gptq)
    else:
        quantised = rtn(weight_NK, scheme, search_clip(weight_NK, scheme, statistics.moment_KK))
    layer.replace(linear, quantised)
    return float(_relative_error(weight_NK, layer.kernel(linear).T, statistics.moment_KK))


def fold_scales(
    layer: Layer, stage: Stage, schemes: Mapping[str, Scheme], statistics: InputStatistics
) -> tuple[InputStatistics, float]:
    """Folds AWQ's scales in; the statistics of the scaled inputs and the exponent."""
    config = layer.config
    heads = None
    if stage.source == "attention/v":
        heads = (config.num_kv_heads, config.num_heads // config.num_kv_heads)
    weights = tuple(layer.kernel(linear).T for linear in stage.linears)
    search = search_scales(weights, tuple(schemes.values()), statistics, heads)
    inverse_K = 1 / search.scale_K
    for linear in stage.linears:
        kernel = _at(layer.dense, linear)
        kernel["kernel"] = kernel["kernel"] * search.scale_K[:, None]
    outputs = inverse_K
    if heads is not None:
        outputs = inverse_K.reshape(*heads, config.head_dim)[:, 0].reshape(-1)
    layer.multiply_source(stage.source, outputs)
    scaled = InputStatistics(
        statistics.products_KK * inverse_K[:, None] * inverse_K,
        statistics.magnitudes_K * inverse_K,
        statistics.num_tokens,
    )
    return scaled, float(search.alpha)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _accumulate(config, linear, params, statistics, hidden_BTD):
    return statistics.add(linear_inputs(config, params, hidden_BTD, linear))


_run = jax.jit(run_block, static_argnums=0)


@jax.jit
def _relative_error(weight_NK, quantised_NK, moment_KK):
    energy = output_error(weight_NK, moment_KK)
    return output_error(quantised_NK - weight_NK, moment_KK) / jnp.where(energy > 0, energy, 1.0)


def _is_quant(leaf) -> bool:
    return isinstance(leaf, QuantTensor)


_dequantized = jax.jit(lambda weight: weight.dequantize().T)


def _dense(leaf) -> jax.Array:
    return _dequantized(leaf) if _is_quant(leaf) else jnp.asarray(leaf, jnp.float32)


def _copied(tree: Tree) -> Tree:
    """The dicts anew, the leaves as they are, in the same order (jax.tree.map would sort)."""
    return {name: _copied(node) if isinstance(node, dict) else node for name, node in tree.items()}


def _at(tree: Tree, name: str) -> Tree:
    for part in name.split("/"):
        tree = tree[part]
    return tree


def _check_weights(linear: str, kernel: jax.Array) -> None:
    _check_finite(f"{linear}: its weights", kernel)
    largest = float(jnp.max(jnp.abs(kernel)))
    if largest > _LARGEST_WEIGHT:
        raise ValueError(
            f"{linear}: its largest weight is {largest:.3g}: scales are float16 and would saturate "
            f"beyond {_LARGEST_WEIGHT:.0f}; the checkpoint is damaged, or skip this linear"
        )


def _check_finite(what: str, array: jax.Array) -> None:
    if not bool(jnp.all(jnp.isfinite(array))):
        raise ValueError(f"{what} are not finite; the checkpoint is damaged, or overflows float32")
