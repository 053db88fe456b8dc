"""How fast can this machine read its memory? The ceiling of a decode step's bandwidth.

Several ways of reading one large array, of which the fastest counts: what no program here has been
seen to exceed. It is a measurement of the machine as it is now, neighbours included.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.bench.machine import num_threads

# Beyond any cache; a GPU's takes a while to be filled.
_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}
_REPEATS = 7


def measure_read_bandwidth(num_bytes: int | None = None) -> dict[str, Any]:
    """Bytes per second of the fastest way, and of each.

    Args:
      num_bytes: of the array; None for what exceeds the platform's caches.

    Returns:
      {bytes_per_second, method, num_bytes, methods: {name: bytes_per_second}}, medians.
    """
    platform = jax.default_backend()
    num_bytes = num_bytes or _BYTES.get(platform, _BYTES["gpu"])
    ways: dict[str, Callable[[], Any]] = {}
    rows = jnp.ones((num_bytes // (4 * 4096), 4096), jnp.float32)
    vector = jnp.ones(4096, jnp.float32)
    dot = jax.jit(lambda a, x: a @ x)
    total = jax.jit(jnp.sum)
    ways["XLA matrix times vector"] = lambda: dot(rows, vector).block_until_ready()
    ways["XLA sum"] = lambda: total(rows).block_until_ready()
    threads = num_threads()
    pool = ThreadPoolExecutor(threads)
    if platform == "cpu":
        parts = np.array_split(np.ones(num_bytes // 8, np.int64), threads)
        # Reductions of numpy let other threads run.
        ways[f"numpy maximum, {threads} threads"] = lambda: list(pool.map(np.max, parts))
    measured = {}
    with pool:
        for name, read in ways.items():
            read()
            times = []
            for _ in range(_REPEATS):
                started = time.perf_counter()
                read()
                times.append(time.perf_counter() - started)
            measured[name] = num_bytes / statistics.median(times)
    best = max(measured, key=lambda name: measured[name])
    return {
        "bytes_per_second": measured[best],
        "method": best,
        "num_bytes": num_bytes,
        "methods": measured,
    }
