"""Does the scheduler decide as documented, case by case?"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax import scheduler
from helios_jax.cache.blocks import init_block_pool
from helios_jax.scheduler import urgency

# The cases differ in values alone, so that they share one compiled program per policy.
CONFIG = scheduler.SchedulerConfig(
    num_blocks=800, max_num_rows=8, max_model_len=9000, max_num_seqs=4,
    max_num_batched_tokens=2048, kv_watermark=0, headroom=0.0,
)  # fmt: skip
DEFAULTS = {"num_blocks": 40, "max_num_batched_tokens": 64, "kv_watermark": math.inf}
schedule = jax.jit(scheduler.schedule, static_argnums=2)
submit_arrays = jax.jit(scheduler.submit)
advance = jax.jit(scheduler.advance)
grow = jax.jit(scheduler.grow, static_argnums=3)
commit = jax.jit(scheduler.commit)
abort = jax.jit(scheduler.abort)
is_consistent = jax.jit(scheduler.check_invariants)


def start(**changes):
    """An empty state whose limits are those of CONFIG with DEFAULTS and `changes`."""
    config = dataclasses.replace(CONFIG, **DEFAULTS | changes)
    return dataclasses.replace(
        scheduler.init_scheduler(CONFIG),
        pool=init_block_pool(config.num_blocks, CONFIG.num_blocks),
        limits=scheduler.init_limits(config),
    )


def submit(state, request_id, num_prompt, max_tokens=8, contents=None, **fields):
    """Submits one request; `contents` names its full blocks. Returns state, row, answer."""
    requests = scheduler.init_requests(1, state.block_table_RM.shape[1])
    hashes = np.array(requests.hash_NM2)
    for i, content in enumerate(contents or []):
        hashes[0, i] = (content, 1)
    values = {
        "request_id_N": request_id, "num_prompt_N": num_prompt, "max_tokens_N": max_tokens, **fields
    }  # fmt: skip
    arrays = {k: np.full_like(getattr(requests, k), v) for k, v in values.items()}
    requests = dataclasses.replace(requests, hash_NM2=hashes, **arrays)
    state, row, answer = submit_arrays(state, requests)
    return state, int(row[0]), int(answer[0])


def run_step(state, now=0.0, policy=urgency.fcfs, rounds=1):
    """Plans a step and does what an engine would; returns state and plan."""
    state, plan = schedule(state, jnp.float32(now), policy)
    assert bool(is_consistent(state))
    counts = jnp.maximum(plan.chunk_counts_R, 0)
    completes = (counts == state.num_pending_R[plan.chunk_rows_R]) & (plan.chunk_rows_R >= 0)
    nobody = jnp.zeros_like(completes)
    state = advance(state, plan.chunk_rows_R, counts, completes * 1, nobody, jnp.float32(now))
    for _ in range(rounds):
        rows = plan.decode_rows_R
        state, granted = grow(state, rows, state.num_computed_R[rows] + 1, 1)
        rows = jnp.where(granted & (state.status_R[rows] == scheduler.RUNNING), rows, -1)
        state = advance(state, rows, (rows >= 0) * 1, (rows >= 0) * 1, nobody, jnp.float32(now))
    state = commit(state)
    assert bool(is_consistent(state))
    return state, plan


def named(rows) -> list[int]:
    return [int(row) for row in rows if row >= 0]


def statuses(state) -> list[int]:
    return state.status_R.tolist()


def test_a_request_runs_to_its_end_and_gives_everything_back():
    state, row, answer = submit(start(), 7, num_prompt=100, max_tokens=20)
    assert (row, answer) == (0, scheduler.ACCEPTED)
    chunks = []
    for step in range(40):
        state, plan = run_step(state, now=float(step))
        chunks += named(plan.chunk_counts_R)
    assert chunks == [64, 36]  # two chunks under the budget of 64
    assert statuses(state)[0] == scheduler.FINISHED
    assert int(state.num_output_R[0]) == 20
    assert float(state.first_token_time_R[0]) == 1.0
    assert int(state.pool.num_free) == 40


def test_a_block_is_taken_when_its_first_token_exists():
    state, row, _ = submit(start(), 0, num_prompt=15, max_tokens=20)
    held = []
    for _ in range(5):
        state, _ = run_step(state)
        held.append(int(state.num_blocks_R[0]))
    # Entries: 15 (prompt), 16, then the 17th opens the second block.
    assert held == [1, 1, 2, 2, 2]


@pytest.mark.parametrize("num_prompt, max_tokens, answer", [
    (80, 1, scheduler.NEVER_FITS),
    (64, 1, scheduler.ACCEPTED),
    (64, 2, scheduler.NEVER_FITS),
    (60, 5, scheduler.ACCEPTED),
])  # fmt: skip
def test_what_can_never_fit_is_refused_at_submission(num_prompt, max_tokens, answer):
    """4 blocks of 16 tokens; the last token's KV entry is never needed."""
    state, row, got = submit(start(num_blocks=4), 0, num_prompt, max_tokens)
    assert got == answer
    assert (row == -1) == (answer == scheduler.NEVER_FITS)
    assert int(state.counters.num_refused) == (answer == scheduler.NEVER_FITS)


