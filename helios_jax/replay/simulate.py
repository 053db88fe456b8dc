"""When would each request of a trace get its tokens, under a policy and a model of step times?

The scheduler is the engine's own; only the model's work is replaced with a time. An event is one
step: a prefill chunk and one decode round, or several rounds in which nothing can change, so that
time passes per event and not per token. All in one compiled loop.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from helios_jax.cache.hashing import chain_hash
from helios_jax.cache.masked import get_any, masked_set
from helios_jax.config import require
from helios_jax.replay.traces import Trace
from helios_jax.scheduler import (
    EMPTY,
    FINISHED,
    Counters,
    Plan,
    Requests,
    SchedulerConfig,
    SchedulerState,
    Urgency,
    advance,
    commit,
    grow,
    init_scheduler,
    is_wide_prompt,
    schedule,
    submit,
)

StepSeconds = Callable[..., Array]


@dataclass(frozen=True)
class Targets:
    """What each request asks for beside its tokens; float32 [N], `priority` lower is earlier."""

    ttft_seconds: np.ndarray
    tpot_seconds: np.ndarray
    priority: np.ndarray


class Outcome(NamedTuple):
    """What became of N requests; infinite times where refused.

    first_token_time_N, finish_time_N: float32 seconds on the trace's clock.
    num_events: steps simulated.
    counters: the scheduler's.
    """

    first_token_time_N: Array
    finish_time_N: Array
    num_events: Array
    counters: Counters


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Prefixes:
    """See `Trace`."""

    ids_NI: Array
    tokens: int = field(metadata={"static": True})


class _Table(NamedTuple):
    """All requests on the device, padded to a power of two so that few lengths are compiled."""

    num_requests: Array
    arrival_seconds_N: Array
    num_prompt_N: Array
    num_output_N: Array
    ttft_seconds_N: Array
    tpot_seconds_N: Array
    priority_N: Array
    prefixes: _Prefixes | None


class _Simulation(NamedTuple):
    state: SchedulerState
    now: Array
    # What float32 rounded off `now`, to be added next time.
    rest: Array
    # Who arrived until then is known to the scheduler: see `overlaps`.
    known_until: Array
    next_arrival: Array
    first_token_time_N: Array
    finish_time_N: Array
    num_events: Array


def simulate(
    trace: Trace,
    targets: Targets,
    config: SchedulerConfig,
    step_seconds: StepSeconds,
    urgency: Urgency,
    *,
    overlaps: bool = False,
) -> Outcome:
    """Serves the whole trace.

    Args:
      trace: requests that end after exactly `num_output` tokens.
      config: the scheduler's; `max_rounds` bounds the rounds of an event.
      step_seconds: mean seconds of one pass, from the keywords of `profiler.step_seconds` and
        num_decode (rows that decode), decode_kv_tokens (of `kv_tokens`, those that they read) and
        num_rounds (passes of the event). Tokens at the wide precision count as the narrow ones
        that fill as much memory.
      urgency: a policy.
      overlaps: whether a step is planned when the one before it begins, as the engine's host does,
        so that who arrives during a step waits for the one after the next.

    Raises:
      ValueError: the targets are not as many as the requests.
    """
    table = request_table(trace, targets, config)
    outcome = _run(
        init_scheduler(config), table, step_seconds, urgency, config.max_rounds, overlaps
    )
    return outcome._replace(
        first_token_time_N=outcome.first_token_time_N[: len(trace)],
        finish_time_N=outcome.finish_time_N[: len(trace)],
    )


def request_table(trace: Trace, targets: Targets, config: SchedulerConfig) -> _Table:
    for column in dataclasses.fields(targets):
        number = len(getattr(targets, column.name))
        require(
            number == len(trace),
            f"targets.{column.name}: has {number} entries for a trace of {len(trace)} requests",
        )
    capacity = 1 << max(len(trace) - 1, 15).bit_length()

    def padded(column: np.ndarray, dtype: type) -> Array:
        extra = [(0, capacity - len(trace))] + [(0, 0)] * (column.ndim - 1)
        return jnp.asarray(np.pad(np.asarray(column, dtype), extra))

    prefixes = None
    if trace.prefix_ids_NI is not None:
        for block_tokens in (config.narrow_block_tokens, config.wide_block_tokens):
            require(
                trace.prefix_tokens % block_tokens == 0,
                f"block of {block_tokens} tokens: must divide the {trace.prefix_tokens} tokens "
                "that share an id in this trace",
            )
        prefixes = _Prefixes(padded(trace.prefix_ids_NI, np.int32), trace.prefix_tokens)
    return _Table(
        num_requests=jnp.int32(len(trace)),
        arrival_seconds_N=padded(trace.arrival_seconds, np.float32),
        num_prompt_N=padded(trace.num_prompt, np.int32),
        num_output_N=padded(trace.num_output, np.int32),
        ttft_seconds_N=padded(targets.ttft_seconds, np.float32),
        tpot_seconds_N=padded(targets.tpot_seconds, np.float32),
        priority_N=padded(targets.priority, np.float32),
        prefixes=prefixes,
    )


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _run(state, table: _Table, step_seconds, urgency, max_rounds, overlaps) -> Outcome:
    def event(simulation: _Simulation) -> _Simulation:
        simulation = lax.while_loop(
            partial(is_due, table=table), partial(enter, table=table), simulation
        )
        return run_event(simulation, table, step_seconds, urgency, max_rounds, overlaps)

    start = begin(state, table)
    return outcome_of(lax.while_loop(partial(goes_on, table=table), event, start))


def begin(state: SchedulerState, table: _Table) -> _Simulation:
    """Nobody has arrived."""
    never = jnp.full_like(table.arrival_seconds_N, jnp.inf)
    zero = jnp.float32(0)
    return _Simulation(state, zero, zero, zero, jnp.int32(0), never, never, jnp.int32(0))


def goes_on(simulation: _Simulation, table: _Table) -> Array:
    """Whether anybody is to come, or is here."""
    is_live_R = simulation.state.is_waiting_R | simulation.state.is_running_R
    return (simulation.next_arrival < table.num_requests) | jnp.any(is_live_R)


def outcome_of(end: _Simulation) -> Outcome:
    """What is read out at the end."""
    return Outcome(end.first_token_time_N, end.finish_time_N, end.num_events, end.state.counters)


def run_event(
    simulation: _Simulation, table: _Table, step_seconds, urgency, max_rounds, overlaps
) -> _Simulation:
    """A step, after those who are due have entered; with nobody here and to come, nothing."""
    arrivals = table.arrival_seconds_N
    state, next_arrival, now = simulation.state, simulation.next_arrival, simulation.now
    is_live = goes_on(simulation, table)
    state, plan = schedule(state, now, urgency)
    is_idle = (plan.num_decode == 0) & (plan.num_chunk_tokens == 0)
    upcoming = jnp.where(
        next_arrival < table.num_requests, arrivals.at[next_arrival].get(mode="clip"), jnp.inf
    )

    rows = plan.decode_rows_R
    counts = jnp.maximum(plan.chunk_counts_R, 0)
    chunk = jnp.maximum(plan.chunk_rows_R, 0)
    completes = (plan.chunk_rows_R >= 0) & (counts == state.num_pending_R[chunk])
    seconds = partial(_pass_seconds, state, plan, counts, completes, step_seconds)
    # A step that was planned before somebody came is not cut short for them.
    until_arrival = jnp.inf if overlaps else upcoming - now
    num_rounds = _num_rounds(state, plan, seconds(1), until_arrival, max_rounds)
    elapsed = seconds(num_rounds) * num_rounds
    # With nothing to do, time moves to the next arrival; where there is none, rows preempted in
    # this call are left, which the next call takes up.
    until = jnp.where(jnp.isfinite(upcoming), jnp.maximum(upcoming - now, 0.0), 0.0)
    step = jnp.where(is_idle, until, elapsed) + simulation.rest
    end = now + step
    rest = step - (end - now)
    known_until = jnp.where(is_idle, end, now) if overlaps else end

    was_finished_R = state.status_R == FINISHED
    nobody = jnp.zeros_like(completes)
    state = advance(state, plan.chunk_rows_R, counts, completes.astype(jnp.int32), nobody, end)
    start = get_any(state.num_computed_R, rows)
    max_blocks = max_rounds // min(state.block_tokens) + 1
    state, granted = grow(state, rows, start + num_rounds, max_blocks)
    made = jnp.where(granted, num_rounds, 0)
    state = advance(state, jnp.where(granted, rows, -1), made, made, nobody, end)

    has_begun_R = state.is_running_R | (state.status_R == FINISHED)
    finishes_R = (state.status_R == FINISHED) & ~was_finished_R
    first_token_time_N = masked_set(
        simulation.first_token_time_N, state.request_id_R, state.first_token_time_R, has_begun_R
    )
    finish_time_N = masked_set(simulation.finish_time_N, state.request_id_R, end, finishes_R)
    return _Simulation(
        commit(state), end, rest, known_until, next_arrival, first_token_time_N, finish_time_N,
        simulation.num_events + is_live.astype(jnp.int32),
    )  # fmt: skip


def is_due(simulation: _Simulation, table: _Table) -> Array:
    """Whether the next request has arrived and finds an empty row."""
    request, state = simulation.next_arrival, simulation.state
    arrived = table.arrival_seconds_N.at[request].get(mode="clip") <= simulation.known_until
    has_room = jnp.any((state.status_R == EMPTY) | (state.status_R == FINISHED))
    return (request < table.num_requests) & arrived & has_room


def enter(simulation: _Simulation, table: _Table) -> _Simulation:
    """Submits the next request if it is due; what finds no empty row waits outside in order."""
    due, state = is_due(simulation, table), simulation.state
    request = jnp.minimum(simulation.next_arrival, table.num_requests - 1)
    fields = {
        "request_id_N": jnp.where(due, request, -1),
        "num_prompt_N": table.num_prompt_N[request],
        "max_tokens_N": table.num_output_N[request],
        "priority_N": table.priority_N[request],
        "arrival_time_N": table.arrival_seconds_N[request],
        "deadline_N": jnp.float32(jnp.inf),
        "ttft_target_N": table.ttft_seconds_N[request],
        "tpot_target_N": table.tpot_seconds_N[request],
        "hash_NM2": _hashes(state, table, request),
    }
    state, _, _ = submit(state, Requests(**{k: value[None] for k, value in fields.items()}))
    next_arrival = simulation.next_arrival + due.astype(jnp.int32)
    return simulation._replace(state=state, next_arrival=next_arrival)


def _hashes(state: SchedulerState, table: _Table, request: Array) -> Array:
    """Content hashes of the prompt's full blocks: of the trace's id and the place under it."""
    M = state.block_table_RM.shape[1]
    if table.prefixes is None:
        return jnp.zeros((M, 2), jnp.uint32)
    num_prompt = table.num_prompt_N[request]
    block_tokens = jnp.where(is_wide_prompt(state, num_prompt), *state.block_tokens[::-1])
    start_M = jnp.arange(M) * block_tokens
    ids_I = table.prefixes.ids_NI[request]
    id_M = ids_I.at[start_M // table.prefixes.tokens].get(mode="fill", fill_value=-1)
    place_M = start_M % table.prefixes.tokens
    words_M3 = jnp.stack([id_M, place_M, jnp.full_like(id_M, block_tokens)], axis=-1)
    hash_M2 = chain_hash(jnp.zeros(2, jnp.uint32), words_M3)
    is_full_M = start_M + block_tokens <= num_prompt
    return jnp.where((is_full_M & (id_M >= 0))[:, None], hash_M2, jnp.uint32(0))


def _pass_seconds(
    state: SchedulerState, plan: Plan, counts: Array, completes: Array, step_seconds, num_rounds
) -> Array:
    """Mean seconds of a pass over `num_rounds` of them."""
    is_decoding_R = plan.decode_rows_R >= 0
    computed_R = get_any(state.num_computed_R, plan.decode_rows_R)
    computed_R = jnp.where(is_decoding_R, computed_R + 0.5 * (num_rounds - 1), 0.0)
    starts_R = jnp.where(plan.chunk_rows_R >= 0, plan.chunk_starts_R, 0)
    pairs_R = counts * (starts_R + 0.5 * (counts + 1))
    narrow, wide = state.block_tokens

    def held(rows_R: Array, tokens_R: Array) -> Array:
        is_wide_R = get_any(state.is_wide_R, rows_R)
        return jnp.sum(jnp.where(is_wide_R, narrow / wide, 1.0) * tokens_R)

    decode_kv = held(plan.decode_rows_R, computed_R)
    return step_seconds(
        num_tokens=plan.num_decode + plan.num_chunk_tokens,
        num_sampled=plan.num_decode + jnp.sum(completes),
        kv_tokens=decode_kv + held(plan.chunk_rows_R, starts_R),
        attended_tokens=jnp.sum(computed_R) + jnp.sum(pairs_R),
        num_decode=plan.num_decode,
        decode_kv_tokens=decode_kv,
        num_rounds=num_rounds,
    )


def _num_rounds(state: SchedulerState, plan: Plan, seconds, until_arrival, max_rounds) -> Array:
    """Rounds in which no row ends, crosses the watermark or lacks a block, and nobody arrives."""
    rows = plan.decode_rows_R
    named = rows >= 0
    is_wide = get_any(state.is_wide_R, rows)
    known = get_any(state.num_known_R, rows)
    left = get_any(state.max_known_R, rows) - known
    to_watermark = state.limits.kv_watermark - known
    left = jnp.where(is_wide, left, jnp.minimum(left, jnp.maximum(to_watermark, 0) + 1))
    # A row that found its whole prompt gets its first token in a round of its own time.
    left = jnp.where(get_any(state.num_output_R, rows) == 0, 1, left)
    rounds = jnp.min(jnp.where(named, left, max_rounds), initial=max_rounds)
    arrives = jnp.minimum(jnp.ceil(until_arrival / seconds), float(max_rounds))
    rounds = jnp.minimum(rounds, arrives.astype(jnp.int32))
    rounds = jnp.where(plan.num_chunk_tokens > 0, 1, jnp.maximum(rounds, 1))
    target = get_any(state.num_computed_R, rows) + rounds
    needed = state.num_blocks_for(target, is_wide) - get_any(state.num_blocks_R, rows)
    needed = jnp.sum(jnp.where(named, jnp.maximum(needed, 0), 0))
    return jnp.where(needed <= state.pool.num_ready, rounds, 1)


def summarize(trace: Trace, targets: Targets, outcome: Outcome) -> dict[str, float]:
    """Shares of targets met, times in seconds, what preemption cost and what sharing saved.

    `prefix_hit_rate` is the share of prompt tokens found instead of computed; tokens found by rows
    that resume count too.
    """
    first = np.asarray(outcome.first_token_time_N, np.float64)
    finish = np.asarray(outcome.finish_time_N, np.float64)
    served = np.isfinite(finish)
    ttft = first - trace.arrival_seconds
    later = np.maximum(trace.num_output - 1, 1)[served]
    pace = (finish[served] - first[served]) / later
    tpot_is_met = pace <= targets.tpot_seconds[served]
    tpot = pace[trace.num_output[served] > 1]
    counters = outcome.counters
    return {
        "num_requests": len(trace),
        "num_served": int(served.sum()),
        "num_refused": int(counters.num_refused),
        "ttft_met": float((ttft <= targets.ttft_seconds).mean()),
        "tpot_met": float(tpot_is_met.sum()) / len(trace),
        "ttft_p50_seconds": float(np.quantile(ttft, 0.5, method="higher")),
        "ttft_p95_seconds": float(np.quantile(ttft, 0.95, method="higher")),
        "ttft_p99_seconds": float(np.quantile(ttft, 0.99, method="higher")),
        "tpot_p50_seconds": float(np.median(tpot)) if len(tpot) else math.inf,
        "tpot_p95_seconds": float(np.quantile(tpot, 0.95)) if len(tpot) else math.inf,
        "output_throughput": float(trace.num_output[served].sum())
        / max(float(finish[served].max(initial=0.0)), 1e-9),
        "end_seconds": float(finish[served].max(initial=0.0)),
        "preemption_rate": float(counters.num_preemptions) / len(trace),
        "num_recomputed_tokens": int(counters.num_recomputed_tokens),
        "prefix_hit_rate": float(counters.num_prefix_hit_tokens) / float(trace.num_prompt.sum()),
        "num_events": int(outcome.num_events),
    }
