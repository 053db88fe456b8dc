"""How are tokens drawn one after the other? The rounds of a step, under `lax.while_loop`.

A round computes one token for every row. Where the engine speculates, its proposer drafts first,
and the pass verifies (`engine.drafts`); plain decoding is compiled without any of that.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache.masked import get_any
from helios_jax.engine.config import StepConfig
from helios_jax.engine.drafts import (
    Drafting,
    RoundInputs,
    choose_lengths,
    draw,
    draw_shortest,
    learn,
    propose,
    put_rows,
    rows_of,
)
from helios_jax.engine.state import DraftCounts, EngineState, RowOutputs
from helios_jax.engine.work import (
    Served,
    Variant,
    Work,
    emit,
    fits_variant,
    history_of,
    known_tokens,
    put_work,
    row_outputs,
    row_tables,
    sampling_of,
    take_work,
)
from helios_jax.generation import RUNNING
from helios_jax.sampling import Logprobs, TokenHistory, init_logprobs, update_history
from helios_jax.scheduler import Plan, SchedulerState, grow
from helios_jax.speculative import PagedRows, SpeculationParams
from pallas_kernels.dispatch import preferring


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Rounds:
    """What the loop over rounds carries.

    Attributes:
      active_B: bool, rows that go on.
      history, drafting: of the B rows.
      drafts: how they fared so far; None like `drafting`.
      tokens_BN, num_tokens_B, logprobs: the outputs so far.
      num_rounds, num_row_rounds: rounds, and rows that took part in them.
      is_over: whether the scheduler must act before another round.
    """

    work: Work
    active_B: Array
    history: TokenHistory | None
    drafting: Drafting | None
    drafts: DraftCounts | None
    tokens_BN: Array
    num_tokens_B: Array
    logprobs: Logprobs | None
    num_rounds: Array
    num_row_rounds: Array
    is_over: Array


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
    served = Served(model, params, config, variant)
    work = take_work(state)
    rows_B = plan.decode_rows_R[: variant.num_rows]
    sampling_B = sampling_of(state.sampling, rows_B)
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
        history=history_of(served, work, rows_B, sampling_B),
        drafting=None if work.speculation is None else rows_of(work.speculation, rows_B),
        drafts=None
        if work.speculation is None
        else DraftCounts(*(jnp.zeros(len(rows_B), jnp.int32) for _ in DraftCounts._fields)),
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
    outputs = row_outputs(loop.work, rows_B, loop.tokens_BN, loop.logprobs, loop.drafts)
    return put_work(state, loop.work, telemetry), outputs


def _round(
    served: Served, extra: SpeculationParams, scales, sampling_B, rows_B: Array, num_waiting: Array,
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
    fits_B = loop.active_B & fits_variant(served, work.scheduler, rows_B, end_B)
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
                speculation, extra, drafting, inputs, known_tokens(served, work, rows_B),
                jnp.where(granted_B, wanted_B, 0), served.model.config.vocab_size,
            )  # fmt: skip
            pass_over = partial(
                draw, target, inputs=inputs, rule=speculation.rule, num_logprobs=num_logprobs
            )
            drawn = draw_shortest(
                speculation, work.pools, draft, lambda pools, draft: pass_over(pools, draft=draft)
            )
    work = dataclasses.replace(work, scheduler=scheduler, pools=drawn.pools)
    work, emitted_BT, num_emitted_B = emit(
        work, sampling_B, jnp.where(granted_B, rows_B, -1), drawn.tokens_BT, drawn.num_tokens_B,
        drawn.num_tokens_B, now,
    )  # fmt: skip
    if drafting is not None and speculation is not None:
        drafting = learn(speculation, extra, drafting, inputs, drawn, num_emitted_B)
    drafts = loop.drafts
    if drafts is not None:
        num_draft_B = jnp.where(granted_B, drawn.num_draft_B, 0)
        num_accepted_B = jnp.where(granted_B, drawn.num_accepted_B, 0)
        drafts = DraftCounts(
            drafts.num_draft_B + num_draft_B,
            drafts.num_accepted_B + num_accepted_B,
            drafts.num_verifications_B + (num_draft_B > 0),
        )
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
        drafts=drafts,
        tokens_BN=loop.tokens_BN.at[row_B1, column_BT].set(emitted_BT, mode="drop"),
        num_tokens_B=loop.num_tokens_B + num_emitted_B,
        logprobs=logprobs,
        num_rounds=loop.num_rounds + 1,
        num_row_rounds=loop.num_row_rounds + jnp.sum(granted_B, dtype=jnp.int32),
        is_over=lacks | (jnp.any(ended_B) & (num_waiting > 0)),
    )


def _paged_rows(served: Served, scheduler: SchedulerState, scales, rows_B: Array) -> PagedRows:
    config = served.config
    tables = tuple(row_tables(served, scheduler, rows_B))
    return PagedRows(tables, scales, num_blocks=config.num_blocks, backend=config.backend)
