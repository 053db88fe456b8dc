"""What happens in one step of the engine? Pure functions from state to state.

    admit | plan_step: schedule, copy and migrate blocks | run_chunk | run_rounds | end_step

`engine_step` is all of them in one program. A host that serves compiles them one by one and starts
them in a row without looking at a result: the scheduler is then compiled once and the model once
for each `Variant` of a chunk or of rounds, not for every combination of both.

A variant is a set of sizes that the host chooses from what it knows. It bounds the work and never
changes a result: a row that does not fit it waits for the next step.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.cache.hashing import initial_hash, prompt_hashes
from helios_jax.cache.masked import masked_set
from helios_jax.cache.paged import copy_blocks, migrate_blocks
from helios_jax.engine.chunk import run_chunk
from helios_jax.engine.config import StepConfig
from helios_jax.engine.drafts import begin_rows, forget_moved
from helios_jax.engine.rounds import run_rounds
from helios_jax.engine.state import Arrivals, EngineState, StepOutputs, StepSummary
from helios_jax.engine.work import Variant
from helios_jax.generation import NON_FINITE, RUNNING
from helios_jax.scheduler import (
    ACCEPTED,
    Plan,
    SchedulerState,
    Urgency,
    abort,
    commit,
    hash_outputs,
    is_wide_prompt,
    schedule,
    submit,
)
from helios_jax.scheduler.urgency import deadline
from helios_jax.speculative import SpeculationParams


def engine_step(
    params: Any,
    state: EngineState,
    arrivals: Arrivals | None,
    now: Array,
    max_rounds: Array,
    extra: SpeculationParams = SpeculationParams(),  # noqa: B008 (nothing mutable)
    *,
    model: Any,
    config: StepConfig,
    chunk: Variant | None,
    rounds: Variant | None,
    urgency: Urgency = deadline,
) -> tuple[EngineState, StepOutputs]:
    """One step: admission, scheduling, a prefill chunk, decode rounds. Donate `state`.

    Compile it with `model.compiler.COMPILER_OPTIONS` of the platform: XLA's own choices slow it.

    Args:
      params: the model's.
      state: of `init_state`, or of the step before.
      arrivals: None where nothing did.
      now: float32 seconds, never less than before.
      max_rounds: int32, at most `config.max_rounds`.
      extra: what goes with `config.speculation`.
      model: a `Transformer`; static like the rest below.
      chunk, rounds: None leaves them out of this step.
      urgency: the policy, see `scheduler.urgency`.
    """
    answer_N = jnp.zeros(0, jnp.int32)
    if arrivals is not None:
        state, answer_N = admit(state, arrivals, config=config)
    chunk_tokens, num_rows = plan_sizes(chunk, rounds)
    state, plan = plan_step(
        state, now, jnp.int32(chunk_tokens), jnp.int32(num_rows), config=config, urgency=urgency
    )
    common: dict[str, Any] = dict(model=model, config=config)
    chunk_rows = prompt_logprobs = round_rows = None
    if chunk is not None:
        state, chunk_rows, prompt_logprobs = run_chunk(
            params, state, plan, now, variant=chunk, **common
        )
    if rounds is not None:
        state, round_rows = run_rounds(
            params, state, plan, now, max_rounds, extra, variant=rounds, **common
        )
    state, summary = end_step(state, config=config)
    return state, StepOutputs(answer_N, chunk_rows, round_rows, prompt_logprobs, summary)


def plan_sizes(chunk: Variant | None, rounds: Variant | None) -> tuple[int, int]:
    """What a step of these variants has room for: chunk tokens, and rows."""
    variants = [variant for variant in (chunk, rounds) if variant is not None]
    chunk_tokens = 1 if chunk is None else chunk.chunk_tokens
    return chunk_tokens, max((variant.num_rows for variant in variants), default=1)


def admit(
    state: EngineState, arrivals: Arrivals, *, config: StepConfig
) -> tuple[EngineState, Array]:
    """Calls off what is to be called off, then puts new requests into the table.

    Returns:
      The state, and `scheduler.submit`'s answer to each request, int32 [N].
    """
    scheduler = abort(state.scheduler, arrivals.abort_ids_A)
    requests = arrivals.requests
    if config.enable_prefix_caching:
        hash_NM2 = jax.vmap(partial(_prompt_hashes, scheduler))(
            arrivals.tokens_NS, requests.num_prompt_N
        )
        shares_N11 = arrivals.shares_prefix_N[:, None, None]
        requests = dataclasses.replace(
            requests, hash_NM2=jnp.where(shares_N11, hash_NM2, jnp.uint32(0))
        )
    scheduler, row_N, answer_N = submit(scheduler, requests)
    taken_N = answer_N == ACCEPTED

    def put(table: Array, values: Array) -> Array:
        return masked_set(table, row_N, values, taken_N)

    width = min(arrivals.tokens_NS.shape[1], state.tokens_RS.shape[1])
    column = jnp.arange(width)
    speculation = state.speculation
    if speculation is not None:
        assert config.speculation is not None, "the state was made for it"
        speculation = begin_rows(
            speculation, config.speculation, row_N, arrivals.speculates_N, taken_N
        )
    rows = jnp.where(taken_N, row_N, state.tokens_RS.shape[0])[:, None]
    state = dataclasses.replace(
        state,
        scheduler=scheduler,
        tokens_RS=state.tokens_RS.at[rows, column].set(arrivals.tokens_NS[:, :width], mode="drop"),
        sampling=jax.tree.map(put, state.sampling, arrivals.sampling),
        finish_reason_R=masked_set(state.finish_reason_R, row_N, RUNNING, taken_N),
        speculation=speculation,
    )
    return state, answer_N


def _prompt_hashes(scheduler: SchedulerState, tokens_S: Array, num_prompt: Array) -> Array:
    """Hashes of a prompt's full blocks at the precision it starts with, uint32 [M, 2]."""
    M = scheduler.block_table_RM.shape[1]

    def at(precision: int) -> Array:
        block_tokens = scheduler.block_tokens[precision]
        hashes = prompt_hashes(tokens_S, num_prompt, block_tokens, initial_hash(precision))[:M]
        return jnp.pad(hashes, ((0, M - len(hashes)), (0, 0)))

    if scheduler.block_tokens[0] == scheduler.block_tokens[1]:
        return at(0)
    return jnp.where(is_wide_prompt(scheduler, num_prompt), at(1), at(0))


