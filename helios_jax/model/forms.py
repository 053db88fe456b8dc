"""In which form do weights serve? Checkpoint parameters to what a platform computes with, at load.

The one `dtype` option chooses:

    float32    everything dense in float32: the reference mode
    bfloat16   linears dense in bfloat16
    int8       CPU: int8 weights for up to 12 rows (2 before jax 0.12), bfloat16 for more
    int4       as stored: QuantTensors go to the kernels unexpanded
    auto       CPU: int8; elsewhere int4 for a quantised checkpoint, bfloat16 for another

Quality against float32 on the embedded model, KL per token: bfloat16 0.00015, int8 0.0047.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from helios_jax.config import ModelConfig, require
from helios_jax.model.draft_head import DraftHead
from helios_jax.model.params import Params, fuse_params, model_of, separate_head
from helios_jax.model.transformer import Transformer
from helios_jax.quant import QuantTensor, expand
from helios_jax.quant.expanded import MAX_INT8_ROWS

DTYPES = ("auto", "float32", "bfloat16", "int8", "int4")


class ServingForm(NamedTuple):
    """A model ready to serve.

    model: its activations' dtype and layout match `params`.
    params: in the form that `dtype` names.
    dtype: what "auto" became.
    cache_dtype: of keys and values.
    description: one line for people: which weights serve what.
    """

    model: Transformer
    params: Params
    dtype: str
    cache_dtype: Any
    description: str


def serving_form(
    config: ModelConfig, params: Params, dtype: str = "auto", platform: str | None = None
) -> ServingForm:
    """Brings checkpoint parameters into the form that serves.

    Args:
      config, params: a checkpoint's; leaves may be numpy arrays, and are released one by one.
      dtype: one of `DTYPES`.
      platform: "cpu" or "gpu"; None for jax's default backend.

    Raises:
      ValueError: a dtype that is unknown, or that this platform or checkpoint cannot serve.
    """
    require_whole_model(config)
    form = draft_form(config, params, dtype, platform)
    assert isinstance(form.model, Transformer)
    cache_dtype = jnp.float32 if form.dtype == "float32" else jnp.bfloat16
    return ServingForm(form.model, form.params, form.dtype, cache_dtype, _DESCRIPTIONS[form.dtype])


def require_whole_model(config: ModelConfig) -> None:
    """ValueError where a draft head is given as a model."""
    require(
        not config.is_draft_head,
        "this checkpoint is a draft head, which generates nothing by itself: give its target as "
        "the model, and the head as the draft (--draft)",
    )


class DraftForm(NamedTuple):
    """A draft ready to serve; the fields are as of `ServingForm`."""

    model: Transformer | DraftHead
    params: Params
    dtype: str


def draft_form(
    config: ModelConfig, params: Params, dtype: str = "auto", platform: str | None = None
) -> DraftForm:
    """`serving_form` of what drafts, a model or a head; arguments and errors are the same."""
    require(dtype in DTYPES, f"dtype={dtype!r}: must be one of {DTYPES}")
    platform = platform or jax.default_backend()
    is_cpu = platform == "cpu"
    is_quantised = any(map(_is_quant, jax.tree.leaves(params, is_leaf=_is_quant)))
    if dtype == "auto":
        dtype = "int8" if is_cpu else "int4" if is_quantised else "bfloat16"
    require(
        dtype != "int8" or is_cpu,
        f"dtype='int8' on platform {platform!r}: a CPU form; use 'int4' or 'bfloat16'",
    )
    require(
        dtype != "int4" or is_quantised,
        "dtype='int4': this checkpoint holds no quantised weights; use 'bfloat16', or quantise it",
    )
    params = fuse_params(params)
    if dtype != "float32":
        config, params = separate_head(config, params)
    convert = {
        "float32": lambda leaf: _dense(leaf, jnp.float32),
        "bfloat16": lambda leaf: _dense(leaf, jnp.bfloat16),
        "int8": lambda leaf: _expanded(leaf),
        "int4": lambda leaf: leaf if _is_quant(leaf) else _dense(leaf, jnp.bfloat16),
    }[dtype]

    def place(path, leaf):
        name = path[-1].key
        if name == "kernel":
            return convert(leaf)
        if name == "embedding":
            return _table(leaf) if dtype == "float32" else jax.tree.map(jnp.asarray, leaf)
        return jnp.asarray(leaf, jnp.float32)

    params = jax.tree_util.tree_map_with_path(place, params, is_leaf=_is_quant)
    # On a CPU elementwise work costs the same in float32; on a GPU it would double the traffic.
    activations = jnp.float32 if is_cpu or dtype == "float32" else jnp.bfloat16
    return DraftForm(model_of(config, activations, fused=True), params, dtype)


_DESCRIPTIONS = {
    "float32": "float32 weights and activations (reference mode)",
    "bfloat16": "bfloat16 weights",
    "int8": f"int8 weights for up to {MAX_INT8_ROWS} rows, bfloat16 for more",
    "int4": "weights as stored (INT4), dequantised in the matmul",
}


def _is_quant(leaf) -> bool:
    return isinstance(leaf, QuantTensor)


@jax.jit
def _expanded(leaf):
    return expand(leaf.dequantize().T if _is_quant(leaf) else leaf)


def _dense(leaf, dtype):
    return _transposed(leaf, dtype) if _is_quant(leaf) else jnp.asarray(leaf, dtype)


_transposed = jax.jit(lambda leaf, dtype: leaf.dequantize(dtype).T, static_argnums=1)


def _table(leaf):
    return leaf.dequantize() if _is_quant(leaf) else jnp.asarray(leaf, jnp.float32)
