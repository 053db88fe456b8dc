"""A small engine on a small model, and what the pure generate() says to compare it with."""

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax import generate
from helios_jax.engine import Engine, EngineConfig, RequestUpdate
from helios_jax.sampling import SamplingParams, stack_sampling
from helios_jax.scheduler import check_invariants
from helios_jax.scheduler.urgency import deadline
from tests import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
CONFIG = EngineConfig(max_model_len=192, **tiny.ENGINE)


@cache
def model():
    """(ServingForm, Tokenizer, ModelConfig) in float32."""
    llm = tiny.llm()
    return llm._form, llm.tokenizer, llm.config


def make_engine(
    form=None, seed: int = 0, record=None, speculation=None, extra=None, urgency=deadline, **changes
) -> Engine:
    default, tokenizer, config = model()
    return Engine(
        form or default,
        tokenizer,
        model_config=config,
        config=dataclasses.replace(CONFIG, **changes),
        urgency=urgency,
        seed=seed,
        record=record,
        speculation=speculation,
        speculation_params=extra,
    )


@pytest.fixture(scope="session")
def engine() -> Engine:
    """Shared by tests that leave it empty."""
    return make_engine()


def expected(prompt, params: SamplingParams) -> list[int]:
    """The pure generate()'s tokens for one request alone."""
    form, _, config = model()
    tokens = np.zeros((1, 128), np.int32)
    tokens[0, : len(prompt)] = prompt
    sampling = stack_sampling(
        [params], vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
    )
    output = generate(
        form.model, form.params, jnp.asarray(tokens), jnp.asarray([len(prompt)]), sampling, 64,
        num_logprobs=None,
    )  # fmt: skip
    return [int(token) for token in output.tokens[0] if token >= 0]


def shrink_pool(engine: Engine, num_blocks: int) -> None:
    """Leaves an empty engine so many blocks, as a value: nothing is compiled for it."""
    scheduler = engine._device.state.scheduler
    pool = scheduler.pool
    pool = dataclasses.replace(
        pool,
        num_blocks=jnp.int32(num_blocks),
        num_ready=jnp.int32(num_blocks),
        ready_P=jnp.roll(pool.ready_P, num_blocks - int(pool.num_blocks)),
    )
    engine._device.state = dataclasses.replace(
        engine._device.state, scheduler=dataclasses.replace(scheduler, pool=pool)
    )


def drain(engine) -> list[RequestUpdate]:
    updates = []
    for _ in range(400):
        if not engine.has_work:
            return updates
        updates += engine.step()
    raise AssertionError("the engine does not come to an end")


def tokens_of(updates: list[RequestUpdate]) -> dict[tuple[int, int], list[int]]:
    """What a client puts together from updates, per request and output."""
    found: dict[tuple[int, int], list[int]] = {}
    for update in updates:
        found.setdefault((update.request_id, update.index), []).extend(update.stream.token_ids)
    return found


def prompts(seed: int, count: int, longest: int = 110) -> list[list[int]]:
    """Random prompts, of which every third begins like the one before."""
    rng = np.random.default_rng(seed)
    drawn: list[list[int]] = []
    for i in range(count):
        prompt = rng.integers(0, 256, rng.integers(1, longest)).tolist()
        if i % 3 == 2:
            prompt = (drawn[-1][:40] + prompt)[:longest]
        drawn.append(prompt)
    return drawn


def assert_empty(engine) -> None:
    """No request, no block in use, and tables that agree with the pool."""
    assert not engine.has_work
    assert engine.metrics()["num_running"] == engine.metrics()["num_waiting"] == 0
    scheduler = engine._device.state.scheduler
    assert int(scheduler.pool.num_blocks - scheduler.pool.num_free) == 0
    assert bool(check_invariants(scheduler))
