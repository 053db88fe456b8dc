"""What do the compiled programs contain: no effects, and no work that grows with the pool?"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax import scheduler
from helios_jax.cache import blocks
from helios_jax.scheduler import urgency

# Sizes that occur nowhere else, so that an array's shape tells whether it is as large as the pool.
CONFIG = scheduler.SchedulerConfig(
    num_blocks=1021, max_num_rows=8, max_model_len=200, max_num_seqs=4, max_num_batched_tokens=32
)
POOL_SIZES = {1021, 8 * 1021, 4096}
# Reading and writing a few elements, and passing the arrays on.
PER_ELEMENT = {"gather", "scatter", "scatter-add", "scatter-max", "scatter_max", "scatter_add"}
PASSING_ON = {"while", "scan", "jit", "pjit", "closed_call", "core_call", "custom_jvp_call"}
NOW = jnp.float32(0)


def abort_one(state):
    return scheduler.abort(state, jnp.asarray([3]))


def grow_all(state):
    rows = jnp.arange(8)
    return scheduler.grow(state, rows, rows, 2)


def advance_all(state):
    rows = jnp.arange(8)
    return scheduler.advance(state, rows, rows, rows, rows > 3, NOW)


def submit_some(state):
    requests = scheduler.init_requests(3, state.block_table_RM.shape[1])
    requests = dataclasses.replace(requests, request_id_N=np.arange(3))
    return scheduler.submit(state, jax.tree.map(jnp.asarray, requests))


def hash_all(state):
    return scheduler.hash_outputs(state, jnp.zeros((8, 200), jnp.int32))


def schedule_by(policy):
    return functools.partial(scheduler.schedule, now=NOW, urgency=policy)


PROGRAMS = {
    **{f"schedule_{name}": schedule_by(policy) for name, policy in urgency.POLICIES.items()},
    "submit": submit_some,
    "abort": abort_one,
    "grow": grow_all,
    "advance": advance_all,
    "hash_outputs": hash_all,
    "commit": scheduler.commit,
}


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (list, tuple)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def pool_sized(variables) -> bool:
    return any(POOL_SIZES & set(getattr(v.aval, "shape", ())) for v in variables)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_no_effects_and_touch_the_pool_element_by_element(name):
    closed = jax.make_jaxpr(PROGRAMS[name])(scheduler.init_scheduler(CONFIG))
    assert not closed.effects
    touching = {
        equation.primitive.name
        for equation in equations(closed.jaxpr)
        if pool_sized([*equation.invars, *equation.outvars])
    }
    assert touching <= PER_ELEMENT | PASSING_ON
    if name not in ("submit", "advance", "hash_outputs"):
        assert touching & PER_ELEMENT  # or the walk found nothing


def test_the_walk_sees_work_that_grows_with_the_pool():
    """The invariant checks are such work, inside loops and outside."""

    def looped(state):
        return jax.lax.fori_loop(
            0, 2, lambda i, ok: ok & blocks.check_invariants(state.pool), jnp.bool_(True)
        )

    closed = jax.make_jaxpr(looped)(scheduler.init_scheduler(CONFIG))
    touching = {e.primitive.name for e in equations(closed.jaxpr) if pool_sized(e.invars)}
    assert touching - PER_ELEMENT - PASSING_ON


@pytest.mark.parametrize("name", ["grow", "advance"])
def test_what_rounds_call_has_no_loops(name):
    """A loop inside a round would cost a synchronisation per iteration on a GPU."""
    closed = jax.make_jaxpr(PROGRAMS[name])(scheduler.init_scheduler(CONFIG))
    names = {equation.primitive.name for equation in equations(closed.jaxpr)}
    assert not names & {"while", "scan", "cond"}


def test_schedule_gives_the_same_under_vmap():
    state = scheduler.init_scheduler(dataclasses.replace(CONFIG, num_blocks=16))
    state, _, _ = submit_some(state)
    alone = jax.jit(scheduler.schedule)(state, NOW)
    pair = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    both = jax.jit(jax.vmap(scheduler.schedule, in_axes=(0, None)))(pair, NOW)
    for one, two in zip(jax.tree.leaves(alone), jax.tree.leaves(both), strict=True):
        assert bool(jnp.all(one == two))


def test_a_fresh_state_can_be_donated():
    leaves = jax.tree.leaves(scheduler.init_scheduler(CONFIG))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("name", ["schedule_fcfs", "abort", "commit"])
def test_programs_copy_neither_table_nor_pool(name):
    """Donated, what a program needs beside its arguments is smaller than the table of blocks."""
    config = scheduler.SchedulerConfig(
        num_blocks=1021, max_num_rows=64, max_model_len=32_768, max_num_seqs=4
    )
    state = jax.eval_shape(lambda: scheduler.init_scheduler(config))
    compiled = jax.jit(PROGRAMS[name], donate_argnums=0).lower(state).compile()
    table = state.block_table_RM
    assert table.size >= 64 * 4096
    assert compiled.memory_analysis().temp_size_in_bytes < table.size * table.dtype.itemsize / 2