def plan_step(
    state: EngineState,
    now: Array,
    max_chunk_tokens: Array,
    max_rows: Array,
    *,
    config: StepConfig,
    urgency: Urgency = deadline,
) -> tuple[EngineState, Plan]:
    """Schedules, and does what the plan wants of blocks before anything is computed.

    Args:
      max_chunk_tokens, max_rows: int32, what the variants of this step have room for.
    """
    limits = state.scheduler.limits
    within = dataclasses.replace(
        limits,
        max_num_batched_tokens=jnp.minimum(limits.max_num_batched_tokens, max_chunk_tokens),
        max_num_seqs=jnp.minimum(limits.max_num_seqs, max_rows),
    )
    scheduler = dataclasses.replace(state.scheduler, limits=within)
    scheduler, plan = schedule(scheduler, now, urgency)
    pools = copy_blocks(state.pools, plan.copies, config.num_layers)
    if config.has_two_precisions:
        pools = migrate_blocks(
            pools, plan.migration_sources_M, plan.migration_targets_M, config.num_layers,
            config.narrow_dtype, config.wide_dtype, state.scales,
        )  # fmt: skip
    scheduler = dataclasses.replace(scheduler, limits=limits)
    speculation = state.speculation
    if speculation is not None:
        speculation = forget_moved(speculation, state.scheduler, scheduler)
    state = dataclasses.replace(state, scheduler=scheduler, pools=pools, speculation=speculation)
    return state, plan


def end_step(state: EngineState, *, config: StepConfig) -> tuple[EngineState, StepSummary]:
    """Commits the step, and says what the host may know of the state."""
    scheduler = state.scheduler
    failed_R = scheduler.is_running_R & (state.finish_reason_R == NON_FINITE)
    # The blocks of failed rows may hold NaN and must not be found.
    num_hashed_R = jnp.where(failed_R, 0, scheduler.num_hashed_R)
    scheduler = dataclasses.replace(scheduler, num_hashed_R=num_hashed_R)
    if config.enable_prefix_caching:
        scheduler = hash_outputs(scheduler, state.tokens_RS)
    # Before failed rows are called off, since that frees the blocks of all that have finished.
    scheduler = commit(scheduler)
    scheduler = abort(scheduler, jnp.where(failed_R, scheduler.request_id_R, -1))
    telemetry = dataclasses.replace(
        state.telemetry,
        num_steps=state.telemetry.num_steps + 1,
        num_failed=state.telemetry.num_failed + jnp.sum(failed_R, dtype=jnp.int32),
    )
    is_running_R, pending_R = scheduler.is_running_R, scheduler.num_pending_R
    prefills_R = is_running_R & (pending_R > 1)
    summary = StepSummary(
        num_waiting=jnp.sum(scheduler.is_waiting_R, dtype=jnp.int32),
        num_running=jnp.sum(is_running_R, dtype=jnp.int32),
        num_pending_tokens=jnp.sum(jnp.where(prefills_R, pending_R, 0), dtype=jnp.int32),
        num_used_blocks=scheduler.pool.num_blocks - scheduler.pool.num_free,
        running_id_R=jnp.where(is_running_R, scheduler.request_id_R, -1),
        counters=scheduler.counters,
        telemetry=telemetry,
        acceptance=None if state.speculation is None else state.speculation.telemetry,
    )
    return dataclasses.replace(state, scheduler=scheduler, telemetry=telemetry), summary
