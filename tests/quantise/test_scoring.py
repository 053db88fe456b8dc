"""Are perplexity, KL and agreement what their definitions say, and tasks counted right?"""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from helios_jax.calibrate import Reference, Scores, cut_windows, mean_scores, score
from helios_jax.calibrate.tasks import read_task, run_task
from tests import tiny


@pytest.fixture(scope="module")
def llm():
    return tiny.llm()


@pytest.fixture(scope="module")
def other(llm):
    """Nearly the same weights: it agrees with `llm` at times."""
    noise = jax.random.key(1)
    params = jax.tree.map(
        lambda leaf: leaf * (1 + 0.1 * jax.random.normal(noise, leaf.shape)), llm.params
    )
    return SimpleNamespace(model=llm.model, params=params)


TOKENS = np.random.default_rng(0).integers(0, 256, 50).tolist()


forward = jax.jit(lambda model, params, tokens_BT: model.apply(params, tokens_BT), static_argnums=0)


def log_probs(llm, tokens) -> np.ndarray:
    """float64 [T, V]; padded to one length, which causal attention does not notice."""
    padded = np.pad(tokens, (0, 64 - len(tokens)))
    logits = np.asarray(forward(llm.model, llm.params, padded[None])[0, : len(tokens)], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("length", (2, 7, 8, 9, 15, 16, 17, 50))
@pytest.mark.parametrize("context, stride", [(8, 8), (8, 3), (8, 1), (64, 16)])
def test_windows_score_every_token_but_the_first_once(length, context, stride):
    tokens = np.arange(100, 100 + length).tolist()
    windows = cut_windows(tokens, context, stride)
    assert windows.tokens_BT.shape[1] == context
    targets = windows.targets_BT[windows.scored_BT]
    assert targets.tolist() == tokens[1:]
    # What is scored follows its input, and has its predecessors in the window.
    inputs = windows.tokens_BT[windows.scored_BT]
    assert (inputs + 1 == targets).all()
    behind = windows.positions_BT[windows.scored_BT] + 1
    enough = np.minimum(np.arange(1, length), context - stride + 1)
    assert (behind >= enough).all()
    padding = windows.positions_BT == -1
    assert not windows.scored_BT[padding].any()


@pytest.mark.parametrize("context, stride", [(16, 16), (16, 5), (64, 32)])
def test_scores_are_those_of_the_definitions(llm, other, context, stride):
    windows = cut_windows(TOKENS, context, stride)
    reference = Reference(llm.model, llm.params, windows)
    found = score(other.model, other.params, windows, reference)
    nll, kl, same = [], [], []
    scored_until = 0
    for start in range(0, len(TOKENS), stride):
        window = TOKENS[start : start + context]
        p, q = log_probs(llm, window), log_probs(other, window)
        for i, target in enumerate(TOKENS[start + 1 : start + context + 1]):
            if start + i >= scored_until:
                nll.append(-q[i, target])
                kl.append(np.sum(np.exp(p[i]) * (p[i] - q[i])))
                same.append(p[i].argmax() == q[i].argmax())
        scored_until = max(scored_until, min(start + context, len(TOKENS) - 1))
        if scored_until == len(TOKENS) - 1:
            break
    assert found.num_tokens == len(TOKENS) - 1 == len(nll)
    assert found.perplexity == pytest.approx(np.exp(np.mean(nll)), rel=1e-4)
    assert found.kl == pytest.approx(np.mean(kl), rel=1e-3)
    assert found.top1_agreement == pytest.approx(np.mean(same))
    assert 0 < np.mean(same) < 1


def test_a_model_agrees_with_itself(llm):
    windows = cut_windows(TOKENS, 16, 8)
    reference = Reference(llm.model, llm.params, windows)
    found = score(llm.model, llm.params, windows, reference)
    assert found.kl == pytest.approx(0, abs=1e-6) and found.top1_agreement == 1
    alone = score(llm.model, llm.params, windows)
    assert (alone.kl, alone.top1_agreement) == (None, None)
    assert alone.perplexity == found.perplexity


def test_the_mean_counts_domains_alike():
    scores = {"a": Scores(10, 2.0, 0.1, 0.5), "b": Scores(1000, 4.0, 0.3, 1.0)}
    assert mean_scores(scores) == Scores(1010, 3.0, pytest.approx(0.2), 0.75)


@pytest.mark.parametrize(
    "tokens, context, stride, message",
    [
        ([1], 8, 8, "a text of 1 tokens has nothing to score"),
        ([1, 2], 1, 1, "context=1: must be at least 2"),
        ([1, 2], 8, 9, r"stride=9: must be in 1..8 \(context\)"),
        ([1, 2], 8, 0, "stride=0: must be in"),
    ],
)
def test_wrong_windows(tokens, context, stride, message):
    with pytest.raises(ValueError, match=message):
        cut_windows(tokens, context, stride)


# Tasks


def write(path, items):
    path.write_text("\n".join(map(json.dumps, items)) + "\n")
    return path


def test_multiple_choice_takes_the_likeliest(llm, tmp_path):
    """Against log-likelihoods computed one by one; white space moves from prompt to choice."""
    prompts = ["one ", "two", "the third one ", "four"]
    choices = ["a", "bcd", " ef", "ghijkl mnop"]
    items, best, best_per_byte = [], [], []
    for prompt in prompts:
        sums = []
        for choice in choices:
            tokens = llm.tokenizer.encode(prompt + choice)
            start = len(llm.tokenizer.encode(prompt.rstrip()))
            rows = log_probs(llm, tokens)
            sums.append(sum(rows[i - 1, tokens[i]] for i in range(start, len(tokens))))
        best.append(int(np.argmax(sums)))
        best_per_byte.append(int(np.argmax(np.array(sums) / [len(c) for c in choices])))
        items.append({"prompt": prompt, "choices": choices})
    assert best != best_per_byte
    for right, measure in ((best, "accuracy"), (best_per_byte, "accuracy_per_byte")):
        answered = [item | {"answer": i} for item, i in zip(items, right, strict=True)]
        path = write(tmp_path / f"{measure}.jsonl", answered)
        assert run_task(read_task(path, llm), llm)[measure] == 1.0
        wrong = [item | {"answer": (item["answer"] + 1) % 4} for item in answered]
        wrong[0] = answered[0]
        path = write(tmp_path / "wrong.jsonl", wrong)
        found = run_task(read_task(path, llm), llm)
        assert found[measure] == 0.25 and found["num_items"] == 4


def test_generated_answers_must_match(llm, tmp_path):
    from helios_jax.sampling import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=5, stop=["\n"])
    answers = [output.outputs[0].text for output in llm.generate(["x", "yz"], params)]
    items = [
        {"prompt": "x", "answer": ["no", f"  {answers[0].strip()}\n"]},
        {"prompt": "yz", "answer": answers[1].strip() + "!"},
    ]
    found = run_task(read_task(write(tmp_path / "t.jsonl", items), llm), llm, max_tokens=5)
    assert found == {"num_items": 2, "exact_match": 0.5}


