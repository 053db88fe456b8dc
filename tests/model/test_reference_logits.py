"""Does every family compute what transformers computes, alone, fused, cached and padded?"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_conv.huggingface_config import huggingface_config
from helios_jax import RopeConfig, Transformer
from helios_jax.cache import DenseCache
from helios_jax.model import fuse_params, separate_head
from helios_jax.model.rope import inverse_frequencies
from tests.model import reference_models

# Logits have a standard deviation of 3 to 9 and both sides sum up to 96 float32 products in another
# order, through 3 layers: differences seen are below 3e-5.
TOLERANCE = 1e-4
WIDTH = 8  # of the padded prompts: their lengths 1..8 leave every remainder


@pytest.mark.parametrize("name", reference_models.CASES)
def test_logits(name, load_case, references):
    config, params = load_case(name)
    logits_1TV = jax.jit(Transformer(config).apply)(params, reference_models.tokens(name)[None])
    assert logits_1TV.dtype == jnp.float32
    np.testing.assert_allclose(logits_1TV[0], references[f"logits/{name}"], atol=TOLERANCE, rtol=0)


# One of each way to compute; the other cases differ from these in numbers only.
CACHED = (
    "llama2", "smollm2", "llama_one_kv_head", "mistral_window", "qwen2", "qwen3_bias_tied",
    "gelu", "attention_bias", "mlp_bias", "llama3", "linear", "dynamic", "yarn",
)  # fmt: skip


@pytest.mark.parametrize("name", CACHED)
def test_logits_token_by_token(name, load_case, references):
    """Fused, with a head of its own, over a dense cache, from prompts of every remainder."""
    config, params = load_case(name)
    tokens = reference_models.tokens(name)
    head_config, head_params = separate_head(config, params)
    assert not head_config.tie_word_embeddings
    model = Transformer(head_config, fused=True)
    # Row r holds the first r + 1 tokens of the prompt; each then goes on from where it is.
    lengths = np.arange(1, WIDTH + 1)
    prompts, positions = padded_prompts(tokens, lengths, padding=5)
    num_steps = len(tokens) - WIDTH
    following = np.stack([tokens[n : n + num_steps] for n in lengths], axis=1)
    prompt_logits, step_logits = jax.jit(prefill_and_decode, static_argnums=0)(
        model, fuse_params(head_params), prompts, positions, following, lengths
    )
    for row, length in enumerate(lengths):
        actual_TV = np.concatenate([prompt_logits[row, :length], step_logits[:, row]])
        expected_TV = references[f"logits/{name}"][: length + num_steps]
        np.testing.assert_allclose(actual_TV, expected_TV, atol=TOLERANCE, rtol=0)


def padded_prompts(tokens, lengths, padding):
    """Tokens and positions [B, WIDTH] of the prompts tokens[:length]."""
    is_prompt = np.arange(WIDTH) < lengths[:, None]
    return (
        np.where(is_prompt, tokens[:WIDTH], padding).astype(np.int32),
        np.where(is_prompt, np.arange(WIDTH), -1).astype(np.int32),
    )


def prefill_and_decode(model, params, prompts_BT, positions_BT, following_TB, lengths_B):
    """Logits [B, WIDTH, V] of the prompts and [steps, B, V] of the tokens that follow."""
    num_steps = len(following_TB)
    cache = DenseCache.create(model.config, len(prompts_BT), WIDTH + num_steps, jnp.float32)
    logits_BTV, cache = model.apply(params, prompts_BT, positions_BT, cache)

    def step(carry, tokens_B):
        cache, positions_B = carry
        logits_B1V, cache = model.apply(params, tokens_B[:, None], positions_B[:, None], cache)
        return (cache, positions_B + 1), logits_B1V[:, 0]

    _, steps = jax.lax.scan(step, (cache, jnp.asarray(lengths_B)), following_TB)
    return logits_BTV, steps


@pytest.mark.parametrize(
    "name, change",
    [
        ("mistral_window", {"sliding_window": 8}),
        ("mistral_window", {"sliding_window": 6}),
        ("qwen2_window_unused", {"sliding_window": 5}),
        ("qwen3", {"qk_norm": False}),
        ("gelu", {"activation": "gelu_tanh"}),
        ("gelu_tanh", {"activation": "gelu"}),
        ("llama2", {"rms_norm_eps": 1e-3}),
    ],
)
def test_references_notice(name, change, load_case, references):
    """A model that differs in one feature is outside the tolerance: the comparison can fail."""
    config, params = load_case(name)
    config = dataclasses.replace(config, **change)
    logits_1TV = jax.jit(Transformer(config).apply)(params, reference_models.tokens(name)[None])
    assert np.max(np.abs(logits_1TV[0] - references[f"logits/{name}"])) > 2 * TOLERANCE


@pytest.mark.parametrize("name", reference_models.ROPE_CASES)
def test_published_rope(name, references, tmp_path):
    """Frequencies of published models, from their config.json; 3e-6 is float32 rounding."""
    (tmp_path / "config.json").write_text(json.dumps(reference_models.ROPE_CASES[name]))
    config = huggingface_config(tmp_path)
    inverse, factor = inverse_frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(inverse, references[f"inverse_frequencies/{name}"], rtol=3e-6)
    np.testing.assert_allclose(factor, references[f"attention_factor/{name}"], rtol=1e-12)


def test_dynamic_keeps_its_base():
    """Unlike transformers: one base for all lengths, so a cached key never needs another angle."""
    fields = reference_models.CASES["dynamic"]
    factor, trained = fields["rope_scaling"]["factor"], fields["max_position_embeddings"]
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    # bloc97's formula at the sequence length factor * trained.
    stretch = factor * (factor * trained) / trained - (factor - 1)
    base = fields["rope_theta"] * stretch ** (head_dim / (head_dim - 2))
    rope = RopeConfig(rope_type="dynamic", factor=factor, original_max_position=trained)
    inverse, _ = inverse_frequencies(rope, head_dim)
    expected = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    np.testing.assert_allclose(inverse, expected, rtol=1e-12)