def test_the_largest_request_that_fits_finishes():
    state, row, _ = submit(start(num_blocks=4), 0, num_prompt=60, max_tokens=5)
    for _ in range(6):
        state, _ = run_step(state)
    assert statuses(state)[0] == scheduler.FINISHED


def test_a_full_table_refuses_for_now():
    state = start()
    for i in range(8):
        state, _, answer = submit(state, i, 5)
        assert answer == scheduler.ACCEPTED
    state, row, answer = submit(state, 8, 5)
    assert (row, answer) == (-1, scheduler.TABLE_FULL)
    state = abort(state, jnp.asarray([2]))
    state, row, answer = submit(state, 8, 5)
    assert (row, answer) == (2, scheduler.ACCEPTED)


def test_more_urgent_requests_preempt_when_all_slots_are_taken():
    state, low, _ = submit(start(max_num_seqs=1), 0, num_prompt=10, max_tokens=50, priority_N=5)
    state, _ = run_step(state, policy=urgency.priority)
    state, equal, _ = submit(state, 1, num_prompt=10, priority_N=5)
    state, plan = run_step(state, policy=urgency.priority)
    assert not plan.is_preempted_R.any()  # equal priority waits
    state, high, _ = submit(state, 2, num_prompt=10, priority_N=1)
    state, plan = run_step(state, policy=urgency.priority)
    assert named(plan.chunk_rows_R) == [high]
    assert bool(plan.is_preempted_R[low]) and bool(plan.is_admitted_R[high])
    assert statuses(state)[low] == scheduler.WAITING


def test_more_urgent_requests_preempt_for_memory_but_not_in_vain():
    state = start(num_blocks=10)
    state, old, _ = submit(state, 0, 100, max_tokens=40, priority_N=1)
    state, young, _ = submit(state, 1, 40, max_tokens=40, priority_N=9)
    for _ in range(4):
        state, _ = run_step(state, policy=urgency.priority)
    assert statuses(state)[:2] == [scheduler.RUNNING] * 2
    # 5 blocks: only the youngest may be pushed out for it, and its 3 do not suffice.
    state, middle, _ = submit(state, 2, 80, priority_N=5)
    state, plan = run_step(state, policy=urgency.priority)
    assert not plan.is_preempted_R.any() and statuses(state)[middle] == scheduler.WAITING
    # 2 blocks: suffices.
    state, small, _ = submit(state, 3, 30, priority_N=5)
    state, plan = run_step(state, policy=urgency.priority)
    assert named(jnp.flatnonzero(plan.is_preempted_R)) == [young]
    assert statuses(state)[small] == scheduler.RUNNING


def test_growth_preempts_the_least_urgent_and_the_most_urgent_goes_on():
    state = start(num_blocks=5, max_num_batched_tokens=128)
    for i in range(2):
        state, _, _ = submit(state, i, 30, max_tokens=40)
    outputs = []
    for _ in range(60):
        state, plan = run_step(state)
        outputs.append(state.num_output_R.tolist()[:2])
    assert int(state.counters.num_preemptions) > 0
    assert int(state.num_preemptions_R[0]) == 0  # the older one never
    assert all(b[0] > a[0] for a, b in zip(outputs, outputs[1:], strict=False) if a[0] < 40)
    for _ in range(60):
        state, _ = run_step(state)
    assert state.num_output_R.tolist()[:2] == [40, 40]


def test_chunked_prefill_keeps_short_requests_quick():
    """An 8k prompt in front of five short ones, and the same without it."""

    def steps_to_first_tokens(is_long_first):
        state = start(num_blocks=800, max_num_batched_tokens=512, max_num_seqs=8)
        if is_long_first:
            state, _, _ = submit(state, 100, 8000, ttft_target_N=10.0)
            state, _ = run_step(state, now=0.0, policy=urgency.deadline)
        rows = []
        for i in range(5):
            state, row, _ = submit(state, i, 60, ttft_target_N=1.0, arrival_time_N=0.1)
            rows.append(row)
        for step in range(1, 20):
            state, _ = run_step(state, now=0.1 * step, policy=urgency.deadline)
            if bool(jnp.all(state.num_output_R[jnp.asarray(rows)] > 0)):
                return step
        raise AssertionError("no first tokens")

    assert steps_to_first_tokens(True) <= 2 * steps_to_first_tokens(False)


