"""What would an engine do with the scheduler's plans? A pure toy that checks what it reads.

Each KV entry of the toy is the token it stands for, so that after any history of sharing, copying,
preempting and migrating, every row can be compared with what it should hold.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.cache.hashing import initial_hash, prompt_hashes
from helios_jax.cache.masked import get_any, masked_set
from helios_jax.scheduler import (
    FINISHED,
    Requests,
    SchedulerConfig,
    SchedulerState,
    abort,
    advance,
    check_invariants,
    commit,
    grow,
    hash_outputs,
    init_scheduler,
    is_wide_prompt,
    schedule,
    submit,
)

CONFIG = SchedulerConfig(
    num_blocks=24,
    max_num_rows=8,
    max_model_len=40,
    max_num_seqs=4,
    max_num_batched_tokens=10,
    narrow_block_tokens=4,
    wide_block_tokens=2,
    kv_watermark=14,
    num_draft_tokens=2,
    max_rounds=2,
    max_preemptions=2,
    max_skips=4,
    aging_seconds=60.0,
    headroom=0.05,
)
R, M, S = CONFIG.max_num_rows, CONFIG.max_blocks_per_row, CONFIG.max_model_len
NARROW, WIDE, DRAFTS = 4, 2, CONFIG.num_draft_tokens
# Added to the entries that a wide row computes; what a rejected draft token leaves.
WIDE_ENTRY, GARBAGE = 1 << 24, -7
NUM_FAMILIES = 4


class World(NamedTuple):
    """entries_PT: the KV pool; tokens_RS: all tokens of each row, those to come included; age_R:
    steps since submission; next_id: of the next request."""

    state: SchedulerState
    entries_PT: Array
    tokens_RS: Array
    age_R: Array
    next_id: Array
    now: Array


class Report(NamedTuple):
    """What one step showed; counts are int32 scalars, the rest bools that must all hold."""

    is_consistent: Array
    is_content_right: Array
    is_first_round_granted: Array
    has_progressed: Array
    is_plan_right: Array
    max_age: Array
    num_copies: Array
    num_aborted: Array
    num_finished: Array


def init_world() -> World:
    return World(
        state=init_scheduler(CONFIG),
        entries_PT=jnp.full((CONFIG.num_blocks, NARROW), GARBAGE, jnp.int32),
        tokens_RS=jnp.zeros((R, S), jnp.int32),
        age_R=jnp.zeros(R, jnp.int32),
        next_id=jnp.int32(0),
        now=jnp.float32(0),
    )


def draw_requests(world: World, key: Array, rate: float, num_requests: int = 2):
    """Random requests: prompts begin with tokens of one of few families, then go their own way."""
    keys = jax.random.split(key, 8)
    shape = (num_requests,)
    present = jax.random.uniform(keys[0], shape) < rate
    ids = jnp.where(present, world.next_id + jnp.cumsum(present) - 1, -1)
    num_prompt = jax.random.randint(keys[1], shape, 1, 29)
    # One in six may ask for more than the model or a small pool holds.
    is_long = jax.random.uniform(keys[2], shape) < 1 / 6
    room = jnp.where(is_long, S - num_prompt, jnp.minimum(S - num_prompt, 12))
    max_tokens = 1 + (jax.random.uniform(keys[3], shape) * room).astype(jnp.int32)
    family = jax.random.randint(keys[4], shape, 0, NUM_FAMILIES)
    forks_at = jax.random.randint(keys[5], shape, 0, 29)
    position = jnp.arange(S)
    own = 1000 + 64 * ids[:, None] + position
    tokens = jnp.where(position < forks_at[:, None], 64 * family[:, None] + position, own)
    ttft = jax.random.choice(keys[6], jnp.asarray([2.0, 20.0, jnp.inf]), shape)

    def hashes(tokens_S: Array, num_prompt: Array) -> Array:
        narrow = prompt_hashes(tokens_S, num_prompt, NARROW, initial_hash(0))
        wide = prompt_hashes(tokens_S, num_prompt, WIDE, initial_hash(1))
        narrow = jnp.pad(narrow, ((0, M - narrow.shape[0]), (0, 0)))
        return jnp.where(is_wide_prompt(world.state, num_prompt), wide, narrow)

    requests = Requests(
        request_id_N=ids,
        num_prompt_N=num_prompt,
        max_tokens_N=max_tokens,
        priority_N=jax.random.randint(keys[7], shape, 0, 3).astype(jnp.float32),
        arrival_time_N=jnp.full(shape, world.now),
        deadline_N=world.now + 5 * ttft,
        ttft_target_N=ttft,
        tpot_target_N=jnp.full(shape, 2.0),
        hash_NM2=jax.vmap(hashes)(tokens, num_prompt),
    )
    return requests, tokens


def step(world: World, key: Array, urgency, rate=0.3, abort_rate=0.02) -> tuple[World, Report]:
    """One step of the toy engine under random load."""
    keys = jax.random.split(key, 5)
    requests, tokens_NS = draw_requests(world, keys[0], rate)
    state, row_N, _ = submit(world.state, requests)
    tokens_RS = masked_set(world.tokens_RS, row_N, tokens_NS, row_N >= 0)
    age_R = masked_set(world.age_R, row_N, 0, row_N >= 0)
    next_id = world.next_id + jnp.sum(requests.request_id_N >= 0)
    target = jax.random.randint(keys[1], (1,), jnp.maximum(next_id - R, 0), next_id + 1)
    target = jnp.where(jax.random.uniform(keys[2]) < abort_rate, target, -1)
    num_live = _num_live(state)
    state = abort(state, target)
    num_aborted = num_live - _num_live(state)

    state, plan = schedule(state, world.now, urgency)
    is_consistent = check_invariants(state)
    entries_PT = _copy(world.entries_PT, plan)
    entries_PT = _migrate(entries_PT, plan)
    counts_R = jnp.where(plan.chunk_rows_R >= 0, plan.chunk_counts_R, 0)
    chunk_R = jnp.maximum(plan.chunk_rows_R, 0)
    is_plan_right = _is_plan_right(state, plan, chunk_R, counts_R)

    entries_PT = _write(
        state, entries_PT, tokens_RS, plan.chunk_rows_R, plan.chunk_starts_R, counts_R, counts_R
    )
    completes_R = counts_R == state.num_pending_R[chunk_R]
    # A chunk may end a row: one token may be all that it asked for, or the first may be a stop.
    stop_R = jax.random.uniform(keys[3], (R,)) < 0.02
    before = jnp.sum(state.status_R == FINISHED)
    state = advance(
        state, plan.chunk_rows_R, counts_R, completes_R.astype(jnp.int32),
        stop_R & completes_R, world.now + 0.5,
    )  # fmt: skip
    is_first_round_granted = jnp.bool_(True)
    for i in range(CONFIG.max_rounds):
        round_keys = jax.random.split(jax.random.fold_in(keys[4], i), 2)
        rows = plan.decode_rows_R
        alive = (rows >= 0) & (get_any(state.status_R, rows) != FINISHED)
        rows = jnp.where(alive, rows, -1)
        start = get_any(state.num_computed_R, rows)
        state, granted = grow(state, rows, start + 1 + DRAFTS, 2)
        if i == 0:
            is_first_round_granted = jnp.all(granted == alive)
        rows = jnp.where(granted, rows, -1)
        room = get_any(state.max_known_R - state.num_known_R, rows)
        sampled = jax.random.randint(round_keys[0], (R,), 1, DRAFTS + 2)
        sampled = jnp.where(granted, jnp.minimum(sampled, room), 0)
        written = jnp.where(granted, jnp.minimum(1 + DRAFTS, room), 0)
        entries_PT = _write(state, entries_PT, tokens_RS, rows, start, sampled, written)
        stop = jax.random.uniform(round_keys[1], (R,)) < 0.03
        state = advance(state, rows, sampled, sampled, stop & granted, world.now + 0.9)

    num_finished = jnp.sum(state.status_R == FINISHED) - before
    is_content_right = _is_content_right(state, entries_PT, tokens_RS)
    state = commit(hash_outputs(state, tokens_RS))
    is_live_R = state.is_waiting_R | state.is_running_R
    age_R = jnp.where(is_live_R, age_R + 1, 0)
    moved = (plan.num_decode > 0) | (plan.num_chunk_tokens > 0) | jnp.any(plan.is_preempted_R)
    report = Report(
        is_consistent=is_consistent & check_invariants(state),
        is_content_right=is_content_right,
        is_first_round_granted=is_first_round_granted,
        has_progressed=moved | (plan.num_waiting == 0),
        is_plan_right=is_plan_right,
        max_age=jnp.max(age_R),
        num_copies=plan.copies.num_copies,
        num_aborted=num_aborted,
        num_finished=num_finished,
    )
    return World(state, entries_PT, tokens_RS, age_R, next_id, world.now + 1), report


def with_limits(world: World, num_blocks, max_num_seqs, kv_watermark) -> World:
    """The world with other limits, as values: the pool's surplus blocks are taken off the stack."""
    state = world.state
    pool = dataclasses.replace(
        state.pool, num_blocks=num_blocks, num_ready=num_blocks,
        ready_P=jnp.roll(state.pool.ready_P, num_blocks - CONFIG.num_blocks),
    )  # fmt: skip
    limits = dataclasses.replace(state.limits, max_num_seqs=max_num_seqs, kv_watermark=kv_watermark)
    return world._replace(state=dataclasses.replace(state, pool=pool, limits=limits))


