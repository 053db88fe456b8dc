"""How does a model run one block at a time, with what enters its linears in sight?

Parameters are those of a checkpoint, unfused; sequences are whole and start at position 0. Pure
functions of one block's parameters, so that a model larger than memory can pass through.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from helios_jax.cache import NoCache
from helios_jax.config import ModelConfig
from helios_jax.model import rope
from helios_jax.model.layers import Linear
from helios_jax.model.params import Params
from helios_jax.model.transformer import Block


def run_block(config: ModelConfig, block_params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """hidden_BTD after the block whose parameters (the tree below `layers_{i}`) are given."""
    positions_BT = jnp.broadcast_to(jnp.arange(hidden_BTD.shape[1]), hidden_BTD.shape[:2])
    cos_sin = rope.cos_sin(config.rope, config.head_dim, positions_BT)
    block = Block(config, layer=0, fused=False)
    variables = {"params": block_params}
    return block.apply(variables, hidden_BTD, positions_BT, cos_sin, NoCache())[0]


def linear_inputs(
    config: ModelConfig, block_params: Params, hidden_BTD: jax.Array, name: str
) -> jax.Array:
    """What enters the block's linear `name` ("attention/o", "ffn/down", …), [B, T, K].

    Under jit, what the linear and those after it compute is removed as unused.
    """
    path, found = tuple(name.split("/")), []

    def intercept(call, args, kwargs, context):
        is_linear = isinstance(context.module, Linear) and context.method_name == "__call__"
        if is_linear and context.module.path == path:
            found.append(args[0])
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        run_block(config, block_params, hidden_BTD)
    assert len(found) == 1, f"{name} is no linear of a block"
    return found[0]
