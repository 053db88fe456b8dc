"""What follows a token, by the target's own last hidden state? A head that drafts without context.

The target's final hidden state h says what its next token will be like, and much about those after
it: the context is in it. A draft head takes it as its first state and each drafted token as an
input, as a recurrent network does (arXiv 2403.09919, 2402.05109):

    x = [norm(state), norm(embedding of the token)];  state <- state + MLP(x), layer after layer
    logits = norm(state) E

So a draft token costs no attention and no cache, and nothing is taken in beforehand.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from helios_jax.config import ModelConfig
from helios_jax.model.layers import Embedding, Linear, RMSNorm
from helios_jax.model.transformer import FeedForward
from helios_jax.quant import float32_matmul


class _HeadBlock(nn.Module):
    """state + ffn([norm(state), token])."""

    config: ModelConfig
    fused: bool

    def setup(self):
        self.ffn_norm = RMSNorm(self.config.rms_norm_eps)
        self.ffn = FeedForward(self.config, self.fused, num_inputs=2)

    def __call__(self, state: jax.Array, token: jax.Array) -> jax.Array:
        return state + self.ffn(jnp.concatenate([self.ffn_norm(state), token], axis=-1))


class DraftHead(nn.Module):
    """A frozen, hashable module, see the file.

    Attributes:
      config: with `is_draft_head`; its hidden_size is the target's, its vocab_size (U) may be less.
      dtype: of the state between layers; norms and logits are float32 always.
      fused: gate and up are one linear; `fuse_params` makes such parameters.
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    fused: bool = False

    def setup(self):
        config = self.config
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.token_norm = RMSNorm(config.rms_norm_eps)
        self.layers = [_HeadBlock(config, self.fused) for _ in range(config.num_layers)]
        self.final_norm = RMSNorm(config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def __call__(self, state: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The state [..., D] after the tokens, and float32 logits [..., U] of their successors.

        Args:
          state: [..., D], the target's output of `hidden` that the tokens were drawn from, or what
            this returned for the tokens before.
          tokens: int32 [...], in the head's own ids.
        """
        state = self._enter(state, tokens)
        return state, self.logits(self.final_norm(state))

    def hidden(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        """The final norm's output [..., D], which `logits` takes."""
        return self.final_norm(self._enter(state, tokens))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 logits [..., U]."""
        with jax.named_scope("draft_head_logits"):
            tied = self.config.tie_word_embeddings
            return float32_matmul(hidden, self.embed.head() if tied else self.lm_head.kernel)

    def _enter(self, state: jax.Array, tokens: jax.Array) -> jax.Array:
        with jax.named_scope("draft_head"):
            state = state.astype(self.dtype)
            token = self.token_norm(self.embed(tokens, self.dtype))
            for block in self.layers:
                state = block(state, token)
            return state

    def unroll(self, hidden_ND: jax.Array, tokens_NJ: jax.Array) -> jax.Array:
        """float32 logits [N, J, U] of the successors of J known tokens after each hidden state."""
        state, found = hidden_ND, []
        for place in range(tokens_NJ.shape[1]):
            state, logits_NU = self(state, tokens_NJ[:, place])
            found.append(logits_NU)
        return jnp.stack(found, axis=1)
