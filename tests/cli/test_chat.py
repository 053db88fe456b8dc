"""Does `helios chat` keep the conversation, and survive what happens in one?"""

import builtins
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from helios_jax.cli import chat
from helios_jax.sampling import SamplingParams


def user(text):
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": "Hello, wörld!"}


def test_piped_lines_are_a_conversation(llm, helios):
    code, out, err = helios("chat", input=b"Hi\n\nAnd now?\n/reset\nAgain\n/exit\nnever\n")
    assert (code, out, err) == (0, "Hello, wörld!\n" * 3, "")
    assert llm.prompts == [
        [user("Hi")],
        [user("Hi"), ANSWER, user("And now?")],
        [user("Again")],
    ]


def test_the_system_message_survives_a_reset(llm, helios):
    helios("chat", "--system", "Be brief.", input=b"Hi\n/reset\nAgain")
    system = {"role": "system", "content": "Be brief."}
    assert llm.prompts == [[system, user("Hi")], [system, user("Again")]]


def test_options(llm, helios):
    helios("chat", "--temperature", "0.7", "--max-tokens", "9", "--dtype", "int8", input=b"Hi\n")
    assert (llm.params.temperature, llm.params.max_tokens) == (0.7, 9)
    assert llm.loaded[0] == "smollm2-135m" and llm.loaded[1]["dtype"] == "int8"


def test_an_unknown_command_is_not_sent(llm, helios):
    code, _, err = helios("chat", input=b"/rest\n/help\n")
    assert code == 0 and llm.prompts == []
    assert "unknown command /rest" in err and err.count("/reset forgets") == 2


def test_a_model_without_a_template(llm, helios):
    llm.tokenizer.chat_template = None
    code, _, err = helios("chat", input=b"Hi\n")
    assert code == 2 and "generate --raw" in err


def test_an_error_ends_a_piped_conversation(llm, helios):
    llm.fail = ValueError("the prompt is too long")
    code, _, err = helios("chat", input=b"Hi\nMore\n")
    assert (code, err) == (2, "helios: error: the prompt is too long\n")
    assert len(llm.prompts) == 1


def converse(llm, monkeypatch, lines):
    """An interactive conversation; a line that is an exception is raised by the prompt."""
    lines = iter(lines)

    def read(prompt):
        line = next(lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        if callable(line):
            return line()
        return line

    monkeypatch.setattr(builtins, "input", read)
    chat.converse(llm, SamplingParams(), None, interactive=True)


def test_an_error_does_not_end_an_interactive_conversation(llm, monkeypatch, capsys):
    llm.fail = ValueError("the prompt is too long")

    def recovered():
        llm.fail = None
        return "Short"

    converse(llm, monkeypatch, ["Long", recovered])
    out, err = capsys.readouterr()
    assert "Hello, wörld!" in out and "[the prompt is too long]" in err
    assert llm.prompts == [[user("Long")], [user("Short")]]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(llm, monkeypatch, capsys):
    llm.fail, llm.fail_after = KeyboardInterrupt(), 1

    def recovered():
        llm.fail = None
        return "Go on"

    converse(llm, monkeypatch, ["Hi", recovered])
    cut = {"role": "assistant", "content": "Hello, "}
    assert llm.prompts[1] == [user("Hi"), cut, user("Go on")]
    assert "[stopped" in capsys.readouterr().err


def test_ctrl_c_before_the_first_word_forgets_the_question(llm, monkeypatch):
    llm.fail = KeyboardInterrupt()

    def recovered():
        llm.fail = None
        return "Again"

    converse(llm, monkeypatch, ["Hi", recovered])
    assert llm.prompts == [[user("Hi")], [user("Again")]]


def test_ctrl_c_at_the_prompt_leaves(llm, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        converse(llm, monkeypatch, [KeyboardInterrupt()])


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_ctrl_c_at_a_real_terminal():
    script = textwrap.dedent(f"""
        import itertools, sys, time
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]
        from conftest import FakeLLM, StreamOutput
        from helios_jax.cli import main, options
        class Endless(FakeLLM):
            def stream_chat(self, messages, params):
                for i in itertools.count():
                    yield StreamOutput("word ", [i], None)
                    time.sleep(0.01)
        options.load_llm = lambda *_, **__: Endless()
        main.main(["chat"])
    """)
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < deadline, seen
            seen += os.read(leader, 4096)
        seen = seen[seen.index(text) + len(text) :]

    try:
        wait_for(b"> ")
        os.write(leader, b"Hi\n")
        wait_for(b"word word ")
        process.send_signal(signal.SIGINT)
        wait_for(b"[stopped")
        wait_for(b"> ")
        # readline may lose a signal that comes just before it begins to wait: press again.
        for _ in range(6):
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=5)
                break
            except subprocess.TimeoutExpired:
                continue
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait()
        os.close(leader)
