"""Does the real model compute what an independent float32 implementation computed?

`tests/data/smollm2_ref_fp32.npz` holds, for three prompts i: `ids{i}`, `logits{i}` of the last
position, and `greedy{i}`, 24 tokens that an end-of-sequence token does not end. Computed with
LlamaForCausalLM of transformers 5.24 (torch 2.13, CPU, float32) on the dequantised weights; every
prompt token attended to (its `generate` masks tokens equal to a pad_token_id, here <|im_end|>).
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import helios_jax
from helios_jax.sampling import SamplingParams, stack_sampling
from tests.equality import EqualityRule

REFERENCE = np.load(Path(__file__).parent.parent / "data" / "smollm2_ref_fp32.npz")
PROMPTS = [REFERENCE[f"ids{i}"] for i in range(3)]
NUM_TOKENS = 24


@pytest.mark.parametrize("i", range(3))
def test_last_logits(float32_form, i):
    tokens_BT = jnp.asarray(PROMPTS[i], jnp.int32)[None]
    logits_BTV = jax.jit(float32_form.model.apply)(float32_form.params, tokens_BT)
    np.testing.assert_allclose(logits_BTV[0, -1], REFERENCE[f"logits{i}"], atol=2e-3, rtol=0)


def greedy(checkpoint, rows: int):
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return params.to_arrays(
        rows,
        vocab_size=checkpoint.config.vocab_size,
        eos_token_ids=checkpoint.config.eos_token_ids,
    )


def test_greedy_tokens_alone_and_in_a_padded_batch(float32_form, checkpoint):
    """One prompt as it is, then all three padded to 20: padding and neighbours change nothing."""
    rule = EqualityRule(float32_form.model, float32_form.params)
    for prompts, width in (([2], 16), ([0, 1, 2], 20)):
        tokens_BT = np.full((len(prompts), width), 7, np.int32)
        for row, i in enumerate(prompts):
            tokens_BT[row, : len(PROMPTS[i])] = PROMPTS[i]
        lengths_B = jnp.asarray([len(PROMPTS[i]) for i in prompts])
        output = helios_jax.generate(
            float32_form.model, float32_form.params, jnp.asarray(tokens_BT), lengths_B,
            greedy(checkpoint, len(prompts)), NUM_TOKENS,
        )  # fmt: skip
        assert output.lengths.tolist() == [NUM_TOKENS] * len(prompts)
        for row, i in enumerate(prompts):
            rule.compare(PROMPTS[i], REFERENCE[f"greedy{i}"], output.tokens[row])
    rule.check()


def test_seeded_rows_are_the_same_in_any_batch(float32_form, checkpoint):
    """Sampling is by seed and position: neighbours, their filters and padding do not show."""
    config, prompt = checkpoint.config, PROMPTS[1]
    seeded = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11, max_tokens=16)
    neighbour = SamplingParams(temperature=1.3, seed=5, max_tokens=16, repetition_penalty=1.2)

    def run(params: list[SamplingParams], width: int):
        tokens_BT = np.zeros((len(params), width), np.int32)
        tokens_BT[:, : len(prompt)] = prompt
        arrays = stack_sampling(
            params, vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
        )
        output = helios_jax.generate(
            float32_form.model, float32_form.params, jnp.asarray(tokens_BT),
            jnp.full(len(params), len(prompt)), arrays, 16,
        )  # fmt: skip
        return output.tokens[0].tolist()

    alone = run([seeded], len(prompt))
    assert run([seeded, neighbour, seeded], 16) == alone
