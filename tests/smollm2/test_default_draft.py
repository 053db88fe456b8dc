"""Does the draft that is shipped fit the embedded model, leave its text alone, and get accepted?"""

import jax.numpy as jnp
import numpy as np

from helios_jax import hub
from helios_jax.distill.acceptance import Prompt, run_prompts
from helios_jax.generation import generate
from helios_jax.sampling import SamplingParams, stack_sampling
from helios_jax.speculative_config import load_speculation

NUM_TOKENS = 48
QUESTIONS = ["What is gravity?", "Write a letter to a friend.", "Name the planets.", "Why?"]


def test_it_drafts_for_the_embedded_model(checkpoint, float32_form):
    """Without the warning of another target: warnings are errors in tests."""
    config = {"model": "default", "num_speculative_tokens": 2, "controller": "fixed"}
    path = hub.resolve("smollm2-135m")
    speculation, extra = load_speculation(config, path, checkpoint.tokenizer, "float32")
    tokenizer, form = checkpoint.tokenizer, float32_form
    asked = [
        tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": question}]))
        for question in QUESTIONS
    ]
    counts = run_prompts(
        (form.model, form.params), speculation, extra, [Prompt("all", row) for row in asked],
        [0.0], max_tokens=NUM_TOKENS, num_rows=4, kv_dtype="float32",
    )  # fmt: skip
    tokens_BT = np.zeros((4, 128), np.int32)
    for row, tokens in enumerate(asked):
        tokens_BT[row, : len(tokens)] = tokens
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sampling = stack_sampling([greedy] * 4, vocab_size=form.model.config.vocab_size)
    plain = generate(
        form.model, form.params, jnp.asarray(tokens_BT), jnp.asarray(list(map(len, asked))),
        sampling, NUM_TOKENS, num_logprobs=None,
    )  # fmt: skip
    found = {count.tokens[: count.num_prompt]: count for count in counts}
    for tokens, expected in zip(asked, plain.tokens.tolist(), strict=True):
        assert list(found[tuple(tokens)].tokens[len(tokens) :]) == expected
    length = 1 + sum(c.num_accepted for c in counts) / sum(c.num_rounds for c in counts)
    assert length > 1.2
