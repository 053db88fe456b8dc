"""Do prompts of the target's own make a file that distillation reads? What may a shape bring?"""

import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from helios_jax.calibrate.data import read_units
from helios_jax.distill.acceptance import Prompt
from helios_jax.distill.prompts import OPENERS, self_written, with_passages
from helios_jax.distill.shapes import best_speed_up, least_acceptance
from helios_jax.distill.speed import decode_speeds, predicted_speed_up, speed_ups
from helios_jax.profiler import GPUS, Formats
from tests import tiny


def test_passages_are_drawn_by_seed(tmp_path):
    messages = with_passages(20, seed=1)
    assert messages == with_passages(20, seed=1) != with_passages(20, seed=2)
    assert len(set(messages)) == 20 and all(len(m.split()) < 400 for m in messages)
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": m}]}) for m in messages]
    path.write_text("\n".join(lines))
    assert len(read_units(path, tiny.tokenizer(), 64)) == 20


class Writer:
    """In a target's place: ends a message in the way that `endings` says next, in turn."""

    def __init__(self, *endings: tuple[str, str]):
        self.tokenizer, self.endings, self.asked = tiny.tokenizer(), endings, []

    def generate(self, prompts, params):
        outputs = []
        for prompt, one in zip(prompts, params, strict=True):
            text, reason = self.endings[len(self.asked) % len(self.endings)]
            self.asked.append((self.tokenizer.decode(prompt), one))
            outputs.append(
                SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=reason)])
            )
        return outputs


def test_messages_that_the_target_ended_are_kept_with_their_opening_words():
    llm = Writer((" and all that follows ", "stop"), (" on and on", "length"), (" no", "stop"))
    messages = self_written(cast(Any, llm), 30, seed=3)
    openers = [OPENERS[i % len(OPENERS)] for i in range(128)]
    assert messages == [f"{start} and all that follows" for start in openers[:90:3]]
    # The template ends where the user's words would go on.
    assert [text for text, _ in llm.asked] == [f"<|user|>{start}" for start in openers]
    params = [one for _, one in llm.asked]
    assert {one.temperature for one in params} == {1} and len({one.seed for one in params}) == 128


def test_a_target_that_ends_no_message_is_told():
    with pytest.raises(ValueError, match="ended 0 of 64 messages within 96 tokens"):
        self_written(cast(Any, Writer((" on and on", "length"))), 5, seed=0)


def test_the_prediction_is_that_of_the_bytes():
    """The time is that of reading weights; a pass over five tokens costs what one costs."""
    target = tiny.config(
        hidden_size=4096, intermediate_size=4096, num_layers=8, num_heads=32, num_kv_heads=1,
        head_dim=128, vocab_size=512,
    )  # fmt: skip
    draft = tiny.config(
        hidden_size=4096, intermediate_size=4096, num_layers=1, num_heads=32, num_kv_heads=1,
        head_dim=128, vocab_size=512,
    )  # fmt: skip
    formats = Formats(weight_bits=16, head_bits=16)

    def predict(hardware, tokens_per_round, num_draft_tokens=4):
        return predicted_speed_up(
            target, draft, hardware, num_draft_tokens=num_draft_tokens,
            tokens_per_round=tokens_per_round, context=0, target_formats=formats,
            draft_formats=formats,
        )  # fmt: skip

    linears = 8 * (2 * 4096 * 4096 + 2 * 4096 * 128 + 3 * 4096 * 4096)
    head = 512 * 4096
    expected = (linears + head) / (linears + head + 4 * (linears / 8 + head))
    h100, h200 = GPUS["h100"].hardware, GPUS["h200"].hardware
    assert predict(h100, 1) == pytest.approx(expected, rel=1e-3)
    assert predict(h100, 3) == pytest.approx(3 * expected, rel=1e-3)
    assert predict(h200, 3) == pytest.approx(predict(h100, 3), rel=1e-3)
    assert predict(h100, 1, 0) == pytest.approx(1)


class Timed:
    """In an LLM's place: its runs take so long, and the second of them compiles something."""

    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log = name, list(seconds), log
        self.engine = SimpleNamespace(num_programs=1)

    def generate(self, prompts, params):
        self.log.append(self.name)
        seconds = self.seconds.pop(0)
        if seconds > 100:
            self.engine.num_programs += 1
        timings = SimpleNamespace(total_seconds=seconds + 1, ttft_seconds=1)
        usage = SimpleNamespace(completion_tokens=params.max_tokens)
        return [SimpleNamespace(timings=timings, usage=usage)]


def test_ways_are_timed_in_turn_and_a_run_that_compiled_again():
    log = []
    llms = [Timed("plain", [4, 2], log), Timed("drafting", [2, 1000, 1], log)]
    prompts = [Prompt(category, [1]) for category in ("qa", "math")]
    plain, drafting = decode_speeds(llms, prompts, max_tokens=9)
    assert plain == {"qa": [2], "math": [4]} and drafting == {"qa": [4], "math": [8]}
    assert log == ["plain", "drafting", "drafting", "drafting", "plain"]
    assert speed_ups(drafting, plain) == {"qa": [2], "math": [2]}


def test_the_best_number_of_draft_tokens_is_that_of_the_formula():
    flat = np.ones(5)
    # Passes cost the same, drafting a tenth: 1 + a + a^2 + ... over 1 + g / 10.
    speed_up, number = best_speed_up(0.5, 0.1, flat)
    options = [sum(0.5**i for i in range(g + 1)) / (1 + 0.1 * g) for g in range(5)]
    assert speed_up == pytest.approx(max(options)) and options[number] == max(options)
    # A second token costs as much again: never.
    assert best_speed_up(0.9, 0.1, np.arange(1.0, 6)) == (1, 0)
    assert least_acceptance(0.1, np.arange(1.0, 6)) == 1
    assert least_acceptance(0.1, flat) == pytest.approx(0.1, abs=0.011)
