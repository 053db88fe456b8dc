"""How long does one call of `schedule` take? python tests/scheduler/bench_schedule.py

Prints the median of calls on a busy table, donated as the engine donates it, on one core where the
process is bound to one (taskset -c 0).
"""

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.scheduler import (
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="deadline")
    arguments = parser.parse_args()
    config = SchedulerConfig(
        num_blocks=arguments.blocks, max_num_rows=arguments.rows, max_num_seqs=arguments.rows // 2,
        max_num_batched_tokens=2048, max_model_len=8192,
    )  # fmt: skip
    M = config.max_blocks_per_row
    rng = np.random.default_rng(0)

    planned = jax.jit(
        functools.partial(schedule, urgency=POLICIES[arguments.policy]), donate_argnums=0
    )
    submitted = jax.jit(submit, donate_argnums=0)
    aborted = jax.jit(abort, donate_argnums=0)

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

    state = init_scheduler(config)
    times, next_id = {"schedule": [], "commit": [], "submit": []}, 0
    for step in range(arguments.steps):
        now = np.float32(step * 0.05)
        requests = init_requests(4, M)
        present = rng.random(4) < 0.4
        ids = np.where(present, next_id + np.arange(4), -1).astype(np.int32)
        next_id += 4
        num_prompt = rng.integers(100, 6000, 4).astype(np.int32)
        hashes = rng.integers(1, 2**32, (4, M, 2), np.uint32)
        shared = rng.random(4) < 0.3
        hashes[shared, :60] = np.arange(1, 121, dtype=np.uint32).reshape(60, 2)
        full = num_prompt // np.where(num_prompt > 4000, 8, 16)
        hashes[np.arange(M) >= full[:, None]] = 0
        requests = dataclasses.replace(
            requests, request_id_N=ids, num_prompt_N=num_prompt,
            max_tokens_N=rng.integers(10, 1000, 4).astype(np.int32), hash_NM2=hashes,
            arrival_time_N=np.full(4, now), ttft_target_N=np.full(4, 5.0, np.float32),
            tpot_target_N=np.full(4, 0.1, np.float32),
        )  # fmt: skip
        requests = jax.device_put(requests)
        gone = jnp.asarray([rng.integers(next_id) if rng.random() < 0.3 else -1], jnp.int32)
        state = jax.block_until_ready(aborted(state, gone))
        start = time.perf_counter()
        state, _, _ = jax.block_until_ready(submitted(state, requests))
        times["submit"].append(time.perf_counter() - start)
        start = time.perf_counter()
        state, plan = jax.block_until_ready(planned(state, now))
        times["schedule"].append(time.perf_counter() - start)
        start = time.perf_counter()
        state = jax.block_until_ready(carried_out(state, plan, now))
        times["commit"].append(time.perf_counter() - start)
    print(f"jax {jax.__version__}, {arguments.rows} rows, {arguments.blocks} blocks, width {M}")
    for name, seconds in times.items():
        seconds = sorted(seconds[arguments.steps // 4 :])
        print(
            f"{name:10s} median {statistics.median(seconds) * 1e6:7.0f} us, "
            f"90% {seconds[int(len(seconds) * 0.9)] * 1e6:7.0f} us, max {seconds[-1] * 1e6:7.0f} us"
        )
    print(
        {f.name: float(getattr(state.counters, f.name)) for f in dataclasses.fields(state.counters)}
    )
    print("running", int(state.is_running_R.sum()), "free blocks", int(state.pool.num_free))


if __name__ == "__main__":
    main()