def test_a_request_that_does_not_fit_is_passed_for_a_bounded_time():
    state = start(num_blocks=20, max_num_batched_tokens=256, max_skips=3)
    state, _, _ = submit(state, 0, 150, max_tokens=100)  # holds 10 to 16 blocks
    state, _ = run_step(state)
    state, big, _ = submit(state, 1, 190, max_tokens=2)  # 12 blocks: must wait
    passed = 0
    for i in range(12):
        state, row, answer = submit(state, 2 + i, 16, max_tokens=2)
        state, plan = run_step(state)
        if bool(plan.is_admitted_R[big]):
            break
        passed += bool(plan.is_admitted_R[row])
    # Aged, it goes before the one that runs, which gives way and finishes later.
    assert passed == 3 and bool(plan.is_admitted_R[big]) and bool(plan.is_preempted_R[0])
    for _ in range(150):
        state, _ = run_step(state)
    assert scheduler.WAITING not in statuses(state) and scheduler.RUNNING not in statuses(state)


def test_waiting_long_goes_first():
    state = start(max_num_seqs=1, aging_seconds=10.0)
    state, old, _ = submit(state, 0, 10, max_tokens=3, priority_N=9)
    admitted_at = None
    for now in range(30):  # a stream of more urgent requests
        state, _, _ = submit(state, 1 + now, 10, max_tokens=3, priority_N=0, arrival_time_N=now)
        state, plan = run_step(state, now=float(now), policy=urgency.priority)
        if admitted_at is None and bool(plan.is_admitted_R[old]):
            admitted_at = now
    assert admitted_at == 10


def test_a_row_preempted_too_often_is_not_any_more():
    state = start(max_num_seqs=1, max_preemptions=2)
    state, low, _ = submit(state, 0, 10, max_tokens=30, priority_N=9)
    preempted_at = []
    for step in range(40):
        if step % 4 == 1:  # two steps of work every four
            state, _, _ = submit(state, 1 + step, 10, max_tokens=2, priority_N=0)
        state, plan = run_step(state, policy=urgency.priority)
        if bool(plan.is_preempted_R[low]):
            preempted_at.append(step)
        if statuses(state)[low] == scheduler.FINISHED:
            break
    assert preempted_at == [1, 5] and statuses(state)[low] == scheduler.FINISHED


def test_a_common_prefix_is_computed_once():
    state = start(num_blocks=300, max_num_batched_tokens=2048)
    contents = list(range(1, 126))
    state, _, _ = submit(state, 0, 2000, contents=contents)
    state, plan = run_step(state)
    assert int(plan.num_chunk_tokens) == 2000
    state, row, _ = submit(state, 1, 2016, contents=[*contents, 500])
    state, plan = run_step(state)
    assert named(plan.chunk_rows_R) == [row]
    assert int(plan.num_chunk_tokens) == 16  # 0.8% of 2016
    assert int(state.counters.num_prefix_hit_tokens) == 2000
    assert state.block_table_RM[row, :125].tolist() == state.block_table_RM[0, :125].tolist()


def test_a_whole_cached_prompt_writes_to_a_copy_of_its_last_block():
    state, _, _ = submit(start(), 0, 32, max_tokens=30, contents=[1, 2])
    state, _ = run_step(state)
    state, row, _ = submit(state, 1, 32, max_tokens=30, contents=[1, 2])
    state, plan = run_step(state)
    first, second = state.block_table_RM[0, 1], state.block_table_RM[row, 1]
    assert int(plan.copies.num_copies) == 1
    assert plan.copies.sources_B[0] == first and plan.copies.destinations_B[0] == second
    assert first != second
    assert row in named(plan.decode_rows_R) and int(state.num_output_R[row]) == 1
    # With no other holder the block is written in place.
    state = abort(state, jnp.asarray([0, 1]))
    state, row, _ = submit(state, 2, 32, contents=[1, 2])
    state, plan = run_step(state)
    assert int(plan.copies.num_copies) == 0 and row in named(plan.decode_rows_R)


def test_prompts_past_the_watermark_start_wide_and_growing_rows_migrate():
    state = start(kv_watermark=40, num_blocks=60)
    state, narrow, _ = submit(state, 0, 38, max_tokens=20, contents=[1, 2])
    state, wide, _ = submit(state, 1, 41, max_tokens=4)
    for _ in range(3):
        state, plan = run_step(state)
    assert state.is_wide_R.tolist()[:2] == [False, True]
    assert state.num_blocks_R.tolist()[:2] == [3, 6]
    sources = named(state.block_table_RM[narrow])
    while int(plan.migrating_row) < 0:
        state, plan = run_step(state)
    # 41 tokens are known, 40 computed: 3 narrow blocks become 6 wide ones, for entry 41 too.
    assert int(plan.migrating_row) == narrow
    assert named(plan.migration_sources_M) == sources
    assert named(plan.migration_targets_M) == named(state.block_table_RM[narrow])
    assert len(named(plan.migration_targets_M)) == 6
    assert bool(state.is_wide_R[narrow]) and int(state.counters.num_migrations) == 1
    for _ in range(20):
        state, _ = run_step(state)
    assert int(state.num_output_R[narrow]) == 20 and int(state.counters.num_preemptions) == 0


