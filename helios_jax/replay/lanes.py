"""How do many schedules of one trace compare? Simulations side by side under vmap.

Policies, loads, pool sizes, watermarks and seeds are array values of a lane, so all lanes are one
compiled program. The loops are taken out of the vmap: a loop whose condition differs from lane to
lane copies the whole state in every turn. So does the scheduler's own, which is why the tables are
cut to what the trace can fill.

32 lanes (two policies, four loads, two pools, two seeds) of 150 requests of Azure's conv trace,
Llama 3 8B on an H100, up to 64 rows: 6.1 s, 37 s with tables of 1,024 rows and 8,192 tokens;
compiling takes 15 s (one core of AMD EPYC, jax 0.12.0.1, the other core busy).
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from helios_jax.cache.blocks import init_block_pool
from helios_jax.config import require
from helios_jax.replay.simulate import (
    Outcome,
    StepSeconds,
    Targets,
    begin,
    enter,
    goes_on,
    is_due,
    outcome_of,
    request_table,
    run_event,
)
from helios_jax.replay.traces import Trace
from helios_jax.scheduler import SchedulerConfig, Urgency, init_limits, init_scheduler


@dataclass(frozen=True)
class Lane:
    """One simulation of a sweep.

    Attributes:
      policy: its name in the sweep's policies.
      load: how many times as fast as recorded requests arrive.
      num_blocks: of the KV pool; None for the configuration's.
      kv_watermark: likewise.
      seed: of the targets.
    """

    policy: str
    load: float = 1.0
    num_blocks: int | None = None
    kv_watermark: float | None = None
    seed: int = 0


def simulate_lanes(
    trace: Trace,
    lanes: Sequence[Lane],
    policies: dict[str, Urgency],
    deal: Callable[[int], Targets],
    config: SchedulerConfig,
    step_seconds: StepSeconds,
    *,
    overlaps: bool = False,
) -> list[Outcome]:
    """Serves the trace once for each lane; see `compile_lanes`."""
    return compile_lanes(trace, lanes, policies, deal, config, step_seconds, overlaps=overlaps)()


def compile_lanes(
    trace: Trace,
    lanes: Sequence[Lane],
    policies: dict[str, Urgency],
    deal: Callable[[int], Targets],
    config: SchedulerConfig,
    step_seconds: StepSeconds,
    *,
    overlaps: bool = False,
) -> Callable[[], list[Outcome]]:
    """Compiles what serves the trace once for each lane; outcomes are in the lanes' order.

    Args:
      policies: by the names that lanes use.
      deal: targets of a seed.
      config, step_seconds, overlaps: as for `simulate`.

    Raises:
      ValueError: no lanes, a policy that is none of them, or as `simulate`.
    """
    require(len(lanes) > 0, "lanes: must be at least one")
    names = list(policies)
    for lane in lanes:
        require(
            lane.policy in policies,
            f"lane policy={lane.policy!r}: must be one of {', '.join(names)}",
        )
    config = fitted(trace, config)
    configs = [
        dataclasses.replace(
            config,
            num_blocks=lane.num_blocks or config.num_blocks,
            kv_watermark=config.kv_watermark if lane.kv_watermark is None else lane.kv_watermark,
        )
        for lane in lanes
    ]
    # Tables must be wide enough for whoever needs most blocks for the longest request.
    widest = max(configs, key=lambda each: each.max_blocks_per_row)
    capacity = max(each.num_blocks for each in configs)
    shape = init_scheduler(dataclasses.replace(widest, num_blocks=capacity))
    tables = [
        request_table(trace.at_load(lane.load), deal(lane.seed), each)
        for lane, each in zip(lanes, configs, strict=True)
    ]
    states = [
        dataclasses.replace(
            shape,
            pool=init_block_pool(each.num_blocks, capacity),
            limits=init_limits(each),
        )
        for each in configs
    ]
    stack = partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    choice_Z = jnp.asarray([names.index(lane.policy) for lane in lanes])
    arrays = (stack(*states), stack(*tables), choice_Z)
    compiled = _run_lanes.lower(
        *arrays, step_seconds, tuple(policies.values()), config.max_rounds, overlaps
    ).compile()

    def run() -> list[Outcome]:
        outcomes = jax.tree.map(np.asarray, compiled(*arrays))
        number = len(trace)
        return [
            Outcome(
                outcomes.first_token_time_N[z, :number],
                outcomes.finish_time_N[z, :number],
                outcomes.num_events[z],
                jax.tree.map(lambda counts, z=z: counts[z], outcomes.counters),
            )
            for z in range(len(lanes))
        ]

    return run


@partial(jax.jit, static_argnums=(3, 4, 5, 6))
def _run_lanes(states, tables, choice_Z, step_seconds, policies, max_rounds, overlaps) -> Any:
    def run_one(simulation, table, choice):
        def urgency(state, now) -> Array:
            return jnp.stack([policy(state, now) for policy in policies])[choice]

        return run_event(simulation, table, step_seconds, urgency, max_rounds, overlaps)

    def any_goes_on(simulations) -> Array:
        return jnp.any(jax.vmap(goes_on)(simulations, tables))

    def any_is_due(simulations) -> Array:
        return jnp.any(jax.vmap(is_due)(simulations, tables))

    def turn(simulations):
        simulations = lax.while_loop(any_is_due, lambda s: jax.vmap(enter)(s, tables), simulations)
        return jax.vmap(run_one)(simulations, tables, choice_Z)

    start = jax.vmap(begin)(states, tables)
    return outcome_of(lax.while_loop(any_goes_on, turn, start))


def fitted(trace: Trace, config: SchedulerConfig) -> SchedulerConfig:
    """The configuration with a table no larger than this trace can fill.

    No result changes, and under vmap time goes with the table's size.
    """
    longest = int((trace.num_prompt + trace.num_output).max())
    rows = 1 << max(len(trace) - 1, 15).bit_length()
    max_num_rows = min(config.max_num_rows, rows)
    return dataclasses.replace(
        config,
        max_num_rows=max_num_rows,
        max_num_seqs=min(config.max_num_seqs, max_num_rows),
        max_model_len=min(config.max_model_len, longest),
    )


def highest_load(loads: Sequence[float], met: Sequence[float], wanted: float) -> float | None:
    """The load up to which the share `wanted` is met, interpolated; None if not even the lowest.

    Beyond the first load that misses it nothing counts. Where none does it is a lower bound, see
    `is_lower_bound`.
    """
    order = np.argsort(loads)
    load_L, met_L = np.asarray(loads, float)[order], np.asarray(met, float)[order]
    misses = np.flatnonzero(met_L < wanted)
    if len(misses) == 0:
        return float(load_L[-1])
    first = int(misses[0])
    if first == 0:
        return None
    part = (met_L[first - 1] - wanted) / (met_L[first - 1] - met_L[first])
    return float(load_L[first - 1] + part * (load_L[first] - load_L[first - 1]))


def is_lower_bound(highest: float | None, loads: Iterable[float]) -> bool:
    """Whether `highest_load` found no load that misses, so that it may be higher."""
    return highest is not None and math.isclose(highest, max(loads), rel_tol=1e-4)
