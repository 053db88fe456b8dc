"""Which urgency function does a name stand for? A shipped one, or anybody's `module:function`."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from helios_jax.config import require
from helios_jax.scheduler.schedule import Urgency
from helios_jax.scheduler.state import SchedulerConfig, init_scheduler
from helios_jax.scheduler.urgency import POLICIES


def find_policy(name: str) -> Urgency:
    """The policy called `name`: a key of `urgency.POLICIES`, or "module:function" to import.

    The function is traced once on an empty table, so that one that cannot work fails here.

    Raises:
      ValueError: no such name, module or function, or it does not give a float32 per row.
    """
    if name in POLICIES:
        return POLICIES[name]
    module_name, colon, function_name = name.partition(":")
    require(
        bool(module_name and colon and function_name),
        f"policy={name!r}: must be one of {', '.join(POLICIES)}, or module:function",
    )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"policy={name!r}: cannot import {module_name!r} ({error}); it must be installed or "
            "lie on PYTHONPATH"
        ) from error
    policy: Any = module
    for part in function_name.split("."):
        policy = getattr(policy, part, None)
    require(callable(policy), f"policy={name!r}: {module_name!r} has no function {function_name!r}")
    _check(name, policy)
    return policy


def _check(name: str, policy: Urgency) -> None:
    config = SchedulerConfig(num_blocks=1, max_num_rows=5, max_num_seqs=1)
    state = jax.eval_shape(lambda: init_scheduler(config))
    now = jax.ShapeDtypeStruct((), jnp.float32)
    rule = f"policy={name!r}: urgency(state, now) must return float32 [rows]"
    try:
        values = jax.eval_shape(policy, state, now)
    except Exception as error:
        raise ValueError(f"{rule}; it raised {type(error).__name__}: {error}") from error
    shape, dtype = getattr(values, "shape", None), getattr(values, "dtype", None)
    require(
        shape == (config.max_num_rows,) and dtype == jnp.float32,
        f"{rule}; for {config.max_num_rows} rows it returned {dtype} {shape}",
    )