def _num_live(state: SchedulerState) -> Array:
    return jnp.sum(state.is_waiting_R | state.is_running_R)


def _copy(entries_PT: Array, plan) -> Array:
    copied = plan.copies.sources_B >= 0
    values = get_any(entries_PT, plan.copies.sources_B)
    return masked_set(entries_PT, plan.copies.destinations_B, values, copied)


def _migrate(entries_PT: Array, plan) -> Array:
    """Source i -> targets 2i and 2i + 1; the unused half of a wide block keeps its old content."""
    halves = get_any(entries_PT, plan.migration_sources_M).reshape(2 * M, WIDE)
    is_source = jnp.repeat(plan.migration_sources_M >= 0, 2)[:M]
    moved = (plan.migration_targets_M >= 0) & is_source
    targets = jnp.where(moved, plan.migration_targets_M, CONFIG.num_blocks)
    return entries_PT.at[targets, :WIDE].set(halves[:M], mode="drop")


def _write(state, entries_PT, tokens_RS, rows_R, starts_R, num_right_R, num_written_R) -> Array:
    """Writes entries for positions starts .. starts + num_written; garbage after num_right."""
    offset = jnp.arange(CONFIG.max_num_batched_tokens)
    row = jnp.maximum(rows_R, 0)[:, None]
    position = starts_R[:, None] + offset
    is_wide = state.is_wide_R[row]
    length = jnp.where(is_wide, WIDE, NARROW)
    block = state.block_table_RM.at[row, position // length].get(mode="fill", fill_value=-1)
    token = tokens_RS.at[row, position].get(mode="clip") + jnp.where(is_wide, WIDE_ENTRY, 0)
    token = jnp.where(offset < num_right_R[:, None], token, GARBAGE)
    writes = (rows_R >= 0)[:, None] & (offset < num_written_R[:, None])
    block = jnp.where(writes & (block >= 0), block, CONFIG.num_blocks)
    return entries_PT.at[block, position % length].set(token, mode="drop")


def _is_content_right(state, entries_PT, tokens_RS) -> Array:
    """Every computed entry of every running row is that row's token, at its precision.

    Of a row that migrated (wide without hashes) the precision of an entry may be either.
    """
    position = jnp.arange(S)
    length = jnp.where(state.is_wide_R, WIDE, NARROW)[:, None]
    row = jnp.arange(R)[:, None]
    block = state.block_table_RM.at[row, position // length].get(mode="fill", fill_value=-1)
    entry = jnp.where(block >= 0, entries_PT[block, position % length], GARBAGE)
    is_wide_entry = entry >= WIDE_ENTRY
    is_right = (entry - jnp.where(is_wide_entry, WIDE_ENTRY, 0)) == tokens_RS
    may_be_mixed = (state.is_wide_R & (state.num_hashed_R == 0))[:, None]
    is_right &= may_be_mixed | (is_wide_entry == state.is_wide_R[:, None])
    counts = state.is_running_R[:, None] & (position < state.num_computed_R[:, None])
    return jnp.all(is_right | ~counts)


def _is_plan_right(state, plan, chunk_R, counts_R) -> Array:
    """The plan keeps the budget and names running rows with room for what they are to write."""
    named = plan.chunk_rows_R >= 0
    length = jnp.where(state.is_wide_R[chunk_R], WIDE, NARROW)
    room = state.num_blocks_R[chunk_R] * length
    decode = plan.decode_rows_R
    checks = [
        plan.num_chunk_tokens + plan.num_decode <= CONFIG.max_num_batched_tokens,
        jnp.sum(counts_R) == plan.num_chunk_tokens,
        jnp.all(~named | state.is_running_R[chunk_R]),
        jnp.all(~named | (plan.chunk_starts_R == state.num_computed_R[chunk_R])),
        jnp.all(~named | (counts_R <= state.num_pending_R[chunk_R])),
        jnp.all(~named | (plan.chunk_starts_R + counts_R <= room)),
        jnp.all((decode < 0) | (get_any(state.num_pending_R, decode) == 1)),
        jnp.sum(decode >= 0) == plan.num_decode,
        ~jnp.any(plan.is_admitted_R & plan.is_preempted_R),
    ]
    return jnp.all(jnp.stack(checks))
