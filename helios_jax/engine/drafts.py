"""What does speculation do with the rows of the engine: between steps, and in a round?

A seeded row must get the same tokens alone and in a batch, so where its rounds begin and how many
tokens they draft hangs on the row alone: on its own acceptance, and on `max_tokens`. Nothing is
clipped to what a variant or the pool has room for; a row for which there is none sits the round
out. Which of `Speculation.pass_lengths` a pass has follows the longest draft of the batch, and
changes a row's numbers by rounding only, as other rows' chunks do.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache.masked import get_any, masked_set
from helios_jax.cache.paged import KVPools
from helios_jax.engine.state import SpeculationState
from helios_jax.sampling import (
    Logprobs,
    SamplingArrays,
    TokenHistory,
    sample_tokens,
    score_tokens,
)
from helios_jax.scheduler import SchedulerState
from helios_jax.speculative import (
    AcceptanceRule,
    AcceptanceTelemetry,
    Draft,
    PagedRows,
    ProposerState,
    RoundRows,
    Speculation,
    SpeculationParams,
    Verified,
    no_draft,
    only_tokens,
    record_round,
    run_rows,
    verify,
)
from helios_jax.speculative.passes import logits_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Drafting:
    """`SpeculationState` of B rows, while rounds run."""

    proposer: ProposerState
    controller: Any
    hidden_BD: Array
    is_spoilt_B: Array
    speculates_B: Array
    telemetry: AcceptanceTelemetry


class Drawn(NamedTuple):
    """What one pass over the last known token and the drafts, T tokens a row, gave.

    pools: with the keys and values of the pass.
    tokens_BT, num_tokens_B: int32, the tokens drawn; -1 where none could be.
    hidden_BTD: final hidden states.
    logprobs: of the tokens [B, T]; None unless asked for.
    num_draft_B, num_accepted_B: int32, draft tokens.
    is_spoilt_B: bool, see `RoundRecord`.
    """

    pools: KVPools
    tokens_BT: Array
    num_tokens_B: Array
    hidden_BTD: Array
    logprobs: Logprobs | None
    num_draft_B: Array
    num_accepted_B: Array
    is_spoilt_B: Array


class RoundInputs(NamedTuple):
    """B rows at the beginning of a round's pass.

    last_B1: their last known tokens, at positions start_B; takes_part_B: bool.
    num_output_B: output tokens before the round.
    """

    kv: PagedRows
    last_B1: Array
    start_B: Array
    takes_part_B: Array
    sampling: SamplingArrays
    history: TokenHistory | None
    num_output_B: Array


# Between steps


def begin_rows(
    state: SpeculationState, speculation: Speculation, row_N: Array, speculates_N: Array,
    is_taken_N: Array,
) -> SpeculationState:  # fmt: skip
    """New requests in rows `row_N`. Their proposer's rows are begun by `forget_moved`."""

    def put(table: Array, values: Array) -> Array:
        return masked_set(table, row_N, values, is_taken_N)

    begun = speculation.controller.init_state(len(row_N))
    return dataclasses.replace(
        state,
        controller=jax.tree.map(put, state.controller, begun),
        hidden_RD=masked_set(state.hidden_RD, row_N, 0, is_taken_N),
        is_spoilt_R=masked_set(state.is_spoilt_R, row_N, False, is_taken_N),
        speculates_R=put(state.speculates_R, speculates_N),
    )


def forget_moved(
    state: SpeculationState, before: SchedulerState, after: SchedulerState
) -> SpeculationState:
    """Begins the proposer's rows anew where a schedule took their blocks, or exchanged them."""
    place_R = before.num_computed_R // jnp.where(before.is_wide_R, *before.block_tokens[::-1])
    row_R = jnp.arange(len(place_R))

    def written(scheduler: SchedulerState) -> Array:
        return scheduler.block_table_RM.at[row_R, place_R].get(mode="clip")

    # A shared block that is about to be written was copied.
    is_same_R = (written(before) == written(after)) | (place_R >= before.num_blocks_R)
    stays_R = before.is_running_R & after.is_running_R & is_same_R
    stays_R &= before.is_wide_R == after.is_wide_R
    stays_R &= before.num_computed_R <= after.num_computed_R

    def keep(table: Array) -> Array:
        return jnp.where(stays_R.reshape(-1, *(1,) * (table.ndim - 1)), table, 0)

    proposer = state.proposer._replace(rows=jax.tree.map(keep, state.proposer.rows))
    return dataclasses.replace(state, proposer=proposer)


