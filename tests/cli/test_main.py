"""Does `helios` start quickly, and end with the right code and one clear message?"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from helios_jax import hub

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def test_help_lists_the_verbs_and_does_not_import_jax():
    script = textwrap.dedent("""
        import sys
        from helios_jax.cli.main import main
        try:
            main(["--help"])
        except SystemExit as exited:
            assert exited.code == 0
        heavy = {"jax", "numpy", "huggingface_hub", "tokenizers", "orbax"} & set(sys.modules)
        assert not heavy, heavy
    """)
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for verb in ("generate", "chat", "serve", "pull", "models", "convert", "simulate"):
        assert f" {verb} " in done.stdout


@pytest.mark.parametrize(
    "verb", ["generate", "chat", "serve", "pull", "models", "convert", "simulate"]
)
def test_every_verb_explains_itself(helios, verb):
    code, out, _ = helios(verb, "--help")
    assert code == 0 and "--debug" in out and f"helios {verb}" in out


def test_no_verb_shows_the_help(helios):
    code, out, err = helios()
    assert code == 2 and "generate" in out + err


@pytest.mark.parametrize(
    "error, code, message",
    [
        (ValueError("top_p=2: must be in (0, 1]"), 2, "top_p=2: must be in (0, 1]"),
        (NotImplementedError("no such kernel"), 2, "no such kernel"),
        (hub.PullError("no network"), 1, "no network"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (RuntimeError("out of memory"), 1, "RuntimeError: out of memory (--debug shows"),
        (KeyError("x"), 1, "KeyError: 'x' (--debug shows"),
    ],
)
def test_errors(llm, helios, error, code, message):
    llm.fail, llm.fail_after = error, 1
    got, out, err = helios("generate", "Hi")
    assert got == code and out == "Hello, "
    assert err.startswith("helios: error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["--debug", "generate", "Hi"], ["generate", "Hi", "--debug"]]
)
def test_debug_shows_the_traceback(llm, arguments):
    from helios_jax.cli.main import main

    llm.fail = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        main(arguments)


def test_ctrl_c_in_a_stream(llm, helios):
    llm.fail, llm.fail_after = KeyboardInterrupt(), 1
    code, out, err = helios("generate", "Hi")
    assert (code, out, err) == (130, "Hello, ", "")


def endless_generate() -> subprocess.Popen:
    script = textwrap.dedent(f"""
        import itertools, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from conftest import FakeLLM, StreamOutput
        from helios_jax.cli import main, options
        class Endless(FakeLLM):
            def stream(self, prompt, params):
                return (StreamOutput("word\\n", [i], None) for i in itertools.count())
        options.load_llm = lambda *_, **__: Endless()
        main.main(["generate", "Hi"])
    """)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_reader_that_goes_away_ends_it_quietly():
    with endless_generate() as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == "word\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_signal():
    with endless_generate() as process:
        assert process.stdout
        assert process.stdout.readline() == "word\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


def test_a_terminal_without_the_character_gets_a_question_mark():
    script = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from conftest import FakeLLM
        from helios_jax.cli import main, options
        options.load_llm = lambda *_, **__: FakeLLM()
        main.main(["generate", "Hi", "--no-stats"])
    """)
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert (done.returncode, done.stdout) == (0, b"Hello, w?rld!\n"), done.stderr
