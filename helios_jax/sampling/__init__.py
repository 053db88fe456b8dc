"""Sampling: logits to distribution to token, per row, for plain decoding and for verification."""

from helios_jax.sampling.arrays import (
    LogitBias,
    MinTokens,
    Penalties,
    SamplingArrays,
    SamplingShapes,
    is_stop_token,
    sampling_shapes,
    stack_sampling,
)
from helios_jax.sampling.draw import sample, sample_tokens, uniforms
from helios_jax.sampling.history import TokenCounts, TokenHistory, init_history, update_history
from helios_jax.sampling.logprobs import (
    TokenLogprobs,
    TopLogprobs,
    chosen_logprobs,
    is_finite,
    top_logprobs,
)
from helios_jax.sampling.params import MAX_LOGPROBS, SamplingParams
from helios_jax.sampling.positions import PositionRows, position_rows
from helios_jax.sampling.warp import (
    adjust_logits,
    is_greedy,
    probs,
    temper_logits,
    warp_logits,
)

__all__ = [
    "LogitBias",
    "MAX_LOGPROBS",
    "MinTokens",
    "Penalties",
    "PositionRows",
    "SamplingArrays",
    "SamplingParams",
    "SamplingShapes",
    "TokenCounts",
    "TokenHistory",
    "TokenLogprobs",
    "TopLogprobs",
    "adjust_logits",
    "chosen_logprobs",
    "init_history",
    "is_finite",
    "is_greedy",
    "is_stop_token",
    "position_rows",
    "probs",
    "sample",
    "sample_tokens",
    "sampling_shapes",
    "stack_sampling",
    "temper_logits",
    "top_logprobs",
    "uniforms",
    "update_history",
    "warp_logits",
]
