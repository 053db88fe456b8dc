"""Does the pure generate() work under vmap and in a caller's program like any other function?"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax import SamplingParams, Transformer, generate
from helios_jax.generation import LENGTH, NON_FINITE, STOP
from helios_jax.sampling import stack_sampling

NUM_NEW = 6
PROMPTS = np.random.default_rng(0).integers(97, size=(3, 7)).astype(np.int32)
LENGTHS = np.array([7, 3, 5], np.int32)


@pytest.fixture(scope="module")
def model_and_params(load_case):
    config, params = load_case("mistral")
    return Transformer(config), jax.tree.map(jnp.asarray, params)


def sampling(*rows: SamplingParams):
    return stack_sampling(rows, vocab_size=97, eos_token_ids=())


SAMPLED = sampling(*(SamplingParams(temperature=1.2, seed=seed, max_tokens=5) for seed in range(3)))


def assert_equal(actual, expected):
    """Tokens exactly, logprobs closely: vmap may order sums otherwise."""
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    np.testing.assert_array_equal(actual.lengths, expected.lengths)
    np.testing.assert_array_equal(actual.finish_reason, expected.finish_reason)
    np.testing.assert_allclose(actual.logprobs.chosen_BN, expected.logprobs.chosen_BN, atol=1e-4)


def test_vmap_over_seeds(model_and_params):
    model, params = model_and_params

    @jax.jit
    def run(seed_B2):
        rows = dataclasses.replace(SAMPLED, seed_B2=seed_B2)
        return generate(model, params, PROMPTS, LENGTHS, rows, NUM_NEW)

    seeds = jnp.stack([SAMPLED.seed_B2 + jnp.uint32(100 * i) for i in range(4)])
    mapped = jax.jit(jax.vmap(run))(seeds)
    assert mapped.tokens.shape == (4, 3, NUM_NEW)
    assert len(np.unique(mapped.tokens[:, 0], axis=0)) == 4
    for i in range(4):
        assert_equal(jax.tree.map(lambda leaf, i=i: leaf[i], mapped), run(seeds[i]))


def test_vmap_over_params(model_and_params):
    model, params = model_and_params
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 1.1, -leaf]), params)
    run = jax.jit(lambda params: generate(model, params, PROMPTS, LENGTHS, SAMPLED, NUM_NEW))
    mapped = jax.jit(jax.vmap(run))(stacked)
    assert np.any(mapped.tokens[0] != mapped.tokens[2])
    for i in range(3):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
        assert_equal(jax.tree.map(lambda leaf, i=i: leaf[i], mapped), run(one))


def test_inside_a_callers_program(model_and_params):
    """Prompts made and tokens used by the same program; logprobs are the model's own."""
    model, params = model_and_params

    @jax.jit
    def program(params, key):
        prompts = jax.random.randint(key, (2, 5), 0, 97)
        rows = sampling(*[SamplingParams(temperature=0, max_tokens=NUM_NEW)] * 2)
        output = generate(model, params, prompts, jnp.full(2, 5), rows, NUM_NEW)
        whole = jnp.concatenate([prompts, output.tokens], axis=1)
        logprobs = jax.nn.log_softmax(model.apply(params, whole)[:, 4:-1])
        return output, jnp.take_along_axis(logprobs, output.tokens[..., None], axis=-1)[..., 0]

    output, scored_BN = program(params, jax.random.key(3))
    np.testing.assert_array_equal(output.lengths, NUM_NEW)
    np.testing.assert_allclose(output.logprobs.chosen_BN, scored_BN, atol=1e-4)
    np.testing.assert_array_equal(output.logprobs.ranks_BN, 1)


def test_rows_end_on_their_own(model_and_params):
    """Stop ids, lengths and logits that are not finite; -1 and nothing else beyond the end."""
    model, params = model_and_params
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW)
    run = jax.jit(generate, static_argnums=(0, 5))
    free = run(model, params, PROMPTS, LENGTHS, sampling(greedy, greedy, greedy), NUM_NEW)
    stop = int(free.tokens[0, 2])
    first = int(np.argmax(np.asarray(free.tokens[0]) == stop))
    rows = sampling(
        dataclasses.replace(greedy, stop_token_ids=[stop]),
        dataclasses.replace(greedy, max_tokens=2),
        greedy,
    )
    embedding = params["params"]["embed"]["embedding"].at[96].set(jnp.inf)
    broken = {"params": params["params"] | {"embed": {"embedding": embedding}}}
    prompts = np.where(PROMPTS == 96, 95, PROMPTS)
    prompts[2, 4] = 96
    expected = run(model, params, prompts, LENGTHS, sampling(greedy, greedy, greedy), NUM_NEW)
    output = run(model, broken, prompts, LENGTHS, rows, NUM_NEW)
    np.testing.assert_array_equal(output.finish_reason, [STOP, LENGTH, NON_FINITE])
    np.testing.assert_array_equal(output.lengths, [first + 1, 2, 0])
    for row, length in enumerate(output.lengths):
        np.testing.assert_array_equal(output.tokens[row, :length], expected.tokens[row, :length])
        assert np.all(output.tokens[row, length:] == -1)


def test_long_prompts_are_taken_in_chunks(model_and_params, monkeypatch):
    """More queries than a chunk: the same logits, also where the last chunk is not full."""
    model, params = model_and_params
    tokens = np.random.default_rng(1).integers(97, size=(2, 23))
    apply = model.apply
    expected = jax.jit(apply)(params, tokens)
    monkeypatch.setattr(importlib.import_module("helios_jax.cache.attention"), "QUERY_CHUNK", 5)
    chunked = jax.jit(lambda params: apply(params, tokens))(params)
    np.testing.assert_allclose(chunked, expected, atol=5e-5)
