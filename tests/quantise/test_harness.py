"""Does lm-evaluation-harness get right answers? Skipped without the extra `eval`."""

import math

import numpy as np
import pytest

from tests import tiny

instances = pytest.importorskip("lm_eval.api.instance")


@pytest.fixture(scope="module")
def model():
    from helios_jax.calibrate.harness import HeliosLM

    return HeliosLM(tiny.llm())


def ask(*arguments, kind="loglikelihood"):
    return instances.Instance(kind, {}, arguments, 0)


def log_probs(model, tokens) -> np.ndarray:
    logits = np.asarray(model.llm.model.apply(model.llm.params, np.array([tokens]))[0], np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_log_likelihoods(model):
    (found,) = model.loglikelihood([ask("ab ", "cd")])
    tokens = model.llm.tokenizer.encode("ab cd")
    rows = log_probs(model, tokens)
    # The blank belongs to the continuation.
    assert found[0] == pytest.approx(sum(rows[i - 1, tokens[i]] for i in (2, 3, 4)), abs=1e-4)
    assert found[1] is False


def test_generation_ends_where_it_is_told(model):
    tokens = model.llm.tokenizer.encode("ab")
    for _ in range(3):
        tokens.append(int(log_probs(model, tokens)[-1].argmax()))
    expected = model.llm.tokenizer.decode(tokens[2:])
    options = {"until": [], "max_gen_toks": 3}
    stopped = options | {"until": [expected[1]]}
    texts = model.generate_until([ask("ab", options), ask("ab", stopped)])
    assert texts == [expected, expected[: expected.index(expected[1])]]


def test_rolling_and_empty_contexts(model):
    tokens = [tiny.BOS, *model.llm.tokenizer.encode("hello", False)]
    rows = log_probs(model, tokens)
    expected = sum(rows[i, tokens[i + 1]] for i in range(5))
    (rolling,) = model.loglikelihood_rolling([ask("hello", kind="loglikelihood_rolling")])
    assert rolling == pytest.approx(expected, abs=1e-3) and math.isfinite(rolling)
    (found,) = model.loglikelihood([ask("", "hello")])
    assert found[0] == pytest.approx(expected, abs=1e-3)


def test_options_that_would_be_ignored_are_refused(model):
    with pytest.raises(ValueError, match="generation options .'num_beams'. are not supported"):
        model.generate_until([ask("ab", {"until": [], "num_beams": 4})])
