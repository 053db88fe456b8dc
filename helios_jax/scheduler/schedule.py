"""Who gets blocks and tokens in the next step? state -> (state, plan), one pure function.

In this order:

1. *Make room.* Running rows must be able to take the blocks of this step's chunk and of one decode
   round. If they cannot, the least urgent are preempted until the others can, so the most urgent
   always goes on.
2. *Admit* waiting rows, the most urgent first, while the chunk has tokens left for them. One is
   admitted if a slot is free and the free blocks cover all its known tokens, those that running
   rows still lack for theirs, and some headroom. Otherwise it preempts strictly less urgent rows if
   that can help. Otherwise it is skipped: rows behind may be admitted, until it is one that must
   go first; that holds up the line.
3. *Compose*: the chunk goes to prefilling rows by urgency, decoding rows are listed, blocks are
   taken for the chunk, for a copy of a shared block that is about to be written, and for one row
   that passed the watermark and migrates to the wide precision. If narrow and wide blocks can
   never be held at once, the row is preempted and prefills again in the wide precision instead.

Bounds. A row is aged once it has waited `aging_seconds`, was skipped in `max_skips` steps or
preempted `max_preemptions` times. The oldest aged row goes first whatever the policy says, and so
do, behind it by age, those aged for another reason than waiting. It is never preempted except to
migrate, runs at the latest after as many calls as MAX_ACTIONS allows to push the others out, and
then gets tokens in every call. So a row with k older ones in the table finishes within
`aging_seconds`, that time, and (k + 1) times what one row alone takes: known tokens / chunk +
max_tokens + a few calls.

Cost: a few dozen operations on R rows; for every row considered for admission (at most MAX_ACTIONS)
the blocks found for it, and for every row preempted the blocks that it held; O(blocks taken).
Neither the pool nor the table of blocks is copied. Measured by tests/scheduler/bench_schedule.py
with 256 rows and 16,384 blocks, a call from Python, donated, on one core of AMD Zen 5 (the other
busy), jax 0.12.0.1, in microseconds; the longest calls are hiccups of the machine, `submit` has
them too:

    table                                                median   90%   99%   longest
    steady                                                  383   491   684     2,716
    full: 176 rows wait, nothing fits                       440   511   807     2,822
    full, with 4,096 blocks                                 415   490   675     1,097
    full, with 4,096 blocks, 171 preemptions in 800 calls   377   457 1,317     2,841

(deadline; the last by priority, since deadline preempts less.)

Where nothing is to be admitted, called in a loop inside one program: 82, 101, 99 and 87.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from helios_jax.cache import blocks, prefix
from helios_jax.cache.masked import after, get_any, masked_set, ranks
from helios_jax.scheduler import pace
from helios_jax.scheduler.commit import add_blocks
from helios_jax.scheduler.order import Order, age_rows, is_less_urgent, order_rows
from helios_jax.scheduler.release import preempt_row, read_row
from helios_jax.scheduler.state import NO_LIMIT, RUNNING, SchedulerState
from helios_jax.scheduler.urgency import deadline

T = TypeVar("T")
Urgency = Callable[[SchedulerState, Array], Array]

# Rows preempted for others, admitted or skipped in one call; and those skipped.
MAX_ACTIONS = 24
MAX_SKIPPED = 4


class Plan(NamedTuple):
    """What the step must do; lists are -1 padded, the most urgent row first.

    First the copies, then the migration, then the chunk, then the rounds: the blocks copied from
    may be written by what comes later.

    Attributes:
      num_decode, decode_rows_R: running rows with one known token to compute.
      num_chunk_rows, num_chunk_tokens: size of the chunk.
      chunk_rows_R, chunk_starts_R, chunk_counts_R: prefilling rows, first position, and number of
        tokens; blocks are taken. A row whose last known token is in the chunk samples the next.
      copies: blocks to copy as they are.
      migrating_row: -1 if none.
      migration_sources_M, migration_targets_M: its narrow blocks, and the wide ones that it has
        now: source i goes to targets i * ratio .. (i + 1) * ratio - 1, ratio = narrow / wide tokens
        per block. Of the last source only the computed tokens count.
      is_admitted_R, is_preempted_R: rows that changed their status.
      num_waiting: rows that still wait. A step whose rounds finish a row ends early if there are.
    """

    num_decode: Array
    decode_rows_R: Array
    num_chunk_rows: Array
    num_chunk_tokens: Array
    chunk_rows_R: Array
    chunk_starts_R: Array
    chunk_counts_R: Array
    copies: blocks.Copies
    migrating_row: Array
    migration_sources_M: Array
    migration_targets_M: Array
    is_admitted_R: Array
    is_preempted_R: Array
    num_waiting: Array


def schedule(
    state: SchedulerState, now: Array, urgency: Urgency = deadline
) -> tuple[SchedulerState, Plan]:
    """Decides the next step.

    The caller carries out the plan, calls `commit.grow` before each round and `commit.advance`
    after the chunk and after each round, and ends the step with `commit.commit`.

    Args:
      now: float32 seconds.
      urgency: a policy, see `scheduler.urgency`.
    """
    state = dataclasses.replace(state, pace=pace.observe(state.pace, now))
    state = age_rows(state, now)
    order = order_rows(state, urgency(state, now))
    before_R = state.is_running_R
    state = _make_room(state, order, now)
    state, is_admitted_R = _admit(state, order, now, before_R & ~state.is_running_R)
    is_preempted_R = before_R & ~state.is_running_R
    state, plan = _compose(state, order, is_admitted_R, is_preempted_R)
    begun = pace.begin(state.pace, now, plan.num_chunk_tokens, plan.num_waiting)
    return dataclasses.replace(state, pace=begun), plan


class _Demand(NamedTuple):
    """What running rows would do and need in the next step.

    is_decoding_R, count_R: rows that decode; chunk tokens of those that prefill.
    migrating_row: row that should migrate, -1 if none.
    needed_R: blocks to take for it, a migrating row's wide ones included.
    """

    is_decoding_R: Array
    count_R: Array
    migrating_row: Array
    needed_R: Array


def _has_crossed(state: SchedulerState) -> Array:
    past_R = state.num_known_R > state.limits.kv_watermark
    return state.is_running_R & ~state.is_wide_R & past_R


def _demand(state: SchedulerState, order: Order) -> _Demand:
    crossed_R = _has_crossed(state)
    first_rank = jnp.min(jnp.where(crossed_R, order.rank_R, NO_LIMIT))
    migrates_R = crossed_R & (order.rank_R == first_rank)
    pending_R = state.num_pending_R
    is_decoding_R = state.is_running_R & (pending_R == 1) & (~crossed_R | migrates_R)
    prefills_R = state.is_running_R & (pending_R > 1)
    budget = _chunk_budget(state)
    # By urgency: what those before have not used up.
    pending_O = jnp.where(prefills_R, pending_R, 0)[order.rows_R]
    left_O = budget - (jnp.cumsum(pending_O) - pending_O)
    count_R = jnp.clip(left_O, 0, pending_O)[order.rank_R]
    round_R = jnp.where(is_decoding_R, state.limits.round_tokens, count_R)
    target_R = jnp.minimum(state.num_computed_R + round_R, state.max_known_R - 1)
    wanted_R = state.num_blocks_for(target_R, state.is_wide_R | migrates_R)
    held_R = jnp.where(migrates_R, 0, state.num_blocks_R)
    needed_R = jnp.where(state.is_running_R, jnp.maximum(wanted_R - held_R, 0), 0)
    migrating_row = jnp.where(jnp.any(migrates_R), jnp.argmax(migrates_R), -1)
    return _Demand(is_decoding_R, count_R, migrating_row, needed_R)


def _chunk_budget(state: SchedulerState) -> Array:
    is_decoding_R = state.is_running_R & (state.num_pending_R == 1)
    num_decoding = jnp.sum(is_decoding_R, dtype=jnp.int32)
    limit = jnp.minimum(state.limits.max_num_batched_tokens, state.max_chunk_tokens)
    return jnp.maximum(limit - num_decoding, 1)


def _make_room(state: SchedulerState, order: Order, now: Array) -> SchedulerState:
    def victim(state: SchedulerState) -> Array:
        demand = _demand(state, order)
        row = demand.migrating_row
        both = get_any(state.num_blocks_R, row) + get_any(demand.needed_R, row)
        cannot_migrate = (row >= 0) & (both > state.pool.num_blocks)
        is_short = jnp.sum(demand.needed_R) > state.pool.num_free
        last = jnp.argmax(jnp.where(state.is_running_R, order.rank_R, -1)).astype(jnp.int32)
        return jnp.where(cannot_migrate, row, jnp.where(is_short, last, -1))

    def step(carry):
        state, row = carry
        state = preempt_row(state, row, now)
        return state, victim(state)

    state, _ = lax.while_loop(lambda carry: carry[1] >= 0, step, (state, victim(state)))
    return state


class _Admission(NamedTuple):
    """State of the admission loop: rows considered in this call are out of it from then on."""

    state: SchedulerState
    is_out_R: Array
    is_admitted_R: Array
    is_skipped_R: Array
    num_actions: Array
    is_closed: Array


def _admit(
    state: SchedulerState, order: Order, now: Array, is_out_R: Array
) -> tuple[SchedulerState, Array]:
    """Step 2 of the module; rows `is_out_R` were preempted in this call and must wait."""

    def is_open(loop: _Admission) -> Array:
        is_candidate_R = loop.state.is_waiting_R & ~loop.is_out_R
        return ~loop.is_closed & (loop.num_actions < MAX_ACTIONS) & jnp.any(is_candidate_R)

    none_R = jnp.zeros_like(is_out_R)
    loop = _Admission(state, is_out_R, none_R, none_R, jnp.int32(0), jnp.bool_(False))
    loop = lax.while_loop(is_open, lambda loop: _consider(loop, order, now), loop)
    last_admitted = jnp.max(jnp.where(loop.is_admitted_R, order.rank_R, -1))
    was_passed_R = loop.is_skipped_R & (order.rank_R < last_admitted)
    state = loop.state
    state = dataclasses.replace(state, num_skips_R=state.num_skips_R + was_passed_R)
    return state, loop.is_admitted_R


def _consider(loop: _Admission, order: Order, now: Array) -> _Admission:
    """Admits the most urgent waiting row, or preempts one row for it, or skips it."""
    state = loop.state
    limits, running_R = state.limits, state.is_running_R
    rank_R = order.rank_R
    row = jnp.argmin(jnp.where(state.is_waiting_R & ~loop.is_out_R, rank_R, NO_LIMIT))

    ahead_R = running_R & (state.num_pending_R > 1) & (rank_R < rank_R[row])
    tokens_ahead = jnp.sum(jnp.where(ahead_R, state.num_pending_R, 0))
    is_served = tokens_ahead < _chunk_budget(state)

    hits_M = _find_prefix(state, row)
    num_hits = jnp.sum(hits_M >= 0, dtype=jnp.int32)
    held_by_others_M = get_any(state.pool.refcount_P, hits_M) > 0
    num_revived = jnp.sum((hits_M >= 0) & ~held_by_others_M, dtype=jnp.int32)
    block_tokens = jnp.where(state.is_wide_R[row], *state.block_tokens[::-1])
    num_known = state.num_known_R[row]
    # The last known token is computed in any case, to sample from: into a copy of its block if
    # others hold that.
    is_whole = (num_hits > 0) & (num_hits * block_tokens >= num_known)
    copies = is_whole & held_by_others_M[jnp.maximum(num_hits - 1, 0)]
    num_blocks = state.num_blocks_for(num_known, state.is_wide_R[row])
    needed = num_blocks - num_hits + num_revived + copies

    lacking_R = jnp.where(running_R, _num_lacking(state), 0)
    headroom = jnp.where(jnp.any(running_R), limits.headroom_blocks, 0)
    supply = state.pool.num_free - jnp.sum(lacking_R) - headroom
    has_slot = jnp.sum(running_R) < limits.max_num_seqs
    victims_R = running_R & is_less_urgent(order, row)
    can_preempt = jnp.any(victims_R)
    gained = jnp.sum(jnp.where(victims_R, state.num_blocks_R + lacking_R, 0))
    gained += jnp.where(jnp.any(running_R & ~victims_R), 0, headroom)

    admits = is_served & has_slot & (needed <= supply)
    preempts = is_served & ~admits & can_preempt & (needed <= supply + gained)
    skips = is_served & ~admits & ~preempts
    victim = jnp.argmax(jnp.where(victims_R, rank_R, -1))
    state = _once(preempts, lambda state: preempt_row(state, victim, now), state)
    state = _admit_row(state, row, hits_M, num_hits, now, admits)

    is_skipped_R = masked_set(loop.is_skipped_R, row, True, skips)
    holds_line = skips & (~has_slot | (order.level_R[row] == 0))
    is_full = jnp.sum(is_skipped_R) >= MAX_SKIPPED
    is_out_R = masked_set(loop.is_out_R, row, True, admits | skips)
    return _Admission(
        state=state,
        is_out_R=masked_set(is_out_R, victim, True, preempts),
        is_admitted_R=masked_set(loop.is_admitted_R, row, True, admits),
        is_skipped_R=is_skipped_R,
        num_actions=loop.num_actions + 1,
        is_closed=~is_served | holds_line | is_full,
    )


def _find_prefix(state: SchedulerState, row: Array) -> Array:
    is_hashed_M = jnp.arange(state.block_table_RM.shape[1]) < state.num_hashed_R[row]
    hash_M2 = jnp.where(is_hashed_M[:, None], state.hash_RM2[row], jnp.uint32(0))
    return prefix.lookup_prefix(state.pool, hash_M2)


def _num_lacking(state: SchedulerState) -> Array:
    """Blocks that each row still has to take for its known tokens and its next round."""
    is_wide_R, crossed_R = state.is_wide_R, _has_crossed(state)
    next_R = jnp.minimum(state.num_known_R + state.limits.round_tokens - 1, state.max_known_R - 1)
    target_R = jnp.where(state.num_pending_R == 1, next_R, state.num_known_R)
    wanted_R = state.num_blocks_for(target_R, is_wide_R | crossed_R)
    lacking_R = jnp.maximum(wanted_R - jnp.where(crossed_R, 0, state.num_blocks_R), 0)
    _, is_shared_R = _written_block(state)
    return lacking_R + is_shared_R


def _written_block(state: SchedulerState) -> tuple[Array, Array]:
    """The block each running row writes to next, -1 if not taken yet; whether others hold it."""
    place_R = _written_place(state)
    row_R = jnp.arange(place_R.shape[0])
    is_taken_R = state.is_running_R & (place_R < state.num_blocks_R)
    block_R = jnp.where(is_taken_R, state.block_table_RM.at[row_R, place_R].get(mode="clip"), -1)
    return block_R, is_taken_R & (get_any(state.pool.refcount_P, block_R) > 1)


def _written_place(state: SchedulerState) -> Array:
    return state.num_computed_R // jnp.where(state.is_wide_R, *state.block_tokens[::-1])


def _admit_row(
    state: SchedulerState, row: Array, hits_M: Array, num_hits: Array, now: Array, enabled: Array
) -> SchedulerState:
    block_tokens = jnp.where(state.is_wide_R[row], *state.block_tokens[::-1])
    num_computed = jnp.minimum(num_hits * block_tokens, state.num_known_R[row] - 1)
    counters = state.counters
    waited = now - state.waiting_since_R[row]
    return dataclasses.replace(
        state,
        pool=blocks.share(state.pool, jnp.where(enabled, hits_M, -1)),
        status_R=masked_set(state.status_R, row, RUNNING, enabled),
        num_computed_R=masked_set(state.num_computed_R, row, num_computed, enabled),
        num_blocks_R=masked_set(state.num_blocks_R, row, num_hits, enabled),
        num_published_R=masked_set(state.num_published_R, row, num_hits, enabled),
        block_table_RM=masked_set(state.block_table_RM, row, hits_M, enabled),
        counters=dataclasses.replace(
            counters,
            num_admissions=counters.num_admissions + enabled,
            num_prefix_hit_tokens=counters.num_prefix_hit_tokens
            + jnp.where(enabled, num_computed, 0),
            queue_seconds=counters.queue_seconds + jnp.where(enabled, waited, 0.0),
        ),
    )


def _compose(
    state: SchedulerState, order: Order, is_admitted_R: Array, is_preempted_R: Array
) -> tuple[SchedulerState, Plan]:
    """Step 3 of the module."""
    R, M = state.block_table_RM.shape
    demand = _demand(state, order)
    written_R, is_shared_R = _written_block(state)
    # Rounds take blocks without loops; those that the step may need are made ready now.
    in_rounds_R = jnp.where(demand.is_decoding_R, state.limits.step_tokens, 0)
    last_R = jnp.minimum(state.num_computed_R + in_rounds_R, state.max_known_R - 1)
    growth_R = state.num_blocks_for(last_R, state.is_wide_R) - state.num_blocks_R
    growth_R = jnp.where(demand.is_decoding_R, growth_R, 0)
    num_ready = jnp.sum(jnp.maximum(demand.needed_R, growth_R) + is_shared_R)
    pool = blocks.refill(state.pool, num_ready)

    pool, writable_R, copies = blocks.copy_on_write(pool, written_R)
    row_R, place_R = jnp.arange(R), _written_place(state)
    table_place_R = jnp.where(writable_R >= 0, place_R, M)
    state = dataclasses.replace(
        state,
        pool=pool,
        block_table_RM=state.block_table_RM.at[row_R, table_place_R].set(writable_R, mode="drop"),
        num_published_R=jnp.minimum(state.num_published_R, place_R),
    )
    state, migration = _migrate(state, demand)

    count_O = demand.count_R[order.rows_R]
    needed_O = jnp.where(count_O > 0, demand.needed_R[order.rows_R], 0)
    max_blocks = state.max_chunk_tokens // min(state.block_tokens) + R
    pool, taken = blocks.allocate(state.pool, needed_O, max_blocks)
    state = add_blocks(dataclasses.replace(state, pool=pool), order.rows_R, taken)

    can_write_R = (written_R < 0) | (writable_R >= 0)
    count_O = jnp.where(taken.granted_B & can_write_R[order.rows_R], count_O, 0)
    decodes_R = demand.is_decoding_R & can_write_R & ~_has_crossed(state)
    num_decode, decode_rows_R = _compact(decodes_R[order.rows_R], order.rows_R)
    in_chunk_O = count_O > 0
    num_chunk_rows, chunk_rows_R = _compact(in_chunk_O, order.rows_R)
    _, chunk_starts_R = _compact(in_chunk_O, state.num_computed_R[order.rows_R])
    _, chunk_counts_R = _compact(in_chunk_O, count_O)
    plan = Plan(
        num_decode=num_decode,
        decode_rows_R=decode_rows_R,
        num_chunk_rows=num_chunk_rows,
        num_chunk_tokens=jnp.sum(count_O),
        chunk_rows_R=chunk_rows_R,
        chunk_starts_R=chunk_starts_R,
        chunk_counts_R=chunk_counts_R,
        copies=copies,
        migrating_row=migration.row,
        migration_sources_M=migration.sources_M,
        migration_targets_M=migration.targets_M,
        is_admitted_R=is_admitted_R & state.is_running_R,
        is_preempted_R=is_preempted_R,
        num_waiting=jnp.sum(state.is_waiting_R, dtype=jnp.int32),
    )
    return state, plan


class _Migration(NamedTuple):
    """row: -1 if none; sources_M, targets_M: -1 padded."""

    row: Array
    sources_M: Array
    targets_M: Array


def _migrate(state: SchedulerState, demand: _Demand) -> tuple[SchedulerState, _Migration]:
    """Exchanges the migrating row's narrow blocks for wide ones, all or none.

    The narrow ones are free from here on: the plan copies before anything else is written.
    """
    M = state.block_table_RM.shape[1]
    row = jnp.maximum(demand.migrating_row, 0)
    needed = demand.needed_R[row]
    fits = (demand.migrating_row >= 0) & (needed <= state.pool.num_ready)

    def exchange(carry: tuple[SchedulerState, _Migration]) -> tuple[SchedulerState, _Migration]:
        state, _ = carry
        counters = state.counters
        sources_M = read_row(state, row)
        pool, taken = blocks.allocate(state.pool, needed[None], M)
        state = dataclasses.replace(
            state,
            pool=blocks.release(pool, sources_M),
            block_table_RM=state.block_table_RM.at[row].set(after(sources_M, taken.blocks_A)),
            num_blocks_R=state.num_blocks_R.at[row].set(needed),
            is_wide_R=state.is_wide_R.at[row].set(True),
            num_hashed_R=state.num_hashed_R.at[row].set(0),
            counters=dataclasses.replace(counters, num_migrations=counters.num_migrations + 1),
        )
        return state, _Migration(demand.migrating_row, sources_M, taken.blocks_A)

    nowhere_M = jnp.full(M, -1, jnp.int32)
    none = _Migration(jnp.full_like(demand.migrating_row, -1), nowhere_M, nowhere_M)
    return _once(fits, exchange, (state, none))


def _once(condition: Array, function: Callable[[T], T], value: T) -> T:
    """function(value) where `condition`, else value; a loop of one turn or none.

    Unlike both sides of a `cond` under vmap, it costs nothing while no lane needs it.
    """

    def turn(carry):
        return jnp.bool_(False), function(carry[1])

    return lax.while_loop(lambda carry: carry[0], turn, (condition, value))[1]


def _compact(mask_O: Array, values_O: Array) -> tuple[Array, Array]:
    """Their number, and the values where `mask_O` first, then -1."""
    place_O = jnp.where(mask_O, ranks(mask_O), np.iinfo(np.int32).max)
    listed_R = jnp.full_like(values_O, -1).at[place_O].set(values_O, mode="drop")
    return jnp.sum(mask_O, dtype=jnp.int32), listed_R
