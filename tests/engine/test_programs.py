"""Are the compiled stages what they must be: none copies the pools, none is compiled again?"""

import dataclasses
import gc
from functools import partial
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest

from helios_jax.engine import EngineError, Variant, engine_step, init_state, programs
from helios_jax.engine.arrivals import make_arrivals
from helios_jax.engine.programs import Programs
from helios_jax.engine.requests import EngineRequest, Targets, start_rows
from helios_jax.scheduler import ACCEPTED
from helios_jax.scheduler.urgency import deadline
from tests.engine.conftest import GREEDY, drain, expected, make_engine, model, prompts


def test_nothing_compiles_once_warm():
    engine = make_engine()
    work = [(prompt, GREEDY) for prompt in prompts(5, 7, 60)]
    counts = []

    def count(event: str, duration: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            counts.append(event)

    def serve() -> list[list[int]]:
        outputs = engine.generate(*zip(*work, strict=True))
        return [output.outputs[0].token_ids for output in outputs]

    first = serve()
    num_programs = engine.num_programs
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        assert serve() == first
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert engine.num_programs == num_programs and counts == []


@pytest.mark.parametrize(
    "kv_cache_dtype", ["bfloat16", pytest.param("fp8_e4m3", marks=pytest.mark.slow)]
)
def test_no_stage_copies_the_pools(kv_cache_dtype):
    """Temporaries stay under 6% of a pool that is large beside the model's activations."""
    engine = make_engine(
        kv_cache_dtype=kv_cache_dtype, kv_watermark=40,
        max_num_rows=512, kv_cache_memory_bytes=64 << 20,
    )  # fmt: skip
    state, config, zero = engine._device.state, engine.step_config, np.int32(0)
    pool_bytes = state.pools.k.nbytes + state.pools.v.nbytes
    both = config.has_two_precisions
    passes = dict(model=engine.form.model, config=config)
    arguments = (engine.form.params, state, engine._device.plan_shape, np.float32(0))
    stages = {
        "plan": ((state, np.float32(0), zero, zero), dict(config=config, urgency=deadline)),
        "chunk": (arguments, passes | dict(variant=Variant(1, 192, 32, has_wide=both))),
        "rounds": ((*arguments, zero), passes | dict(variant=Variant(1, 192, has_wide=both))),
        "end": ((state,), dict(config=config)),
    }
    for name, (positional, static) in stages.items():
        traced = programs.stage(name, jax.default_backend()).trace(*positional, **static)
        assert not traced.jaxpr.effects, f"{name} calls the host"
        memory = traced.lower().compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool_bytes, name
        assert memory.temp_size_in_bytes < 0.06 * pool_bytes, name


def test_memory_maps_that_run_short_end_no_process(monkeypatch):
    """What no engine holds is freed; where that is not enough, the step fails with a remedy."""
    used = iter([65_000, 3_000])
    monkeypatch.setattr(programs, "_memory_maps", lambda: (next(used), 65_530))
    monkeypatch.setattr(programs, "_compiled", {"left behind": None})
    programs._make_room()
    assert programs._compiled == {}
    monkeypatch.setattr(programs, "_memory_maps", lambda: (65_000, 65_530))
    engine = make_engine()
    engine.submit([1, 2], GREEDY)
    with pytest.raises(EngineError, match="65,000 of the 65,530 memory maps .*max_map_count"):
        drain(engine)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts Linux's memory maps")
def test_forgotten_programs_are_really_freed():
    """JAX keeps what it compiled for as long as the function lives, so each has its own."""
    programs.forget()
    gc.collect()
    before, _ = programs._memory_maps()
    compiled = Programs()
    for n in range(4):
        # Of another size each time, so that each is compiled.
        engine = make_engine(max_num_rows=8, kv_cache_memory_bytes=(2 + n) << 18)
        state, config = engine._device.state, engine.step_config
        compiled.run("end", n, (state,), config=config)
    full, _ = programs._memory_maps()
    assert full > before + 40
    del compiled, engine, state
    programs.forget()
    gc.collect()
    after, _ = programs._memory_maps()
    assert after < before + 0.25 * (full - before)


def test_the_whole_step_as_one_program(engine):
    """`engine_step` with arrivals, a chunk and rounds gives what the stages give."""
    form, _, _ = model()
    request = EngineRequest(
        request_id=7, prompt=None, prompt_token_ids=[9] * 40, row_ids=[7], targets=Targets(),
        rows=start_rows([9] * 40, GREEDY, engine.tokenizer, (), 192, np.random.default_rng(0)),
        arrival_seconds=engine._origin, submitted_seconds=0.0, on_update=None, is_streamed=False,
    )  # fmt: skip
    arrivals = make_arrivals(
        engine._device.state, [(request, 0)], [], 1,
        shapes=engine._device.shapes, model_config=engine.model_config, origin=engine._origin,
    )  # fmt: skip
    step = jax.jit(
        partial(
            engine_step, model=form.model, config=engine.step_config,
            chunk=Variant(1, 192, chunk_tokens=32), rounds=Variant(1, 192),
        ),
        donate_argnums=1,
    )  # fmt: skip
    state = init_state(
        form.model.config, engine.scheduler_config, engine.step_config, shapes=engine._device.shapes
    )
    none = dataclasses.replace(
        arrivals,
        requests=dataclasses.replace(arrivals.requests, request_id_N=np.full(1, -1, np.int32)),
    )
    found = []
    for i in range(6):
        state, outputs = step(form.params, state, none if i else arrivals, float(i), 16)
        for rows in (outputs.chunk, outputs.rounds):
            found += [int(token) for token in rows.tokens_BN[0] if token >= 0]
        if i == 0:
            assert outputs.answer_N.tolist() == [ACCEPTED]
    assert found == expected([9] * 40, GREEDY)
    assert int(outputs.summary.num_running) == int(outputs.summary.num_used_blocks) == 0
