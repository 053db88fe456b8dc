"""What happens in one step of the engine? Pure functions from state to state.

    admit | plan_step: schedule, copy and migrate blocks | run_chunk | run_rounds | end_step

`engine_step` is all of them in one program. A host that serves compiles them one by one and starts
them in a row without looking at a result: the scheduler is then compiled once and the model once
for each `Variant` of a chunk or of rounds, not for every combination of both.

A variant is a set of sizes that the host chooses from what it knows. It bounds the work and never
changes a result: a row that does not fit it waits for the next step.

A round computes one token for every row. Where the engine speculates, its proposer drafts first,
and the pass verifies (`engine.drafts`); plain decoding is compiled without any of that.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache.hashing import initial_hash, prompt_hashes
from helios_jax.cache.masked import get_any, masked_set
from helios_jax.cache.paged import (
    KVPools,
    KVScales,
    PagedCache,
    RowBlocks,
    copy_blocks,
    migrate_blocks,
)
from helios_jax.engine.config import StepConfig
from helios_jax.engine.drafts import (
    Drafting,
    RoundInputs,
    begin_rows,
    choose_lengths,
    draw,
    draw_shortest,
    forget_moved,
    last_hidden,
    learn,
    propose,
    put_rows,
    rows_of,
)
from helios_jax.engine.state import (
    Arrivals,
    EngineState,
    PromptLogprobs,
    RowOutputs,
    SpeculationState,
    StepOutputs,
    StepSummary,
    Telemetry,
)
from helios_jax.generation import NON_FINITE, RUNNING, STOP, score_hidden
from helios_jax.sampling import (
    Logprobs,
    SamplingArrays,
    TokenHistory,
    end_rows,
    init_history,
    init_logprobs,
    sample_tokens,
    score_tokens,
    update_history,
)
from helios_jax.scheduler import (
    ACCEPTED,
    Plan,
    SchedulerState,
    Urgency,
    abort,
    advance,
    commit,
    grow,
    hash_outputs,
    is_wide_prompt,
    schedule,
    submit,
)
from helios_jax.scheduler.urgency import deadline
from helios_jax.speculative import PagedRows, RowTable, SpeculationParams
from pallas_kernels.dispatch import preferring
from pallas_kernels.kv_format import format_of


@dataclass(frozen=True)
class Variant:
    """Sizes that a chunk or decode rounds are compiled for; static.

    Attributes:
      num_rows: rows that take part, B.
      context_tokens: longest of them, with what is added.
      chunk_tokens: room for prefill, C; 0 for rounds.
      has_narrow, has_wide: precisions of rows that take part.
      num_logprobs, num_prompt_logprobs: most probable tokens reported beside the one that is there;
        None compiles no logprobs.
    """

    num_rows: int
    context_tokens: int
    chunk_tokens: int = 0
    has_narrow: bool = True
    has_wide: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


class _Model(NamedTuple):
    """The static half of a forward pass, and the parameters."""

    model: Any
    params: Any
    config: StepConfig
    variant: Variant


class _Tokens(NamedTuple):
    """The tokens of a pass, T in all, packed.

    rows_B: int32, -1 padded; starts_B: position of each row's first token; firsts_B: its place
    among the T; counts_B: its tokens. index_T: which of the B rows; position_T; is_token_T: bool.
    """

    rows_B: Array
    starts_B: Array
    firsts_B: Array
    counts_B: Array
    index_T: Array
    position_T: Array
    is_token_T: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Work:
    """What the chunk and the rounds change."""

    scheduler: SchedulerState
    pools: KVPools
    tokens_RS: Array
    finish_reason_R: Array
    speculation: SpeculationState | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rounds:
    """What the loop over rounds carries.

    Attributes:
      active_B: bool, rows that go on.
      history, drafting: of the B rows.
      tokens_BN, num_tokens_B, logprobs: the outputs so far.
      num_rounds, num_row_rounds: rounds, and rows that took part in them.
      is_over: whether the scheduler must act before another round.
    """

    work: _Work
    active_B: Array
    history: TokenHistory | None
    drafting: Drafting | None
    tokens_BN: Array
    num_tokens_B: Array
    logprobs: Logprobs | None
    num_rounds: Array
    num_row_rounds: Array
    is_over: Array


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

    Compile it with `programs.COMPILER_OPTIONS` of the platform: XLA's own choices slow it down.

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


def run_chunk(
    params: Any,
    state: EngineState,
    plan: Plan,
    now: Array,
    *,
    model: Any,
    config: StepConfig,
    variant: Variant,
) -> tuple[EngineState, RowOutputs, PromptLogprobs | None]:
    """Computes the planned chunk, and draws the next token of rows whose last known is in it.

    Where the engine speculates, only a first token is drawn here: the rounds of a row that was
    preempted go on where they were, lest a seeded row's drafts depend on what preempted it.
    """
    served = _Model(model, params, config, variant)
    work = _work(state)
    B, C = variant.num_rows, variant.chunk_tokens
    scheduler = work.scheduler
    rows_B, starts_B = plan.chunk_rows_R[:B], plan.chunk_starts_R[:B]
    fits_B = _fits(served, scheduler, rows_B, starts_B + plan.chunk_counts_R[:B])
    rows_B = jnp.where(fits_B, rows_B, -1)
    counts_B = jnp.where(fits_B, plan.chunk_counts_R[:B], 0)
    ends_B = jnp.cumsum(counts_B)
    firsts_B, num_tokens = ends_B - counts_B, ends_B[-1]
    index_C = jnp.repeat(jnp.arange(B), counts_B, total_repeat_length=C)
    place_C = jnp.arange(C)
    tokens = _Tokens(
        rows_B, starts_B, firsts_B, counts_B, index_C,
        starts_B[index_C] + place_C - firsts_B[index_C], place_C < num_tokens,
    )  # fmt: skip
    through_B = fits_B & (counts_B == get_any(scheduler.num_pending_R, rows_B))
    resumes_B = jnp.zeros_like(through_B)
    if config.speculation is not None:
        resumes_B = through_B & (get_any(scheduler.num_output_R, rows_B) > 0)
    sampling_B = _rows_of(state.sampling, rows_B)
    # As many turns as the tokens there are need, so that room to spare costs little; and a loop,
    # since under `cond` XLA copies the pools.
    T = min(C, config.tile_tokens)

    def run_tile(i, carry: tuple[KVPools, Array]):
        pools, hidden_CD = carry
        tile = _tile(tokens, i * T, T)
        hidden_TD, pools = _hidden(
            served, state.scales, dataclasses.replace(work, pools=pools), tile, T, shape=(1, T)
        )
        return pools, lax.dynamic_update_slice(hidden_CD, hidden_TD, (i * T, 0))

    # Of whole tiles: a slice that begins beyond the last one would be moved.
    room = -(-C // T) * T
    hidden_CD = jnp.zeros((room, model.config.hidden_size), model.dtype)
    pools, hidden_CD = lax.fori_loop(0, -(-num_tokens // T), run_tile, (work.pools, hidden_CD))
    work, hidden_CD = dataclasses.replace(work, pools=pools), hidden_CD[:C]

    def draw(work: _Work):
        last_B = jnp.maximum(firsts_B + counts_B - 1, 0)
        logits_BV = _logits(served, hidden_CD[last_B])
        history = _history(served, work, rows_B, sampling_B)
        num_output_B = get_any(scheduler.num_output_R, rows_B)
        drawn_B = sample_tokens(logits_BV, sampling_B, history, num_output_B)
        # Of each token, since 8-bit formats do not keep a NaN for the next token to see.
        is_bad_C = tokens.is_token_T & ~jnp.isfinite(jnp.sum(hidden_CD, -1, dtype=jnp.float32))
        is_bad_B = jnp.zeros(B, bool).at[index_C].max(is_bad_C)
        draws_B = fits_B & ((through_B & ~resumes_B) | is_bad_B)
        drawn_B1 = jnp.where(draws_B & ~is_bad_B, drawn_B, -1)[:, None]
        work, emitted_B1, _ = _emit(
            work, sampling_B, rows_B, drawn_B1, draws_B.astype(jnp.int32), counts_B - resumes_B, now
        )
        if work.speculation is not None:
            drafting = rows_of(work.speculation, rows_B)
            hidden_BD = last_hidden(
                drafting.hidden_BD, hidden_CD[last_B][:, None], (emitted_B1[:, 0] >= 0).astype(int)
            )
            drafting = dataclasses.replace(drafting, hidden_BD=hidden_BD)
            speculation = put_rows(work.speculation, rows_B, drafting)
            work = dataclasses.replace(work, speculation=speculation)
        logprobs = prompt = None
        if variant.num_logprobs is not None:
            scored = score_tokens(logits_BV, emitted_B1[:, 0], variant.num_logprobs)
            logprobs = jax.tree.map(lambda x: x[:, None], scored)
        if variant.num_prompt_logprobs is not None:
            prompt = _score_prompt(served, work, tokens, hidden_CD)
        return work, emitted_B1, logprobs, prompt

    def skip(work: _Work):
        logprobs = prompt = None
        if variant.num_logprobs is not None:
            logprobs = init_logprobs(B, 1, variant.num_logprobs)
        if variant.num_prompt_logprobs is not None:
            none_C = jnp.full(C, -1, jnp.int32)
            empty = jax.tree.map(lambda x: x[0], init_logprobs(1, C, variant.num_prompt_logprobs))
            prompt = PromptLogprobs(none_C, none_C, none_C, empty)
        return work, jnp.full((B, 1), -1, jnp.int32), logprobs, prompt

    turns = (num_tokens > 0).astype(jnp.int32)
    work, emitted_B1, logprobs, prompt = lax.fori_loop(
        0, turns, lambda _, x: draw(x[0]), skip(work)
    )
    outputs = _outputs(work, rows_B, emitted_B1, logprobs)
    telemetry = dataclasses.replace(
        state.telemetry,
        num_prefill_tokens=state.telemetry.num_prefill_tokens + num_tokens,
        num_output_tokens=state.telemetry.num_output_tokens + jnp.sum(emitted_B1 >= 0),
    )
    return _after(state, work, telemetry), outputs, prompt


def _tile(tokens: _Tokens, first: Array, size: int) -> _Tokens:
    """Those of the packed tokens that are in the `size` places from `first` on."""

    begin_B = jnp.clip(first - tokens.firsts_B, 0, tokens.counts_B)
    end_B = jnp.clip(first + size - tokens.firsts_B, 0, tokens.counts_B)
    place_T = first + jnp.arange(size)
    index_T = tokens.index_T.at[place_T].get(mode="clip")
    return _Tokens(
        rows_B=tokens.rows_B,
        starts_B=tokens.starts_B + begin_B,
        firsts_B=jnp.clip(tokens.firsts_B - first, 0, size),
        counts_B=end_B - begin_B,
        index_T=index_T,
        position_T=tokens.position_T.at[place_T].get(mode="clip"),
        is_token_T=tokens.is_token_T.at[place_T].get(mode="fill", fill_value=False),
    )


def _score_prompt(served: _Model, work: _Work, tokens: _Tokens, hidden_CD: Array) -> PromptLogprobs:
    scheduler, row_C = work.scheduler, tokens.rows_B[tokens.index_T]
    position_C = tokens.position_T + 1
    token_C = work.tokens_RS.at[jnp.maximum(row_C, 0), position_C].get(mode="clip")
    is_scored_C = tokens.is_token_T & (position_C < get_any(scheduler.num_prompt_R, row_C))
    num_top = served.variant.num_prompt_logprobs
    assert num_top is not None
    with preferring(served.config.backend):
        scored = score_hidden(served.model, served.params, hidden_CD, token_C, num_top)
    return PromptLogprobs(
        request_id_C=jnp.where(is_scored_C, get_any(scheduler.request_id_R, row_C), -1),
        position_C=jnp.where(is_scored_C, position_C, -1),
        token_C=token_C,
        logprobs=scored,
    )


def run_rounds(
    params: Any,
    state: EngineState,
    plan: Plan,
    now: Array,
    max_rounds: Array,
    extra: SpeculationParams = SpeculationParams(),  # noqa: B008 (nothing mutable)
    *,
    model: Any,
    config: StepConfig,
    variant: Variant,
) -> tuple[EngineState, RowOutputs]:
    """Decode rounds until the scheduler must act again.

    That is when a block is lacking, when a row has finished while others wait, after a single round
    if there is prefill to do, after `max_rounds`, or when a row has got as many tokens.
    """
    served = _Model(model, params, config, variant)
    work = _work(state)
    rows_B = plan.decode_rows_R[: variant.num_rows]
    sampling_B = _rows_of(state.sampling, rows_B)
    num_pending_R = work.scheduler.num_pending_R
    prefills = plan.num_chunk_tokens > 0
    prefills |= jnp.any(work.scheduler.is_running_R & (num_pending_R > 1))
    max_rounds = jnp.minimum(max_rounds, jnp.where(prefills, 1, config.max_rounds))
    logprobs = None
    if variant.num_logprobs is not None:
        logprobs = init_logprobs(len(rows_B), config.max_step_tokens, variant.num_logprobs)
    loop = _Rounds(
        work=work,
        active_B=rows_B >= 0,
        history=_history(served, work, rows_B, sampling_B),
        drafting=None if work.speculation is None else rows_of(work.speculation, rows_B),
        tokens_BN=jnp.full((len(rows_B), config.max_step_tokens), -1, jnp.int32),
        num_tokens_B=jnp.zeros(len(rows_B), jnp.int32),
        logprobs=logprobs,
        num_rounds=jnp.int32(0),
        num_row_rounds=jnp.int32(0),
        is_over=jnp.bool_(False),
    )

    def goes_on(loop: _Rounds) -> Array:
        goes_on = (loop.num_rounds < max_rounds) & ~loop.is_over & jnp.any(loop.active_B)
        if config.speculation is not None:
            goes_on &= jnp.all(~loop.active_B | (loop.num_tokens_B < max_rounds))
        return goes_on

    def turn(loop: _Rounds) -> _Rounds:
        return _round(served, extra, state.scales, sampling_B, rows_B, plan.num_waiting, now, loop)

    # The proposer's pools must be carried once only.
    bare = dataclasses.replace(work, speculation=None)
    loop = lax.while_loop(goes_on, turn, dataclasses.replace(loop, work=bare))
    if work.speculation is not None:
        assert loop.drafting is not None, "it was given"
        speculation = put_rows(work.speculation, rows_B, loop.drafting)
        work = dataclasses.replace(loop.work, speculation=speculation)
        loop = dataclasses.replace(loop, work=work)
    telemetry = dataclasses.replace(
        state.telemetry,
        num_rounds=state.telemetry.num_rounds + loop.num_rounds,
        num_decode_rows=state.telemetry.num_decode_rows + loop.num_row_rounds,
        num_output_tokens=state.telemetry.num_output_tokens + jnp.sum(loop.num_tokens_B),
    )
    outputs = _outputs(loop.work, rows_B, loop.tokens_BN, loop.logprobs)
    return _after(state, loop.work, telemetry), outputs


def _round(
    served: _Model, extra: SpeculationParams, scales, sampling_B, rows_B: Array, num_waiting: Array,
    now: Array, loop: _Rounds,
) -> _Rounds:  # fmt: skip
    """One token for every active row, and those of its draft that are accepted."""
    work, drafting, config = loop.work, loop.drafting, served.config
    speculation = config.speculation
    B = len(rows_B)
    start_B = get_any(work.scheduler.num_computed_R, rows_B)
    wanted_B = jnp.int32(0)
    if drafting is not None and speculation is not None:
        room_B = get_any(work.scheduler.max_known_R, rows_B) - start_B - 1
        wanted_B = choose_lengths(speculation, extra, drafting, room_B)
    end_B = start_B + 1 + wanted_B
    fits_B = loop.active_B & _fits(served, work.scheduler, rows_B, end_B)
    scheduler, granted_B = grow(
        work.scheduler, jnp.where(fits_B, rows_B, -1), end_B, config.max_blocks_per_round
    )
    inputs = RoundInputs(
        kv=_paged_rows(served, scheduler, scales, rows_B),
        last_B1=work.tokens_RS.at[jnp.maximum(rows_B, 0), start_B].get(mode="clip")[:, None],
        start_B=start_B,
        takes_part_B=granted_B,
        sampling=sampling_B,
        history=loop.history,
        num_output_B=get_any(scheduler.num_output_R, rows_B),
    )
    target = (served.model, served.params)
    num_logprobs = served.variant.num_logprobs
    with preferring(config.backend):
        if drafting is None or speculation is None:
            drawn = draw(target, work.pools, inputs, None, num_logprobs=num_logprobs)
        else:
            draft, drafting = propose(
                speculation, extra, drafting, inputs, _known_tokens(served, work, rows_B),
                jnp.where(granted_B, wanted_B, 0), served.model.config.vocab_size,
            )  # fmt: skip
            pass_over = partial(
                draw, target, inputs=inputs, rule=speculation.rule, num_logprobs=num_logprobs
            )
            drawn = draw_shortest(
                speculation, work.pools, draft, lambda pools, draft: pass_over(pools, draft=draft)
            )
    work = dataclasses.replace(work, scheduler=scheduler, pools=drawn.pools)
    work, emitted_BT, num_emitted_B = _emit(
        work, sampling_B, jnp.where(granted_B, rows_B, -1), drawn.tokens_BT, drawn.num_tokens_B,
        drawn.num_tokens_B, now,
    )  # fmt: skip
    if drafting is not None and speculation is not None:
        drafting = learn(speculation, extra, drafting, inputs, drawn, num_emitted_B)
    ended_B = granted_B & (get_any(work.finish_reason_R, rows_B) != RUNNING)
    row_B1, N = jnp.arange(B)[:, None], loop.tokens_BN.shape[1]
    history, is_emitted_BT = loop.history, emitted_BT >= 0
    place_T = jnp.arange(emitted_BT.shape[1])
    column_BT = jnp.where(is_emitted_BT, loop.num_tokens_B[:, None] + place_T, N)
    logprobs = loop.logprobs
    if logprobs is not None:
        logprobs = jax.tree.map(
            lambda buffer, new: buffer.at[row_B1, column_BT].set(new, mode="drop"),
            logprobs, drawn.logprobs,
        )  # fmt: skip
    for t in range(len(place_T) if history is not None else 0):
        history = update_history(history, emitted_BT[:, t], is_emitted_BT[:, t])
    lacks = jnp.any(loop.active_B & ~granted_B)
    return _Rounds(
        work=work,
        active_B=granted_B & ~ended_B,
        history=history,
        drafting=drafting,
        tokens_BN=loop.tokens_BN.at[row_B1, column_BT].set(emitted_BT, mode="drop"),
        num_tokens_B=loop.num_tokens_B + num_emitted_B,
        logprobs=logprobs,
        num_rounds=loop.num_rounds + 1,
        num_row_rounds=loop.num_row_rounds + jnp.sum(granted_B, dtype=jnp.int32),
        is_over=lacks | (jnp.any(ended_B) & (num_waiting > 0)),
    )


def _fits(served: _Model, scheduler: SchedulerState, rows_B: Array, end_B: Array) -> Array:
    """Which rows the variant has room for, up to `end_B` tokens."""
    variant = served.variant
    is_wide_B = get_any(scheduler.is_wide_R, rows_B)
    present_B = jnp.where(is_wide_B, variant.has_wide, variant.has_narrow)
    if not served.config.has_two_precisions:
        present_B = jnp.ones_like(is_wide_B)
    return (rows_B >= 0) & present_B & (end_B <= variant.context_tokens)


def _hidden(
    served: _Model, scales, work: _Work, tokens: _Tokens, max_query_len: int, shape
) -> tuple[Array, KVPools]:
    """Runs the model on `tokens`: hidden states [T, D], and the pools with their KV entries."""
    model, config = served.model, served.config
    row_T = jnp.maximum(tokens.rows_B, 0)[tokens.index_T]
    ids_T = work.tokens_RS.at[row_T, tokens.position_T].get(mode="clip")
    positions_T = jnp.where(tokens.is_token_T, tokens.position_T, -1)
    cache = PagedCache(
        pools=work.pools,
        rows=tuple(_row_blocks(served, work.scheduler, scales, tokens)),
        num_blocks=config.num_blocks,
        max_query_len=max_query_len,
        backend=config.backend,
    )
    with preferring(config.backend):
        hidden, cache = model.apply(
            served.params, ids_T.reshape(shape), positions_T.reshape(shape), cache, method="hidden"
        )
    return hidden.reshape(-1, hidden.shape[-1]), cache.pools


def _row_blocks(served: _Model, scheduler: SchedulerState, scales: KVScales | None, tokens):
    """`RowBlocks` of each precision that the variant has."""
    for table in _row_tables(served, scheduler, tokens.rows_B):
        block_tokens = format_of(table.kv_dtype).tokens_per_block
        table_BM, mine_B = table.block_table_BM, table.is_mine_B
        block_T = table_BM.at[tokens.index_T, tokens.position_T // block_tokens].get(mode="clip")
        slot_T = block_T * block_tokens + tokens.position_T % block_tokens
        writes_T = tokens.is_token_T & mine_B[tokens.index_T]
        yield RowBlocks(
            block_table_BM=table_BM,
            context_len_B=jnp.where(mine_B, tokens.starts_B + tokens.counts_B, 0),
            query_start_B=tokens.firsts_B.astype(jnp.int32),
            query_len_B=jnp.where(mine_B, tokens.counts_B, 0),
            slot_T=jnp.where(writes_T, slot_T, -1),
            scales=scales if format_of(table.kv_dtype).bits == 8 else None,
            kv_dtype=table.kv_dtype,
        )


def _row_tables(served: _Model, scheduler: SchedulerState, rows_B: Array):
    """`RowTable` of each precision that the variant has."""
    config, variant = served.config, served.variant
    named_B = rows_B >= 0
    rows_B = jnp.maximum(rows_B, 0)
    is_wide_B = scheduler.is_wide_R[rows_B]
    precisions = [(False, config.narrow_dtype)]
    if config.has_two_precisions:
        present = (variant.has_narrow, variant.has_wide)
        precisions = [(False, config.narrow_dtype), (True, config.wide_dtype)]
        precisions = [pair for pair, there in zip(precisions, present, strict=True) if there]
    for is_wide, kv_dtype in precisions:
        mine_B = named_B & (is_wide_B == is_wide) if config.has_two_precisions else named_B
        width = math.ceil(variant.context_tokens / format_of(kv_dtype).tokens_per_block)
        yield RowTable(scheduler.block_table_RM[rows_B, :width], mine_B, kv_dtype)


def _paged_rows(served: _Model, scheduler: SchedulerState, scales, rows_B: Array) -> PagedRows:
    config = served.config
    tables = tuple(_row_tables(served, scheduler, rows_B))
    return PagedRows(tables, scales, num_blocks=config.num_blocks, backend=config.backend)


def _logits(served: _Model, hidden_BD: Array) -> Array:
    with preferring(served.config.backend):
        return served.model.apply(served.params, hidden_BD, method="logits")


def _rows_of(sampling: SamplingArrays, rows_B: Array) -> SamplingArrays:
    return jax.tree.map(lambda table: get_any(table, rows_B), sampling)


def _history(served: _Model, work: _Work, rows_B: Array, sampling_B) -> TokenHistory | None:
    """What filters need of the rows' tokens, from the table: rows come and go between steps."""
    scheduler = work.scheduler
    return init_history(
        _known_tokens(served, work, rows_B),
        get_any(scheduler.num_prompt_R, rows_B),
        sampling_B,
        vocab_size=served.model.config.vocab_size,
        lengths_B=get_any(scheduler.num_known_R, rows_B),
    )


