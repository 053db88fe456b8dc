"""The decoder-only transformer with grouped-query attention (Llama, Mistral, Qwen2, Qwen3)."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from helios_jax.cache import NoCache
from helios_jax.config import ModelConfig, require
from helios_jax.model import rope
from helios_jax.model.layers import Embedding, Linear, RMSNorm
from helios_jax.quant import float32_matmul

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


class Attention(nn.Module):
    """Grouped-query self-attention; `fused` holds q, k and v as one linear `qkv`."""

    config: ModelConfig
    layer: int
    fused: bool

    def setup(self):
        config = self.config
        D, H = config.hidden_size, config.head_dim
        query_width, kv_width = config.num_heads * H, config.num_kv_heads * H
        if self.fused:
            self.qkv = Linear(D, query_width + 2 * kv_width, config.qkv_bias)
        else:
            self.q = Linear(D, query_width, config.qkv_bias)
            self.k = Linear(D, kv_width, config.qkv_bias)
            self.v = Linear(D, kv_width, config.qkv_bias)
        self.o = Linear(query_width, D, config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.rms_norm_eps)
            self.k_norm = RMSNorm(config.rms_norm_eps)

    def __call__(self, hidden_BTD, positions_BT, cos_sin, cache):
        config = self.config
        B, T, _ = hidden_BTD.shape
        query_width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        if self.fused:
            ends = [query_width, query_width + kv_width]
            query, key, value = jnp.split(self.qkv(hidden_BTD), ends, axis=-1)
        else:
            query, key, value = self.q(hidden_BTD), self.k(hidden_BTD), self.v(hidden_BTD)
        query_BTNH = query.reshape(B, T, config.num_heads, config.head_dim)
        key_BTKH = key.reshape(B, T, config.num_kv_heads, config.head_dim)
        value_BTKH = value.reshape(B, T, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            query_BTNH, key_BTKH = self.q_norm(query_BTNH), self.k_norm(key_BTKH)
        query_BTNH = rope.rotate(query_BTNH, *cos_sin)
        key_BTKH = rope.rotate(key_BTKH, *cos_sin)
        output_BTNH, cache = cache.attend(
            self.layer, query_BTNH, key_BTKH, value_BTKH, positions_BT, config.sliding_window
        )
        return self.o(output_BTNH.reshape(B, T, query_width)), cache


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)) (arXiv 2002.05202); `fused` holds gate and up as one.

    x is `num_inputs` times as wide as what comes out.
    """

    config: ModelConfig
    fused: bool
    num_inputs: int = 1

    def setup(self):
        config = self.config
        D, F = config.hidden_size, config.intermediate_size
        if self.fused:
            self.gate_up = Linear(self.num_inputs * D, 2 * F, config.mlp_bias)
        else:
            self.gate = Linear(self.num_inputs * D, F, config.mlp_bias)
            self.up = Linear(self.num_inputs * D, F, config.mlp_bias)
        self.down = Linear(F, D, config.mlp_bias)

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        if self.fused:
            gate, up = jnp.split(self.gate_up(hidden_BTD), 2, axis=-1)
        else:
            gate, up = self.gate(hidden_BTD), self.up(hidden_BTD)
        return self.down(_ACTIVATIONS[self.config.activation](gate) * up)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + ffn(norm(x))."""

    config: ModelConfig
    layer: int
    fused: bool

    def setup(self):
        self.attention_norm = RMSNorm(self.config.rms_norm_eps)
        self.attention = Attention(self.config, self.layer, self.fused)
        self.ffn_norm = RMSNorm(self.config.rms_norm_eps)
        self.ffn = FeedForward(self.config, self.fused)

    def __call__(self, hidden_BTD, positions_BT, cos_sin, cache):
        with jax.named_scope("attention"):
            attended, cache = self.attention(
                self.attention_norm(hidden_BTD), positions_BT, cos_sin, cache
            )
        hidden_BTD = hidden_BTD + attended
        with jax.named_scope("ffn"):
            return hidden_BTD + self.ffn(self.ffn_norm(hidden_BTD)), cache


class Transformer(nn.Module):
    """A causal language model; frozen and hashable, so it can be a static argument of `jit`.

    Attributes:
      config: what the model is.
      dtype: of the activations between layers; norms, softmax, RoPE and logits are float32 always.
      fused: q, k, v are one linear and gate, up another; `fuse_params` makes such parameters.
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    fused: bool = False

    def setup(self):
        config = self.config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config, layer, self.fused) for layer in range(config.num_layers)]
        self.final_norm = RMSNorm(config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        cache: Any = None,
    ) -> Any:
        """Logits float32 [B, T, V] of every token's successor.

        Args:
          tokens_BT: integer token ids; where positions_BT is -1, any integers.
          positions_BT: int32, -1 for padding; None means 0..T-1 for every row.
          cache: None scores the tokens on their own; with a cache (see `helios_jax.cache`) the new
            tokens also see what it holds, and (logits, cache) is returned.

        Raises:
          ValueError: a parameter's shape does not fit the configuration, or arguments lie on a mesh
            whose axes are Explicit.
        """
        hidden_BTD, new_cache = self.hidden(tokens_BT, positions_BT, cache)
        logits_BTV = self.logits(hidden_BTD)
        return logits_BTV if cache is None else (logits_BTV, new_cache)

    def hidden(self, tokens_BT, positions_BT=None, cache=None):
        """The final norm's output [B, T, D] and the cache: for callers that need few logits."""
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        _require_automatic_axes(tokens_BT, self.embed.embedding)
        cache = NoCache() if cache is None else cache
        cache = cache.begin(positions_BT)
        config = self.config
        # Padding rotates by position 0: any finite angle will do, nobody sees its keys.
        cos_sin = rope.cos_sin(config.rope, config.head_dim, jnp.maximum(positions_BT, 0))
        with jax.named_scope("embed"):
            hidden_BTD = self.embed(tokens_BT, self.dtype)
            # Padding may be any id, also one outside the vocabulary, whose embedding is NaN. Zeros
            # keep its keys and values finite, which attention needs of what it masks.
            hidden_BTD = jnp.where(positions_BT[..., None] >= 0, hidden_BTD, 0)
        for block in self.layers:
            hidden_BTD, cache = block(hidden_BTD, positions_BT, cos_sin, cache)
        return self.final_norm(hidden_BTD), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., V] from the output of `hidden` [..., D]."""
        with jax.named_scope("logits"):
            tied = self.config.tie_word_embeddings
            return float32_matmul(hidden, self.embed.head() if tied else self.lm_head.kernel)


def _require_automatic_axes(*arguments: Any) -> None:
    """The compiler, not the caller, lays out what lies between parameters and logits."""
    for leaf in jax.tree.leaves(arguments):
        mesh = jax.typeof(leaf).sharding.mesh
        require(
            not mesh.explicit_axes,
            f"parameters or tokens lie on a mesh whose axes {mesh.explicit_axes} are Explicit, "
            "jax.make_mesh's default: make it with axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(mesh.axis_names)}, or use jax.sharding.auto_axes under jax.set_mesh(mesh)",
        )
