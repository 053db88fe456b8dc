"""What is XLA told when it compiles a model's programs, per platform?"""

import functools
from collections.abc import Callable
from typing import Any

import jax

COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # The vector width that int8 rows want (1.4x).
    "cpu": {"xla_cpu_prefer_vector_width": "512"},
    # XLA takes the pools that a kernel writes to for new ones, finds the memory too small for one
    # pair a layer, and computes things repeatedly to save some: in a round of 32 layers and 64 rows
    # that was 121 of 752 launches. With ten times the memory it sees no need.
    "gpu": {"xla_gpu_memory_limit_slop_factor": 1000},
}


def jit(function: Callable, **options: Any) -> Callable:
    """`jax.jit` with the options of the platform, which is chosen by the first call, not before.

    For functions of a module: importing it must not begin a backend.
    """

    @functools.cache
    def compiled() -> Callable:
        platform = jax.default_backend()
        return jax.jit(function, compiler_options=COMPILER_OPTIONS.get(platform), **options)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return compiled()(*args)

    return call
