"""How many answers does a model get right? Multiple choice by log-likelihood, answers by match.

A task is a JSONL file, one item a line:

    {"prompt": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}
    {"prompt": "2 + 2 =", "answer": "4"}                    "answer" may be a list of right ones
    {"messages": [{"role": "user", "content": "…"}], "answer": …}

With `choices`, the choice whose tokens are likeliest after the prompt is taken: `accuracy` by the
sum of log-likelihoods, `accuracy_per_byte` by the sum over the choice's UTF-8 bytes, which does not
favour short ones. Without, the model continues greedily, and its answer is right where it equals
one of the answers after stripping white space at both ends (`exact_match`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helios_jax.calibrate.data import read_objects, render
from helios_jax.calibrate.likelihood import likelihoods, split_tokens
from helios_jax.config import require
from helios_jax.llm import LLM
from helios_jax.sampling import SamplingParams


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
      prompt: text, rendered through the chat template where the item has messages.
      choices: () for a question answered by generation.
      answers: right answers; for a choice its index as text.
    """

    prompt: str
    choices: tuple[str, ...]
    answers: tuple[str, ...]


def read_task(path: Path, llm: LLM) -> list[Item]:
    """The items of a task file.

    Raises:
      ValueError: naming file, line and field.
    """
    items = [_item(where, fields, llm) for where, fields in read_objects(path)]
    require(bool(items), f"{path}: holds no items")
    kinds = {bool(item.choices) for item in items}
    require(len(kinds) == 1, f"{path}: mixes items with and without choices; split the file")
    return items


def run_task(items: Sequence[Item], llm: LLM, max_tokens: int = 64) -> dict[str, float]:
    """Shares of right answers by name, and `num_items`.

    Args:
      max_tokens: longest generated answer; it also ends at the first line break.
    """
    if items[0].choices:
        return {"num_items": len(items), **_multiple_choice(items, llm)}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=["\n"])
    outputs = llm.generate([item.prompt for item in items], params)
    right = [
        output.outputs[0].text.strip() in {answer.strip() for answer in item.answers}
        for item, output in zip(items, outputs, strict=True)
    ]
    return {"num_items": len(items), "exact_match": float(np.mean(right))}


def _item(where: str, fields: dict[str, Any], llm: LLM) -> Item:
    prompt = render(where, fields, llm.tokenizer)
    require(bool(prompt), f"{where}: prompt={prompt!r}: must not be empty")
    answer, choices = fields.get("answer"), fields.get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise ValueError(f"{where}: choices={choices!r}: must be a list of texts")
    if choices:
        if type(answer) is not int or not 0 <= answer < len(choices):
            raise ValueError(f"{where}: answer={answer!r}: must be 0..{len(choices) - 1}")
        return Item(prompt, tuple(choices), (str(answer),))
    answers = [a for a in (answer if isinstance(answer, list) else [answer]) if isinstance(a, str)]
    if not answers or isinstance(answer, list) and len(answers) < len(answer):
        raise ValueError(f"{where}: answer={answer!r}: must be a text, or a list of texts")
    return Item(prompt, (), tuple(answers))


def _multiple_choice(items: Sequence[Item], llm: LLM) -> dict[str, float]:
    sequences = [
        split_tokens(item.prompt, choice, llm) for item in items for choice in item.choices
    ]
    found = iter(likelihoods(sequences, llm))
    right, right_per_byte = [], []
    for item in items:
        totals = np.array([next(found).log_probability for _ in item.choices])
        num_bytes = np.array([len(choice.encode()) for choice in item.choices])
        answer = int(item.answers[0])
        right.append(int(np.argmax(totals)) == answer)
        right_per_byte.append(int(np.argmax(totals / num_bytes)) == answer)
    return {
        "accuracy": float(np.mean(right)),
        "accuracy_per_byte": float(np.mean(right_per_byte)),
    }
