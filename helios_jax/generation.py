"""The pure generate(): prompts to tokens over a dense cache, in one program.

    prefill(...)  -> GenerationState    runs the prompts and draws every row's first token
    decode(...)   -> GenerationState    draws further tokens under `lax.while_loop`
    generate(...) -> GenerateOutput     both, jit-compiled; works in the caller's jit, vmap, mesh

All rows of a batch advance together, so one counter says where each of them is. The first two are
what a host that streams tokens calls in turn.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache import DenseCache
from helios_jax.model import Transformer
from helios_jax.sampling import (
    FINISH_REASONS,
    LENGTH,
    NON_FINITE,
    RUNNING,
    STOP,
    Logprobs,
    SamplingArrays,
    TokenHistory,
    init_history,
    init_logprobs,
    is_stop_token,
    sample_tokens,
    score_tokens,
    update_history,
)

__all__ = [
    "FINISH_REASONS",
    "GenerateOutput",
    "GenerationState",
    "LENGTH",
    "NON_FINITE",
    "RUNNING",
    "STOP",
    "decode",
    "generate",
    "prefill",
    "score_hidden",
]

# Prompt logprobs need the logits of every position; this many positions' exist at a time.
_SCORED_POSITIONS = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GenerationState:
    """What lies between two tokens of a batch. N is the room for output tokens.

    Attributes:
      cache: keys and values of everything but the last tokens.
      history: what penalties and bad words need; None where no row has any.
      tokens_BN: int32, the output so far, -1 beyond it. An end-of-sequence token is included.
      logprobs: of those tokens; None unless asked for.
      positions_B: int32, position in the sequence of each row's last token.
      finish_reason_B: int32, `RUNNING`, `STOP`, `LENGTH` or `NON_FINITE` (the logits held a NaN or
        an infinity: nothing can be drawn from them).
      num_steps: int32 scalar, tokens that every running row has.
    """

    cache: DenseCache
    history: TokenHistory | None
    tokens_BN: Array
    logprobs: Logprobs | None
    positions_B: Array
    finish_reason_B: Array
    num_steps: Array

    def grow(self, num_slots: int, max_new_tokens: int) -> "GenerationState":
        """The same state with room for `num_slots` cached and `max_new_tokens` output tokens."""
        added = max_new_tokens - self.tokens_BN.shape[1]

        def pad(array, fill=0):
            widths = ((0, 0), (0, added), *((0, 0) for _ in array.shape[2:]))
            return jnp.pad(array, widths, constant_values=fill)

        return dataclasses.replace(
            self,
            cache=self.cache.grow(num_slots),
            tokens_BN=pad(self.tokens_BN, -1),
            logprobs=jax.tree.map(pad, self.logprobs),
        )


class GenerateOutput(NamedTuple):
    """What `generate` returns.

    tokens: int32 [B, max_new_tokens], -1 beyond a row's length.
    lengths: int32 [B], output tokens, an end-of-sequence token included.
    logprobs: `Logprobs` of the tokens, or None.
    finish_reason: int32 [B], `STOP`, `LENGTH` or `NON_FINITE`.
    """

    tokens: Array
    lengths: Array
    logprobs: Logprobs | None
    finish_reason: Array


@partial(
    jax.jit,
    static_argnames=("model", "max_new_tokens", "num_logprobs", "cache_dtype"),
)
def generate(
    model: Transformer,
    params: Any,
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling: SamplingArrays,
    max_new_tokens: int,
    *,
    num_logprobs: int | None = 0,
    cache_dtype: Any = None,
) -> GenerateOutput:
    """Generates up to `max_new_tokens` tokens for every row.

    Args:
      model: static under jit.
      params: its parameters, sharded or not.
      prompt_tokens: int32 [B, T], padded on the right with any ids.
      prompt_lengths: int32 [B], in 1..T. T + max_new_tokens must not exceed the model's
        max_model_len; positions beyond it are untrained.
      sampling: per-row parameters, `SamplingParams.to_arrays(B, ...)`. `max_tokens` of a row counts
        where it is smaller than `max_new_tokens`. Stop strings are text and not seen here.
      max_new_tokens: static.
      num_logprobs: static; the most probable tokens to report beside the chosen one's logprob; None
        skips logprobs altogether.
      cache_dtype: static, of keys and values; the activations' dtype if None.
    """
    state, _ = prefill(
        model, params, prompt_tokens, prompt_lengths, sampling,
        num_slots=prompt_tokens.shape[1] + max_new_tokens, max_new_tokens=max_new_tokens,
        num_logprobs=num_logprobs, cache_dtype=cache_dtype,
    )  # fmt: skip
    state = decode(model, params, sampling, state, max_new_tokens)
    lengths = jnp.sum(state.tokens_BN >= 0, axis=1, dtype=jnp.int32)
    return GenerateOutput(state.tokens_BN, lengths, state.logprobs, state.finish_reason_B)


def prefill(
    model: Transformer,
    params: Any,
    tokens_BT: Array,
    lengths_B: Array,
    sampling: SamplingArrays,
    *,
    num_slots: int,
    max_new_tokens: int,
    num_logprobs: int | None = None,
    num_prompt_logprobs: int | None = None,
    cache_dtype: Any = None,
) -> tuple[GenerationState, Logprobs | None]:
    """Runs the prompts and draws the first token of every row.

    Args:
      tokens_BT, lengths_B: prompts, padded on the right; a row of length 0 is padding of the batch
        and finished from the start.
      num_slots: tokens the cache has room for, at least T.
      num_prompt_logprobs: as `num_logprobs`, for the prompt's tokens.

    Returns:
      The state, and the logprobs of prompt tokens 1..T-1 as [B, T-1] (the first has none).
    """
    batch, width = tokens_BT.shape
    vocab_size = model.config.vocab_size
    is_prompt_BT = jnp.arange(width) < lengths_B[:, None]
    positions_BT = jnp.where(is_prompt_BT, jnp.arange(width, dtype=jnp.int32), -1)
    # Room for the prompts alone: attention then reads no empty slots.
    cache = DenseCache.create(model.config, batch, width, cache_dtype or model.dtype)
    hidden_BTD, cache = _hidden(model, params, tokens_BT, positions_BT, cache)
    prompt_logprobs = None
    if num_prompt_logprobs is not None:
        prompt_logprobs = _score(model, params, hidden_BTD, tokens_BT, num_prompt_logprobs)
    last_B1 = jnp.maximum(lengths_B - 1, 0)[:, None]
    last_hidden_BD = jnp.take_along_axis(hidden_BTD, last_B1[..., None], axis=1)[:, 0]
    logits_BV = _logits(model, params, last_hidden_BD)
    state = GenerationState(
        cache=cache.grow(num_slots),
        history=init_history(tokens_BT, lengths_B, sampling, vocab_size=vocab_size),
        tokens_BN=jnp.full((batch, max_new_tokens), -1, jnp.int32),
        logprobs=None
        if num_logprobs is None
        else init_logprobs(batch, max_new_tokens, num_logprobs),
        positions_B=lengths_B - 1,
        finish_reason_B=jnp.where(lengths_B > 0, RUNNING, LENGTH).astype(jnp.int32),
        num_steps=jnp.int32(0),
    )
    return _draw(state, logits_BV, sampling), prompt_logprobs


def decode(
    model: Transformer,
    params: Any,
    sampling: SamplingArrays,
    state: GenerationState,
    max_steps: int | Array,
) -> GenerationState:
    """Draws up to `max_steps` further tokens per row; donate `state` when jitting.

    Ends early when every row has finished, or when the cache or the output buffer is full: `grow`
    them and call again.
    """
    last_step = state.num_steps + max_steps

    def unfinished(state):
        has_room = (state.num_steps < state.tokens_BN.shape[1]) & (
            state.cache.num_slots_used < state.cache.num_slots
        )
        is_running = jnp.any(state.finish_reason_B == RUNNING)
        return is_running & has_room & (state.num_steps < last_step)

    def step(state):
        last_B1 = lax.dynamic_slice_in_dim(state.tokens_BN, state.num_steps - 1, 1, axis=1)
        running_B1 = (state.finish_reason_B == RUNNING)[:, None]
        positions_B1 = jnp.where(running_B1, state.positions_B[:, None], -1)
        hidden_B1D, cache = _hidden(model, params, last_B1, positions_B1, state.cache)
        logits_BV = _logits(model, params, hidden_B1D[:, 0])
        return _draw(dataclasses.replace(state, cache=cache), logits_BV, sampling)

    return lax.while_loop(unfinished, step, state)


def _hidden(model: Transformer, params, tokens_BT, positions_BT, cache) -> tuple[Array, Any]:
    tokens_BT = jnp.maximum(tokens_BT, 0)
    output: Any = model.apply(params, tokens_BT, positions_BT, cache, method="hidden")
    return output


def _logits(model: Transformer, params, hidden: Array) -> Array:
    logits: Any = model.apply(params, hidden, method="logits")
    return logits


def _draw(state: GenerationState, logits_BV: Array, sampling: SamplingArrays) -> GenerationState:
    """Adds one token to every running row and finds out which rows it finishes."""
    running_B = state.finish_reason_B == RUNNING
    num_output_B = jnp.full_like(state.positions_B, state.num_steps)
    drawn_B = sample_tokens(logits_BV, sampling, state.history, num_output_B)
    tokens_B = jnp.where(running_B, drawn_B, -1)
    num_tokens = state.num_steps + 1
    max_tokens_B = jnp.minimum(sampling.max_tokens_B, state.tokens_BN.shape[1])
    reason_B = jnp.where(num_tokens >= max_tokens_B, LENGTH, RUNNING)
    reason_B = jnp.where(is_stop_token(sampling, tokens_B), STOP, reason_B)
    reason_B = jnp.where(tokens_B < 0, NON_FINITE, reason_B)
    logprobs = state.logprobs
    if logprobs is not None:
        logprobs = jax.tree.map(
            lambda buffer, new: lax.dynamic_update_slice_in_dim(
                buffer, new[:, None].astype(buffer.dtype), state.num_steps, axis=1
            ),
            logprobs,
            score_tokens(logits_BV, tokens_B, logprobs.top_BNK.shape[-1]),
        )
    return dataclasses.replace(
        state,
        history=update_history(state.history, tokens_B, running_B),
        tokens_BN=lax.dynamic_update_slice_in_dim(
            state.tokens_BN, tokens_B[:, None], state.num_steps, axis=1
        ),
        logprobs=logprobs,
        positions_B=state.positions_B + 1,
        finish_reason_B=jnp.where(running_B, reason_B, state.finish_reason_B),
        num_steps=num_tokens,
    )


def score_hidden(
    model: Transformer, params: Any, hidden_TD: Array, tokens_T: Array, num_top: int
) -> Logprobs:
    """Logprobs of tokens given the final hidden states before them, [T] and [T, num_top].

    A few positions' logits exist at a time.
    """
    number = len(tokens_T)
    padding = -number % _SCORED_POSITIONS
    hidden = jnp.pad(hidden_TD, ((0, padding), (0, 0)))
    hidden = hidden.reshape(-1, _SCORED_POSITIONS, hidden.shape[-1])
    tokens = jnp.pad(tokens_T, (0, padding)).reshape(-1, _SCORED_POSITIONS)

    def score(chunk):
        return score_tokens(_logits(model, params, chunk[0]), chunk[1], num_top)

    scored = lax.map(score, (hidden, tokens))
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:])[:number], scored)


def _score(model, params, hidden_BTD: Array, tokens_BT: Array, num_top: int) -> Logprobs:
    """Logprobs of tokens 1..T-1 given those before."""
    batch, width, D = hidden_BTD.shape
    hidden = hidden_BTD[:, :-1].reshape(-1, D)
    scored = score_hidden(model, params, hidden, tokens_BT[:, 1:].reshape(-1), num_top)
    return jax.tree.map(lambda array: array.reshape(batch, width - 1, *array.shape[1:]), scored)