def rows_of(state: SpeculationState, rows_B: Array) -> Drafting:
    """What `state` holds of some rows; anything where the row is -1."""

    def take(tables: Any) -> Any:
        return jax.tree.map(lambda table: get_any(table, rows_B), tables)

    return Drafting(
        proposer=state.proposer._replace(rows=take(state.proposer.rows)),
        controller=take(state.controller),
        hidden_BD=take(state.hidden_RD),
        is_spoilt_B=take(state.is_spoilt_R),
        speculates_B=take(state.speculates_R),
        telemetry=state.telemetry,
    )


def put_rows(state: SpeculationState, rows_B: Array, drafting: Drafting) -> SpeculationState:
    """The inverse."""

    def put(tables: Any, values: Any) -> Any:
        return jax.tree.map(
            lambda table, value: masked_set(table, rows_B, value, rows_B >= 0), tables, values
        )

    rows = put(state.proposer.rows, drafting.proposer.rows)
    return dataclasses.replace(
        state,
        proposer=drafting.proposer._replace(rows=rows),
        controller=put(state.controller, drafting.controller),
        hidden_RD=put(state.hidden_RD, drafting.hidden_BD),
        is_spoilt_R=put(state.is_spoilt_R, drafting.is_spoilt_B),
        telemetry=drafting.telemetry,
    )


# In a round


def choose_lengths(
    speculation: Speculation, extra: SpeculationParams, drafting: Drafting, room_B: Array
) -> Array:
    """How many tokens each row drafts, int32 [B].

    Args:
      room_B: tokens that it may still get, at least 1; the one after the drafts takes the last.
    """
    J = speculation.max_num_draft_tokens
    wanted_B = speculation.controller.choose(extra.costs, drafting.controller, len(room_B), J)
    may_draft_B = drafting.speculates_B & ~drafting.is_spoilt_B
    return jnp.where(may_draft_B, jnp.clip(room_B - 1, 0, jnp.minimum(wanted_B, J)), 0)


def propose(
    speculation: Speculation,
    extra: SpeculationParams,
    drafting: Drafting,
    inputs: RoundInputs,
    tokens_BS: Array,
    wanted_B: Array,
    vocab_size: int,
) -> tuple[Draft, Drafting]:
    """The drafts; the proposer is not asked where nobody wants any."""
    J = speculation.max_num_draft_tokens

    def ask(state: ProposerState) -> tuple[Draft, ProposerState]:
        rows = RoundRows(
            tokens_BS=tokens_BS,
            num_known_B=inputs.start_B + 1,
            num_output_B=inputs.num_output_B,
            sampling=inputs.sampling,
            history=inputs.history,
            hidden_BD=drafting.hidden_BD,
            kv=inputs.kv,
            vocab_size=vocab_size,
        )
        with jax.named_scope("draft"):
            return speculation.proposer.propose(extra.proposer, state, rows, wanted_B, J)

    shapes, _ = jax.eval_shape(ask, drafting.proposer)
    none = no_draft(len(wanted_B), J)._replace(q_BJV=_zeros(shapes.q_BJV))
    # A loop of no turn or one: under `cond` XLA copies KV pools.
    turns = jnp.any(wanted_B > 0).astype(jnp.int32)
    draft, proposer = lax.fori_loop(
        0, turns, lambda _, carry: ask(carry[1]), (none, drafting.proposer)
    )
    draft = only_tokens(draft, wanted_B, vocab_size)
    return draft, dataclasses.replace(drafting, proposer=proposer)


