"""Does a step take longer where the KV pool is larger? python -m tests.engine.bench_pool

Serves the same requests with a pool of N bytes and of 8 N, several times in turns, and prints the
time of a step: plan, prefill chunks, decode rounds and commit, as the host sees it. Then once more
with decode rounds to which the state is not donated, so that each step copies the pools: unless
that shows, the figures before it mean nothing. Fails where the first grows or the second does not.

    taskset -c 0 python -m tests.engine.bench_pool --megabytes 64
"""

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from helios_jax.engine import Engine, EngineConfig, programs
from helios_jax.model import init_params
from helios_jax.model.forms import serving_form
from helios_jax.sampling import SamplingParams
from tests import tiny

donating_stage = programs.stage
FACTOR = 8
# Another core's work on the same memory shows as several percent.
MOST_GROWTH = 1.2
LEAST_GROWTH_OF_COPIES = 2.0
NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 4, 40, 120


def make_engine(pool_bytes: int, kv_cache_dtype: str) -> Engine:
    """A model so small that little but the pool could take time."""
    config = tiny.config(hidden_size=64, num_layers=4, head_dim=64)
    form = serving_form(config, init_params(config, jax.random.key(0)), "bfloat16")
    options = EngineConfig(
        max_model_len=384, max_num_seqs=NUM_REQUESTS, max_num_rows=1024,
        max_num_batched_tokens=32, max_rounds=4, kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=pool_bytes,
    )  # fmt: skip
    engine = Engine(form, tiny.tokenizer(), model_config=config, config=options, seed=0)
    assert 0.9 * pool_bytes < sum(pool.nbytes for pool in engine._device.state.pools) <= pool_bytes
    return engine


def step_seconds(engine: Engine) -> float:
    """Mean time of a step over a batch of requests."""
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    for i in range(NUM_REQUESTS):
        engine.submit([i] * NUM_PROMPT, params, is_streamed=False)
    number, start = 0, time.perf_counter()
    while engine.has_work:
        engine.step()
        number += 1
    jax.block_until_ready(engine._device.state)
    return (time.perf_counter() - start) / number


def undonated(name: str, platform: str):
    """`programs.stage`, with rounds that leave the state to their caller."""
    if name != "rounds":
        return donating_stage(name, platform)
    function, static = programs._STATIC[name]
    return jax.jit(function, static_argnames=static)


def measure(pool_bytes: int, kv_cache_dtype: str, repeats: int) -> tuple[float, float]:
    """Median milliseconds of a step with the small pool and with the large one."""
    engines = [make_engine(size, kv_cache_dtype) for size in (pool_bytes, FACTOR * pool_bytes)]
    for engine in engines:
        step_seconds(engine)  # compiles
    times = [[step_seconds(engine) for engine in engines] for _ in range(repeats)]
    small, large = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return small, large


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=64, help="MiB of the small pool")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--kv-cache-dtype", default="fp8_e4m3")
    options = parser.parse_args()
    given = (options.megabytes << 20, options.kv_cache_dtype)
    print(f"jax {jax.__version__}, {options.kv_cache_dtype}, {jnp.zeros(0).device.platform}")
    growth = {}
    for what, repeats in (("donated", options.repeats), ("copied", 1)):
        if what == "copied":
            programs.stage = undonated
            for key in [key for key in programs._compiled if key[0] == "rounds"]:
                del programs._compiled[key]
        small, large = measure(*given, repeats)
        growth[what] = large / small
        print(
            f"{what:8} {options.megabytes:5} MiB {small:8.2f} ms a step, "
            f"{FACTOR * options.megabytes:5} MiB {large:8.2f} ms: {large / small:.2f} times"
        )
    errors = []
    if growth["donated"] > MOST_GROWTH:
        errors.append(f"a step takes longer with a larger pool: {growth['donated']:.2f} times")
    if growth["copied"] < LEAST_GROWTH_OF_COPIES:
        errors.append("copies of the pool do not show: take a larger one")
    for error in errors:
        print("error:", error)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
