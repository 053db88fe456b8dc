"""How long does one call of `schedule` take? python tests/scheduler/bench_schedule.py

Prints percentiles of calls, donated as the engine donates them, on one core where the process is
bound to one (taskset -c 0), in three states of a table: steady (prompts as fast as they can be
prefilled), full (more than that: every row of the table waits or runs, nothing fits), and churn
(likewise, with few blocks, so that rows are preempted all the time). "In a loop" is the mean of
calls within one compiled program, one after the other on the last of these states.
"""

import argparse
import dataclasses
import functools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.scheduler import (
    Requests,
    SchedulerConfig,
    abort,
    advance,
    commit,
    grow,
    init_requests,
    init_scheduler,
    schedule,
    submit,
)
from helios_jax.scheduler.urgency import POLICIES


class Case(NamedTuple):
    """What arrives in a step of 50 ms, and the share of the blocks that there are."""

    num_arrivals: float
    max_prompt: int
    max_output: int
    share: float


LOOP_CALLS = 200
CASES = {
    "steady": Case(0.9, 4000, 200, 1.0),
    "full": Case(1.6, 6000, 1000, 1.0),
    "churn": Case(1.6, 2000, 1000, 0.25),
}


@functools.partial(jax.jit, donate_argnums=0)
def carried_out(state, plan, now):
    chunk = plan.chunk_rows_R
    counts = jnp.maximum(plan.chunk_counts_R, 0)
    completes = counts == state.num_pending_R[jnp.maximum(chunk, 0)]
    nobody = jnp.zeros_like(completes)
    state = advance(state, chunk, counts, completes.astype(jnp.int32), nobody, now)
    rows = plan.decode_rows_R
    start = state.num_computed_R[jnp.maximum(rows, 0)]
    state, granted = grow(state, rows, start + 1, 1)
    rows = jnp.where(granted, rows, -1)
    return commit(advance(state, rows, granted * 1, granted * 1, nobody, now))


def draw_requests(rng, case: Case, next_id: int, now: float, width: int) -> Requests:
    """Up to 4; a third share their first 60 blocks."""
    present = rng.random(4) < case.num_arrivals / 4
    num_prompt = rng.integers(100, case.max_prompt, 4).astype(np.int32)
    hashes = rng.integers(1, 2**32, (4, width, 2), np.uint32)
    shared = rng.random(4) < 0.3
    hashes[shared, :60] = np.arange(1, 121, dtype=np.uint32).reshape(60, 2)
    full = num_prompt // np.where(num_prompt > 4000, 8, 16)
    hashes[np.arange(width) >= full[:, None]] = 0
    requests = dataclasses.replace(
        init_requests(4, width),
        request_id_N=np.where(present, next_id + np.arange(4), -1).astype(np.int32),
        num_prompt_N=num_prompt,
        max_tokens_N=rng.integers(10, case.max_output, 4).astype(np.int32),
        hash_NM2=hashes,
        arrival_time_N=np.full(4, now, np.float32),
        ttft_target_N=np.full(4, 5.0, np.float32),
        tpot_target_N=np.full(4, 0.1, np.float32),
        priority_N=rng.integers(0, 5, 4).astype(np.float32),
    )
    return jax.device_put(requests)


def timed(times: list[float], function, *arguments):
    start = time.perf_counter()
    result = jax.block_until_ready(function(*arguments))
    times.append(time.perf_counter() - start)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="deadline")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    arguments = parser.parse_args()
    policy = POLICIES[arguments.policy]
    planned = jax.jit(functools.partial(schedule, urgency=policy), donate_argnums=0)

    @functools.partial(jax.jit, donate_argnums=0)
    def looped(state, now):
        return jax.lax.fori_loop(
            0, LOOP_CALLS, lambda i, state: schedule(state, now + 0.05 * i, policy)[0], state
        )

    submitted = jax.jit(submit, donate_argnums=0)
    aborted = jax.jit(abort, donate_argnums=0)
    print(f"jax {jax.__version__}, {arguments.rows} rows, {arguments.policy}")
    for name in arguments.cases:
        case = CASES[name]
        config = SchedulerConfig(
            num_blocks=int(arguments.blocks * case.share), max_num_rows=arguments.rows,
            max_num_seqs=arguments.rows // 2, max_num_batched_tokens=2048, max_model_len=8192,
            aging_seconds=1e9,
        )  # fmt: skip
        state, rng = init_scheduler(config), np.random.default_rng(0)
        times = {"schedule": [], "submit": [], "carry out": []}
        for step in range(arguments.steps):
            now = np.float32(step * 0.05)
            requests = draw_requests(rng, case, 4 * step, now, config.max_blocks_per_row)
            gone = rng.integers(4 * step + 1) if rng.random() < 0.3 else -1
            state = aborted(state, jnp.asarray([gone], jnp.int32))
            state, _, _ = timed(times["submit"], submitted, state, requests)
            state, plan = timed(times["schedule"], planned, state, now)
            state = timed(times["carry out"], carried_out, state, plan, now)
        running, waiting = int(state.is_running_R.sum()), int(state.is_waiting_R.sum())
        counts = {
            field.name: int(getattr(state.counters, field.name))
            for field in dataclasses.fields(state.counters)
        }
        looping = []
        for _ in range(2):  # the first compiles
            state = timed(looping, looped, state, np.float32(arguments.steps * 0.05))
        print(f"{name}: {config.num_blocks} blocks, {int(state.pool.num_free)} free at the end, ")
        print(f"    {running} rows run, {waiting} wait; {counts}")
        for part, seconds in times.items():
            late = np.array(seconds[arguments.steps // 4 :]) * 1e6
            median, high, highest = np.quantile(late, [0.5, 0.9, 0.99])
            print(
                f"    {part:10s} median {median:5.0f} us, 90% {high:5.0f}, 99% {highest:5.0f}, "
                f"max {late.max():5.0f}"
            )
        print(f"    schedule in a loop: {looping[-1] / LOOP_CALLS * 1e6:.0f} us")


if __name__ == "__main__":
    main()