def test_a_row_that_cannot_hold_both_precisions_prefills_again():
    state = start(kv_watermark=40, num_blocks=8)
    state, row, answer = submit(state, 0, 38, max_tokens=20)
    assert answer == scheduler.ACCEPTED
    for _ in range(40):
        state, plan = run_step(state)
        assert int(plan.migrating_row) == -1
    assert int(state.num_output_R[row]) == 20 and bool(state.is_wide_R[row])
    assert int(state.counters.num_preemptions) == 1
    assert int(state.counters.num_recomputed_tokens) == 40


def test_a_row_that_cannot_hold_both_precisions_pushes_out_nobody():
    state = start(kv_watermark=40, num_blocks=8)
    state, first, _ = submit(state, 0, 38, max_tokens=5)  # 3 narrow blocks, then 6 wide ones
    state, second, _ = submit(state, 1, 5, max_tokens=10)  # one
    for _ in range(12):
        state, _ = run_step(state)
    assert state.num_output_R.tolist()[:2] == [5, 10]
    assert state.num_preemptions_R.tolist()[:2] == [1, 0]


def test_a_row_past_the_watermark_pauses_until_the_next_plan():
    state = start(kv_watermark=40, num_blocks=60)
    state, row, _ = submit(state, 0, 38, max_tokens=20)
    state, _ = run_step(state)
    state, _ = run_step(state, rounds=8)
    assert int(state.num_known_R[row]) == 41  # two rounds, not eight


@pytest.mark.parametrize("kv_watermark, is_wide", [(0, True), (math.inf, False)])
def test_the_watermark_may_be_zero_or_infinite(kv_watermark, is_wide):
    state, row, _ = submit(start(kv_watermark=kv_watermark, num_blocks=80), 0, 30, max_tokens=100)
    for _ in range(101):
        state, _ = run_step(state)
    assert bool(state.is_wide_R[row]) == is_wide and int(state.num_output_R[row]) == 100
    assert int(state.counters.num_migrations) == int(state.counters.num_preemptions) == 0


def test_an_abort_frees_everything_at_once():
    state, row, _ = submit(start(), 5, 100)
    state, waiting, _ = submit(state, 6, 592)
    state, _ = run_step(state)
    assert int(state.pool.num_free) < 40
    state = abort(state, jnp.asarray([5, 6, -1, 77]))
    assert int(state.pool.num_free) == 40 and bool(is_consistent(state))
    assert statuses(state)[:2] == [scheduler.FINISHED] * 2


def test_limits_are_values():
    """Fewer slots, another watermark: no other program."""
    state = start()
    schedule(state, jnp.float32(0), urgency.fcfs)
    before = schedule._cache_size()
    limits = scheduler.init_limits(
        dataclasses.replace(CONFIG, max_num_seqs=1, kv_watermark=7, max_num_batched_tokens=9)
    )
    schedule(dataclasses.replace(state, limits=limits), jnp.float32(0), urgency.fcfs)
    assert schedule._cache_size() == before


def test_rebasing_changes_nothing_but_the_clock():
    state, _, _ = submit(start(), 0, 10, arrival_time_N=1000.0, ttft_target_N=4.0)
    moved = scheduler.rebase(state, 1000.0)
    here = urgency.deadline(state, jnp.float32(1001.0))
    there = urgency.deadline(moved, jnp.float32(1.0))
    assert float(here[0]) == float(there[0]) == -3.0
    state, _ = run_step(state, now=1002.0)
    assert float(scheduler.rebase(state, 1000.0).pace.last_time) == 2.0


@pytest.mark.parametrize("changes, match", [
    ({"max_num_seqs": 9}, "max_num_rows=8"),
    ({"max_num_batched_tokens": 3}, "raise it or lower max_num_seqs"),
    ({"wide_block_tokens": 5}, "must divide narrow_block_tokens=16"),
    ({"kv_watermark": -1}, "kv_watermark=-1"),
    ({"headroom": 1.0}, "headroom=1.0"),
    ({"num_blocks": 0}, "num_blocks=0"),
    ({"aging_seconds": 0.0}, "aging_seconds=0.0"),
    ({"num_draft_tokens": -1}, "num_draft_tokens=-1"),
    ({"prefill_tokens_per_second": 0.0}, "prefill_tokens_per_second=0.0"),
])  # fmt: skip
def test_configurations_that_cannot_work_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CONFIG, **changes)