def draw(
    target: tuple[Any, Any],
    pools: KVPools,
    inputs: RoundInputs,
    draft: Draft | None,
    rule: AcceptanceRule | None = None,
    *,
    num_logprobs: int | None,
) -> Drawn:
    """The target's pass over the last known token of each row and over its drafts, if any."""
    B = len(inputs.start_B)
    draft = no_draft(B, 0) if draft is None else draft
    tokens_BT = jnp.concatenate([inputs.last_B1, draft.tokens_BJ], axis=1)
    T = tokens_BT.shape[1]
    counts_B = jnp.where(inputs.takes_part_B, draft.num_draft_B + 1, 0)
    hidden_BTD, pools = run_rows(*target, pools, inputs.kv, tokens_BT, inputs.start_B, counts_B)
    logits_BTV = logits_of(*target, hidden_BTD)
    if T == 1:
        drawn_B = sample_tokens(
            logits_BTV[:, 0], inputs.sampling, inputs.history, inputs.num_output_B
        )
        drawn_BT, num_drawn_B = drawn_B[:, None], jnp.ones(B, jnp.int32)
        num_accepted_B, is_spoilt_B = jnp.zeros(B, jnp.int32), jnp.zeros(B, bool)
    else:
        assert rule is not None, "drafts are judged"
        record = verify(
            logits_BTV, draft, inputs.sampling, inputs.history, inputs.num_output_B, rule
        )
        drawn_BT, num_drawn_B = record.drawn_BT, record.num_drawn_B
        num_accepted_B, is_spoilt_B = record.num_accepted_B, record.is_spoilt_B
    logprobs = None
    if num_logprobs is not None:
        scored = score_tokens(logits_BTV.reshape(B * T, -1), drawn_BT.reshape(-1), num_logprobs)
        logprobs = jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), scored)
    return Drawn(
        pools=pools,
        tokens_BT=drawn_BT,
        num_tokens_B=jnp.where(inputs.takes_part_B, num_drawn_B, 0),
        hidden_BTD=hidden_BTD,
        logprobs=logprobs,
        num_draft_B=draft.num_draft_B,
        num_accepted_B=num_accepted_B,
        is_spoilt_B=is_spoilt_B & inputs.takes_part_B,
    )


def draw_shortest(
    speculation: Speculation,
    pools: KVPools,
    draft: Draft,
    pass_over: Callable[[KVPools, Draft | None], Drawn],
) -> Drawn:
    """`pass_over` as few tokens as the longest draft allows, padded to J + 1."""
    J = speculation.max_num_draft_tokens

    def of_length(length: int, pools: KVPools) -> Drawn:
        q_BJV = None if draft.q_BJV is None else draft.q_BJV[:, :length]
        cut = Draft(draft.tokens_BJ[:, :length], jnp.minimum(draft.num_draft_B, length), q_BJV)
        drawn = pass_over(pools, cut if length else None)

        def pad(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, J - length), *((0, 0),) * (x.ndim - 2)))

        return drawn._replace(
            tokens_BT=pad(drawn.tokens_BT),
            hidden_BTD=pad(drawn.hidden_BTD),
            logprobs=jax.tree.map(pad, drawn.logprobs),
        )

    longest = jnp.max(draft.num_draft_B)
    drawn = _zeros(jax.eval_shape(lambda: of_length(0, pools)))._replace(pools=pools)
    shorter = -1
    for length in speculation.pass_lengths:
        # Loops of no turn or one: under `cond` XLA copies KV pools.
        turns = ((longest > shorter) & (longest <= length)).astype(jnp.int32)
        drawn = lax.fori_loop(0, turns, lambda _, drawn, n=length: of_length(n, drawn.pools), drawn)
        shorter = length
    return drawn


def learn(
    speculation: Speculation,
    extra: SpeculationParams,
    drafting: Drafting,
    inputs: RoundInputs,
    drawn: Drawn,
    num_emitted_B: Array,
) -> Drafting:
    """What is remembered of a round."""
    num_known_B = inputs.start_B + 1
    verified = Verified(drawn.hidden_BTD, num_emitted_B, num_known_B + num_emitted_B)
    counted = (drawn.num_draft_B, drawn.num_accepted_B, inputs.takes_part_B)
    return dataclasses.replace(
        drafting,
        proposer=speculation.proposer.observe(extra.proposer, drafting.proposer, verified),
        controller=speculation.controller.update(drafting.controller, *counted),
        hidden_BD=last_hidden(drafting.hidden_BD, drawn.hidden_BTD, num_emitted_B),
        is_spoilt_B=jnp.where(inputs.takes_part_B, drawn.is_spoilt_B, drafting.is_spoilt_B),
        telemetry=record_round(
            drafting.telemetry, inputs.sampling.temperature_B, num_known_B, *counted
        ),
    )


def last_hidden(old_BD: Array, hidden_BTD: Array, num_B: Array) -> Array:
    """The hidden states at place num - 1 of T, the old ones where num is 0."""
    place_B11 = jnp.maximum(num_B - 1, 0)[:, None, None]
    new_BD = jnp.take_along_axis(hidden_BTD, place_B11, axis=1)[:, 0]
    return jnp.where((num_B > 0)[:, None], new_BD.astype(old_BD.dtype), old_BD)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