@pytest.mark.parametrize(
    "item, message",
    [
        ({"answer": "x"}, "must have `prompt` (text)"),
        ({"prompt": "", "answer": "x"}, "prompt='': must not be empty"),
        ({"prompt": "x"}, "answer=None: must be a text"),
        ({"prompt": "x", "answer": ["a", 3]}, "must be a text, or a list of texts"),
        ({"prompt": "x", "choices": ["a"], "answer": 1}, "answer=1: must be 0..0"),
        ({"prompt": "x", "choices": ["a", ""], "answer": 0}, "must be a list of texts"),
        ({"messages": [1], "answer": "x"}, "messages cannot be rendered"),
    ],
)
def test_wrong_items_are_named(llm, tmp_path, item, message):
    path = write(tmp_path / "t.jsonl", [{"prompt": "fine", "answer": "y"}, item])
    with pytest.raises(ValueError) as raised:
        read_task(path, llm)
    assert "t.jsonl:2: " in str(raised.value) and message in str(raised.value)


def test_a_task_is_of_one_kind(llm, tmp_path):
    items = [{"prompt": "x", "answer": "y"}, {"prompt": "x", "choices": ["a"], "answer": 0}]
    with pytest.raises(ValueError, match="mixes items with and without choices"):
        read_task(write(tmp_path / "t.jsonl", items), llm)
    with pytest.raises(ValueError, match="holds no items"):
        read_task(write(tmp_path / "empty.jsonl", []), llm)