def _known_tokens(served: _Model, work: _Work, rows_B: Array) -> Array:
    """Prompt and output of the rows, int32 [B, S], as far as the variant has room."""
    width = min(served.variant.context_tokens, work.tokens_RS.shape[1])
    return work.tokens_RS[jnp.maximum(rows_B, 0), :width]


def _emit(
    work: _Work, sampling_B: SamplingArrays, rows_B: Array, drawn_BT: Array, num_drawn_B: Array,
    num_computed_B: Array, now: Array,
) -> tuple[_Work, Array, Array]:  # fmt: skip
    """Adds drawn tokens to their rows and ends rows where they end.

    Which of them count is `sampling.end_rows`' decision. A row that fails was drawn nothing else: a
    round in which a draft met a NaN is asked again without drafts. It ends without the KV entries
    of this pass.

    Args:
      rows_B: int32, -1 for none.
      drawn_BT: int32; the first `num_drawn_B` count.
      num_computed_B: KV entries written for known tokens and kept drafts, were nothing dropped.

    Returns:
      The work, the tokens that were added [B, T] (-1 elsewhere), and their number.
    """
    scheduler = work.scheduler
    named_B = rows_B >= 0
    num_drawn_B = jnp.where(named_B, num_drawn_B, 0)
    known_B = get_any(scheduler.num_known_R, rows_B)
    room_B = get_any(scheduler.max_known_R, rows_B) - known_B
    ended = end_rows(drawn_BT, num_drawn_B, sampling_B, room_B)
    num_kept_B, reason_B = ended.num_tokens_B, ended.finish_reason_B
    R, S = work.tokens_RS.shape
    row_B1 = jnp.where(named_B, rows_B, R)[:, None]
    place_T = jnp.arange(drawn_BT.shape[1])
    column_BT = jnp.where(place_T < num_kept_B[:, None], known_B[:, None] + place_T, S)
    scheduler = advance(
        scheduler,
        jnp.where(reason_B == NON_FINITE, -1, rows_B),
        num_computed_B - (num_drawn_B - num_kept_B),
        num_kept_B,
        reason_B == STOP,
        now,
    )
    work = dataclasses.replace(
        work,
        scheduler=scheduler,
        tokens_RS=work.tokens_RS.at[row_B1, column_BT].set(ended.tokens_BT, mode="drop"),
        finish_reason_R=masked_set(work.finish_reason_R, rows_B, reason_B, named_B),
    )
    return work, ended.tokens_BT, num_kept_B


def _outputs(work: _Work, rows_B: Array, tokens_BN: Array, logprobs: Logprobs | None):
    named_B = rows_B >= 0
    return RowOutputs(
        request_id_B=jnp.where(named_B, get_any(work.scheduler.request_id_R, rows_B), -1),
        tokens_BN=tokens_BN,
        finish_reason_B=jnp.where(named_B, get_any(work.finish_reason_R, rows_B), RUNNING),
        logprobs=logprobs,
    )


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
        counters=scheduler.counters,
        telemetry=telemetry,
        acceptance=None if state.speculation is None else state.speculation.telemetry,
    )
    return dataclasses.replace(state, scheduler=scheduler, telemetry=telemetry), summary


def _work(state: EngineState) -> _Work:
    changed = (field.name for field in dataclasses.fields(_Work))
    return _Work(**{name: getattr(state, name) for name in changed})


def _after(state: EngineState, work: _Work, telemetry: Telemetry) -> EngineState:
    changed = {f.name: getattr(work, f.name) for f in dataclasses.fields(work)}
    return dataclasses.replace(state, telemetry=telemetry, **changed)
