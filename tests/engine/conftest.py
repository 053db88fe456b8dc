"""A small engine on a small model, and what the pure generate() says to compare it with."""

import dataclasses
from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax import generate
from helios_jax.engine import Engine, EngineConfig
from helios_jax.sampling import SamplingParams, stack_sampling
from tests import tiny

CONFIG = EngineConfig(max_model_len=192, **tiny.ENGINE)


@cache
def model():
    """(ServingForm, Tokenizer, ModelConfig) in float32."""
    llm = tiny.llm()
    return llm._form, llm.tokenizer, llm.config


def make_engine(
    form=None, seed: int = 0, record=None, speculation=None, extra=None, **changes
) -> Engine:
    default, tokenizer, config = model()
    return Engine(
        form or default,
        tokenizer,
        model_config=config,
        config=dataclasses.replace(CONFIG, **changes),
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
    scheduler = engine._state.scheduler
    pool = scheduler.pool
    pool = dataclasses.replace(
        pool,
        num_blocks=jnp.int32(num_blocks),
        num_ready=jnp.int32(num_blocks),
        ready_P=jnp.roll(pool.ready_P, num_blocks - int(pool.num_blocks)),
    )
    engine._state = dataclasses.replace(
        engine._state, scheduler=dataclasses.replace(scheduler, pool=pool)
    )
