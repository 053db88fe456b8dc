"""Does speculation leave the embedded model's greedy tokens alone? 20 prompts, 200 tokens each."""

import dataclasses
from functools import cache

import jax
import pytest

from helios_jax.engine import Engine, EngineConfig
from helios_jax.model import Transformer, init_params
from helios_jax.model.forms import serving_form
from helios_jax.quant.expanded import MAX_INT8_ROWS
from helios_jax.sampling import SamplingParams
from helios_jax.speculative import DraftModel, PromptLookup, Speculation, SpeculationParams
from tests.equality import NEAR_TIE, EqualityRule

NUM_TOKENS = 200
PROMPTS = [
    "What is gravity?", "Name the planets of the solar system.", "Write a haiku about the sea.",
    "Explain how a bicycle stays upright.", "List ten animals and the sounds they make.",
    "Translate to French: the house is small.", "Write a Python function that adds two numbers.",
    "Summarise: the cat sat on the mat, the dog lay by the door, and the mouse slept.",
    "What is 17 times 23? Think step by step.", "Tell me a story about a dragon.",
    "Why is the sky blue?", "Give me a recipe for pancakes.", "Who wrote Hamlet?",
    "Repeat after me: one two three, one two three, one two three.",
    "Write a letter to a friend about your holiday.", "What are the benefits of exercise?",
    "Describe the water cycle.", "How do I sort a list in Python?", "What is a prime number?",
    "Write the numbers from 1 to 60.",
]  # fmt: skip
# Of logits, how far apart the best two may be where the tokens part: roundings differ where a pass
# over one token sums otherwise than one over several. Found: up to 14 of 20 prompts of bfloat16
# part, at gaps up to 0.25. So the gap is what is checked, and how many part is printed.
MARGINS = {
    "float32": (NEAR_TIE, None), "bfloat16": (0.3, len(PROMPTS)), "int8": (0.3, len(PROMPTS)),
}  # fmt: skip
NUM_DRAFT_TOKENS = 4


def num_rows(form) -> int:
    """So many that passes with and without drafts take weights of one form: int8 or bfloat16 (which
    lie up to half a logit apart, found with 4 rows on jax 0.12)."""
    return 2 if form.dtype == "int8" and MAX_INT8_ROWS >= 2 * (NUM_DRAFT_TOKENS + 1) else 4


def greedy(form, checkpoint, speculation=None, extra=None) -> list[list[int]]:
    engine = Engine(
        form, checkpoint.tokenizer, model_config=checkpoint.config, seed=0,
        config=EngineConfig(max_num_seqs=num_rows(form)), speculation=speculation,
        speculation_params=extra,
    )  # fmt: skip
    asked = [
        checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        for prompt in PROMPTS
    ]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate(asked, [params] * len(asked))
    metrics = engine.metrics()
    if speculation is not None:
        assert metrics["num_draft_tokens"] > 0
        print(f"acceptance {metrics['acceptance_rate']:.3f} of {metrics['num_draft_tokens']:.0f}")
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def forms(checkpoint, stored_params):
    """Of a dtype: the form, and its tokens without speculation."""

    @cache
    def of(dtype: str):
        form = serving_form(checkpoint.config, stored_params, dtype)
        return form, greedy(form, checkpoint)

    return of


def drafting(who: str, form) -> tuple[Speculation, SpeculationParams]:
    if who == "prompt lookup":
        return Speculation(PromptLookup(), NUM_DRAFT_TOKENS), SpeculationParams()
    if who == "the target itself":
        return Speculation(DraftModel(form.model), NUM_DRAFT_TOKENS), SpeculationParams(form.params)
    if who == "a random model":
        small = dataclasses.replace(
            form.model.config, num_layers=1, hidden_size=64, intermediate_size=128, num_heads=2,
            num_kv_heads=1, head_dim=32,
        )  # fmt: skip
        params = init_params(small, jax.random.key(0))
        draft = DraftModel(Transformer(small))
        return Speculation(draft, NUM_DRAFT_TOKENS), SpeculationParams(params)
    # The layers beyond are there, and not used.
    config = dataclasses.replace(form.model.config, num_layers=10)
    model = dataclasses.replace(form.model, config=config)
    return Speculation(DraftModel(model), NUM_DRAFT_TOKENS), SpeculationParams(form.params)


DRAFTERS = ("the target itself", "a random model", "the target's first layers", "prompt lookup")


@pytest.mark.slow
@pytest.mark.parametrize("who", DRAFTERS)
@pytest.mark.parametrize("dtype", MARGINS)
def test_greedy_tokens_stay_the_same(checkpoint, float32_form, forms, dtype, who):
    form, expected = forms(dtype)
    found = greedy(form, checkpoint, *drafting(who, form))
    rule = EqualityRule(float32_form.model, float32_form.params, *MARGINS[dtype])
    for prompt, theirs, ours in zip(PROMPTS, expected, found, strict=True):
        assert len(ours) == NUM_TOKENS
        text = checkpoint.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        rule.compare(checkpoint.tokenizer.encode(text), theirs, ours)
    rule.check()
