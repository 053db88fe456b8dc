"""Can a row see anything of its neighbours, of its padding or of unwritten cache slots?

Everything here is bit-equal, since one compiled program runs on two inputs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax import Transformer
from helios_jax.cache import DenseCache
from tests.model import reference_models

CASES = ("mistral", "mistral_window")
WIDTH = 12
LENGTHS = np.array([5, 12, 9])
NUM_STEPS = 4


def programs(config, cached: bool):
    """A jitted (params, prompts [B, WIDTH], following [B, NUM_STEPS]) -> logits of all tokens."""
    model = Transformer(config)
    positions = np.where(np.arange(WIDTH) < LENGTHS[:, None], np.arange(WIDTH), -1)

    @jax.jit
    def score(params, prompts, following):
        if not cached:
            return model.apply(params, prompts, jnp.asarray(positions))
        cache = DenseCache.create(config, len(LENGTHS), WIDTH + NUM_STEPS, jnp.float32)
        logits, cache = model.apply(params, prompts, jnp.asarray(positions), cache)
        rows = [logits]
        for i in range(NUM_STEPS):
            step_positions = jnp.asarray(LENGTHS)[:, None] + i
            logits, cache = model.apply(params, following[:, i : i + 1], step_positions, cache)
            rows.append(logits)
        return jnp.concatenate(rows, axis=1)

    def of_row(logits, row):
        """The logits of the row's own tokens."""
        logits = np.asarray(logits[row])
        return np.concatenate([logits[: LENGTHS[row]], logits[WIDTH:]])

    return score, of_row


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_rows_and_padding_are_invisible(name, cached, load_case):
    config, params = load_case(name)
    params = jax.tree.map(jnp.asarray, params)
    # The last id's embedding has overflowed: infinity, and NaN after the norm.
    ordinary = config.vocab_size - 1
    embedding = params["params"]["embed"]["embedding"].at[ordinary].set(jnp.inf)
    params = {"params": params["params"] | {"embed": {"embedding": embedding}}}
    random = np.random.default_rng(0)
    is_prompt = np.arange(WIDTH) < LENGTHS[:, None]

    def inputs():
        prompts = random.integers(ordinary, size=(len(LENGTHS), WIDTH))
        return prompts, random.integers(ordinary, size=(len(LENGTHS), NUM_STEPS))

    score, of_row = programs(config, cached)
    prompts, following = inputs()
    base = score(params, prompts, following)
    assert np.all(np.isfinite(base))

    other_prompts, other_following = inputs()
    for row in range(len(LENGTHS)):
        changed_prompts, changed_following = other_prompts.copy(), other_following.copy()
        changed_prompts[row], changed_following[row] = prompts[row], following[row]
        changed = score(params, changed_prompts, changed_following)
        np.testing.assert_array_equal(of_row(changed, row), of_row(base, row))
        other = (row + 1) % len(LENGTHS)
        assert np.any(of_row(changed, other) != of_row(base, other))

        # A neighbour whose activations are not finite.
        broken = prompts.copy()
        broken[other, 0] = ordinary
        changed = score(params, broken, following)
        assert np.all(np.isnan(of_row(changed, other)))
        np.testing.assert_array_equal(of_row(changed, row), of_row(base, row))

    for padding in (0, ordinary, config.vocab_size, -1, 2**31 - 1, -(2**31)):
        changed = score(params, np.where(is_prompt, prompts, padding), following)
        for row in range(len(LENGTHS)):
            np.testing.assert_array_equal(of_row(changed, row), of_row(base, row))


def test_room_does_not_change_logits(load_case):
    """A larger cache holds more slots that nobody sees; only the order of sums may change."""
    config, params = load_case("mistral")
    tokens = reference_models.tokens("mistral")[None, :WIDTH]
    positions = jnp.arange(WIDTH)[None]
    apply = jax.jit(Transformer(config).apply)
    results = []
    for num_slots in (WIDTH, WIDTH + 1, 64):
        cache = DenseCache.create(config, 1, num_slots, jnp.float32)
        logits, cache = apply(params, tokens, positions, cache)
        grown = cache.grow(100)
        assert grown.num_slots == 100 and int(grown.num_slots_used) == WIDTH
        step, _ = apply(params, tokens[:, :1], positions[:, -1:] + 1, grown)
        results.append((logits, step))
    for logits, step in results[1:]:
        np.testing.assert_allclose(logits, results[0][0], rtol=0, atol=2e-5)
        np.testing.assert_allclose(step, results[0][1], rtol=0, atol=2e-5)
