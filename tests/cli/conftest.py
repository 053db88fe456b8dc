"""A language model that needs no weights, and a way to run `helios` in this process."""

import io
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from helios_jax.cli import options
from helios_jax.cli.main import main


@dataclass
class StreamOutput:
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: Any = None
    finish_reason: str = "stop"


@dataclass
class RequestOutput:
    prompt: str
    outputs: list[CompletionOutput]


class FakeTokenizer:
    chat_template: str | None = "template"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


@dataclass
class FakeLLM:
    """Answers with the words of `answer`, each a token; `prompts` is what it was asked."""

    answer: str = "Hello, wörld!"
    finish_reason: str = "stop"
    fail: BaseException | None = None
    fail_after: int = 0
    prompts: list[Any] = field(default_factory=list)
    params: Any = None
    loaded: Any = None
    dtype_report: str = "fake weights"
    tokenizer: Any = field(default_factory=FakeTokenizer)

    def stream(self, prompt, params=None):
        self.prompts.append(prompt)
        self.params = params
        words = self.answer.split(" ")
        for i, word in enumerate(words):
            if self.fail and i == self.fail_after:
                raise self.fail
            last = i == len(words) - 1
            yield StreamOutput(word + " " * (not last), [i], self.finish_reason if last else None)

    stream_chat = stream

    def generate(self, prompts, params):
        self.prompts += prompts
        self.params = params
        answers = [CompletionOutput(i, self.answer, (1, 2)) for i in range(params.n)]
        return [RequestOutput(prompt, answers) for prompt in prompts]


@pytest.fixture
def llm(monkeypatch) -> FakeLLM:
    """What every verb gets instead of a loaded model."""
    fake = FakeLLM()

    def load(model, **loading):
        fake.loaded = (model, loading)
        return fake

    monkeypatch.setattr(options, "load_llm", load)
    return fake


@pytest.fixture
def helios(monkeypatch, capsys):
    """helios("generate", "Hi", input=b"...") -> (exit code, standard output, standard error)."""

    def run(*arguments: str, input: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(input)))
        # rich wraps messages at this width
        monkeypatch.setenv("COLUMNS", "1000")
        with pytest.raises(SystemExit) as exited:
            main(arguments)
        out, err = capsys.readouterr()
        code = exited.value.code
        assert isinstance(code, int)
        return code, out, err

    return run
