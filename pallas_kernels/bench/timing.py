"""How long does a call take on a GPU? Kernel times, cold caches, the median of rotated inputs."""

import itertools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.cost import nbytes

SAMPLES = 15
# Inputs rotate through copies that together exceed the level 2 cache this many times; the small
# model's smallest call needs 570 of them.
CACHE_MULTIPLE = 4
MAX_COPIES = 1024


def copies_of(arguments: tuple, l2_bytes: int) -> list[tuple]:
    """Copies of a call's arrays, enough that each is out of the cache when its turn comes again."""
    size = sum(nbytes(leaf) for leaf in jax.tree.leaves(arguments))
    number = num_copies(size, l2_bytes)
    duplicate = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    return [arguments, *(duplicate(arguments) for _ in range(number - 1))]


def num_copies(size: int, l2_bytes: int) -> int:
    """How many copies of `size` bytes exceed the cache CACHE_MULTIPLE times; at least 2."""
    return min(MAX_COPIES, max(2, -(-CACHE_MULTIPLE * l2_bytes // max(size, 1))))


def seconds(function: Callable, copies: list[tuple]) -> float:
    """The median time of function(*arguments) on the device, over rotated arguments.

    The times are those of its kernels as the GPU's own counters (CUPTI) report them, without gaps
    between kernels. Where CUPTI is missing: wall time of back-to-back calls, launch gaps included.
    """
    jax.block_until_ready(function(*copies[0]))
    turns = itertools.islice(itertools.cycle(copies), SAMPLES)
    try:
        from jax.experimental.mosaic.gpu.profiler import measure

        times = [measure(function)(*arguments)[1] for arguments in turns]
        assert all(t is not None for t in times)
        return statistics.median(times) / 1e3  # type: ignore[type-var]
    except (ImportError, RuntimeError, AssertionError):
        return _wall_seconds(function, copies)


def _wall_seconds(function: Callable, copies: list[tuple]) -> float:
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        outputs = [function(*arguments) for arguments in copies]
        jax.block_until_ready(outputs)
        samples.append((time.perf_counter() - start) / len(copies))
    return statistics.median(samples)


def bandwidth() -> float:
    """Bytes a second this device sustains reading and writing: the best of three 1 GiB sweeps."""
    sweep = jax.jit(lambda x: x + 1)
    array = jnp.zeros(2**29, jnp.bfloat16)
    best = min(seconds(sweep, [(array,)]) for _ in range(3))
    return 2 * array.nbytes / best
