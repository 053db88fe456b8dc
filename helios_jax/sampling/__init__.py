"""Sampling: logits to distribution to token, per row, for plain decoding and for verification.

Cost of a decode step's sampling (`sample_tokens` and `update_history` inside one jitted while_loop,
vocabulary 49,152, two shared Zen 4 cores, warm, best of 8 to 16 runs of 60 steps), in ms at batch 1
and batch 8:

                                              jax 0.12.0.1       jax 0.10.2
    reading the logits once (max)             0.012   0.054     0.009   0.082
    greedy                                    0.018   0.082     0.015   0.084
    temperature                               0.048   0.239     0.042   0.209
    top_k=50                                  0.061   0.575     0.056   0.543
    top_p=0.9, 64 tokens do not hold it       0.207   1.322     0.206   1.858
    top_k=200, top_p=0.9, flat                0.270   1.715     0.298   2.284
    greedy, all three penalties               0.019   0.117     0.020   0.117
    every filter at once, top_k=50            0.087   0.563     0.086   0.566
    every filter at once, top_k=200, flat     0.288   1.789     0.312   2.474
"""

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
from helios_jax.sampling.finish import (
    FINISH_REASONS,
    LENGTH,
    NON_FINITE,
    RUNNING,
    STOP,
    EndedRows,
    end_rows,
)
from helios_jax.sampling.history import TokenCounts, TokenHistory, init_history, update_history
from helios_jax.sampling.logprobs import (
    Logprobs,
    TokenLogprobs,
    TopLogprobs,
    chosen_logprobs,
    init_logprobs,
    is_finite,
    score_tokens,
    top_logprobs,
)
from helios_jax.sampling.params import MAX_LOGPROBS, MAX_NUMBER, SamplingParams
from helios_jax.sampling.positions import PositionRows, position_rows
from helios_jax.sampling.warp import (
    adjust_logits,
    is_greedy,
    probs,
    temper_logits,
    warp_logits,
)

__all__ = [
    "EndedRows",
    "FINISH_REASONS",
    "LENGTH",
    "LogitBias",
    "Logprobs",
    "MAX_LOGPROBS",
    "MAX_NUMBER",
    "MinTokens",
    "NON_FINITE",
    "Penalties",
    "PositionRows",
    "RUNNING",
    "STOP",
    "SamplingArrays",
    "SamplingParams",
    "SamplingShapes",
    "TokenCounts",
    "TokenHistory",
    "TokenLogprobs",
    "TopLogprobs",
    "adjust_logits",
    "chosen_logprobs",
    "end_rows",
    "init_history",
    "init_logprobs",
    "is_finite",
    "is_greedy",
    "is_stop_token",
    "position_rows",
    "probs",
    "sample",
    "sample_tokens",
    "sampling_shapes",
    "score_tokens",
    "stack_sampling",
    "temper_logits",
    "top_logprobs",
    "uniforms",
    "update_history",
    "warp_logits",
]
