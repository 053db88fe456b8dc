"""How is one batch of requests run to its end? What the engine is measured beside.

Device programs are compiled per bucket: rows and cached tokens in powers of two, prompt lengths in
powers of two up to 512 and multiples of 512 beyond. A cache starts small and doubles when full.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.engine.row_progress import (
    Row,
    RowProgress,
    limit_params,
    power_of_two,
)
from helios_jax.generation import (
    FINISH_REASONS,
    RUNNING,
    STOP,
    GenerationState,
    decode,
    prefill,
)
from helios_jax.model.compiler import COMPILER_OPTIONS
from helios_jax.model.forms import ServingForm
from helios_jax.sampling import SamplingShapes, sampling_shapes, stack_sampling
from helios_jax.tokenizer import IncrementalDecoder, StopStringMatcher, Tokenizer

MIN_PROMPT_BUCKET = 16
MIN_SLOTS_BUCKET = 256
# Room for a few stop ids in every program, so that one more of them compiles nothing.
_COMMON_SHAPES = SamplingShapes(num_stop_ids=4)
# Tokens between two looks at the output by the host.
STEPS_PER_CALL = 16


def run_batch(
    form: ServingForm,
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    *,
    max_model_len: int,
    rng: np.random.Generator,
) -> Iterator[list[RowProgress]]:
    """Runs rows together; yields their progress after the prefill and after every few tokens.

    Args:
      form: model and parameters.
      rows: prompts of at most max_model_len - 1 tokens.
      max_model_len: where output ends at the latest, prompt included.
      rng: source of the seeds of unseeded rows.
    """
    config = form.model.config
    rows = [row._replace(params=limit_params(row, max_model_len)) for row in rows]
    progress = [
        RowProgress(
            row,
            IncrementalDecoder(tokenizer, row.params.skip_special_tokens, at_start=False),
            StopStringMatcher(row.params.stop, row.params.include_stop_str_in_output),
            config.eos_token_ids,
        )
        for row in rows
    ]
    tokens_BT, lengths_B = _pad([row.prompt_token_ids for row in rows])
    # Rows that fill up the bucket are finished from the start, so any parameters will do.
    params = [row.params for row in rows]
    params += [params[-1]] * (len(lengths_B) - len(rows))
    sampling = stack_sampling(
        params,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        shapes=_COMMON_SHAPES | sampling_shapes(params, eos_token_ids=config.eos_token_ids),
        rng=rng,
    )
    width = tokens_BT.shape[1]
    longest = max(row.params.max_tokens or 0 for row in rows)
    num_slots = _slots_bucket(width + min(longest, MIN_SLOTS_BUCKET // 2))
    run = programs(jax.default_backend())
    state, _ = run.prefill(
        form.model,
        form.params,
        tokens_BT,
        lengths_B,
        sampling,
        num_slots=num_slots,
        max_new_tokens=num_slots,
        cache_dtype=form.cache_dtype,
    )
    _read(state, progress, 0)
    yield progress
    while any(row.finish_reason is None for row in progress):
        if int(state.cache.num_slots_used) == num_slots:
            num_slots *= 2
            state = run.grow(state, num_slots, num_slots)
        num_read = int(state.num_steps)
        stopped_B = np.zeros(len(lengths_B), bool)
        stopped_B[: len(rows)] = [row.finish_reason is not None for row in progress]
        state = run.decode(form.model, form.params, sampling, state, stopped_B, STEPS_PER_CALL)
        _read(state, progress, num_read)
        yield progress


class Programs(NamedTuple):
    """The jit-compiled functions of `run_batch`."""

    prefill: Any
    decode: Any
    grow: Any


@cache
def programs(platform: str) -> Programs:
    """`Programs` for a platform, compiled as the engine's are."""
    options = COMPILER_OPTIONS.get(platform)
    static = ("num_slots", "max_new_tokens", "cache_dtype")
    return Programs(
        jax.jit(prefill, static_argnames=("model", *static), compiler_options=options),
        jax.jit(
            _decode, static_argnames="model", donate_argnames="state", compiler_options=options
        ),
        jax.jit(GenerationState.grow, static_argnums=(1, 2), compiler_options=options),
    )


def _decode(model, params, sampling, state, stopped_B, max_steps):
    """`decode` after the rows that the host found a stop string in are taken out."""
    stopped_B = stopped_B & (state.finish_reason_B == RUNNING)
    reason_B = jnp.where(stopped_B, STOP, state.finish_reason_B)
    state = dataclasses.replace(state, finish_reason_B=reason_B)
    return decode(model, params, sampling, state, max_steps)


def _pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    longest = max(map(len, prompts))
    if longest <= 512:
        width = max(MIN_PROMPT_BUCKET, power_of_two(longest))
    else:
        width = -(-longest // 512) * 512
    tokens_BT = np.zeros((power_of_two(len(prompts)), width), np.int32)
    lengths_B = np.zeros(len(tokens_BT), np.int32)
    for i, prompt in enumerate(prompts):
        tokens_BT[i, : len(prompt)] = prompt
        lengths_B[i] = len(prompt)
    return tokens_BT, lengths_B


def _slots_bucket(num_tokens: int) -> int:
    return max(MIN_SLOTS_BUCKET, power_of_two(num_tokens))


def _read(state: GenerationState, progress: list[RowProgress], num_read: int) -> None:
    """Hands the tokens after the first `num_read` to the rows, and the reasons for ending."""
    tokens_BN, reason_B = jax.device_get((state.tokens_BN, state.finish_reason_B))
    now = time.perf_counter()
    num_steps = int(state.num_steps)
    for i, row in enumerate(progress):
        row.begin_step()
        if row.finish_reason is not None:
            continue
        for j in range(num_read, num_steps):
            token = int(tokens_BN[i, j])
            if token < 0 or row.finish_reason is not None:
                break
            row.add(token, None)
        if row.new_token_ids:
            row.first_token_seconds = row.first_token_seconds or now
            row.last_token_seconds = now
        if reason_B[i] != RUNNING:
            row.finish(FINISH_REASONS[int(reason_B[i])])
