"""The small modules a block is made of: linear, RMS norm, embedding."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from helios_jax.quant import QuantTensor, embedding_lookup, matmul, weight_shape


class Linear(nn.Module):
    """y = x W + b; W is the one parameter `kernel`, an array [in, out] or any other `Weight`."""

    in_features: int
    out_features: int
    use_bias: bool = False

    def setup(self):
        expected = (self.in_features, self.out_features)
        self.kernel = _param(self, "kernel", nn.initializers.lecun_normal(), expected, weight_shape)
        if self.use_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (self.out_features,))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        outputs = matmul(inputs, self.kernel)
        return outputs + self.bias.astype(outputs.dtype) if self.use_bias else outputs


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32 (arXiv 1910.07467)."""

    epsilon: float

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (inputs.shape[-1],))
        x = inputs.astype(jnp.float32)
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return (normed * scale.astype(jnp.float32)).astype(inputs.dtype)


class Embedding(nn.Module):
    """A table of V vectors of width D: an array [V, D] or a QuantTensor."""

    vocab_size: int
    hidden_size: int

    def setup(self):
        self.embedding = _param(
            self, "embedding", nn.initializers.normal(0.02),
            (self.vocab_size, self.hidden_size), _table_shape,
        )  # fmt: skip

    def __call__(self, tokens: jax.Array, dtype) -> jax.Array:
        return embedding_lookup(self.embedding, tokens, dtype)

    def head(self) -> jax.Array | QuantTensor:
        """The table as the kernel of a tied head, D inputs and V outputs."""
        is_quantised = isinstance(self.embedding, QuantTensor)
        return self.embedding if is_quantised else self.embedding.T


def _table_shape(table) -> tuple[int, ...]:
    return weight_shape(table)[::-1] if isinstance(table, QuantTensor) else table.shape


def _param(module: nn.Module, name: str, initializer, expected: tuple[int, int], shape_of):
    """A parameter of any weight form: Linen itself compares leaves and knows arrays only."""
    if not module.has_variable("params", name):
        return module.param(name, initializer, expected)
    value = module.get_variable("params", name)
    if tuple(shape_of(value)) != expected:
        path = "/".join((*module.path, name))
        raise ValueError(
            f"parameter {path} has shape {tuple(shape_of(value))}: this model needs {expected}; "
            "the checkpoint and the configuration do not belong together"
        )
    return value
