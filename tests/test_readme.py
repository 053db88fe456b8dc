"""Do the README's Python examples run as they stand?"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.quantise.conftest import make_checkpoint

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(example: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", example], env=os.environ | environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_six():
    # Two are run elsewhere: by tests/engine/test_recording.py and by tests/server/test_calls.py.
    words = ("llm.chat", "make_mesh", "short_first", "lenient", "Engine.restore", "client.stream")
    assert [[word for word in words if word in e] for e in EXAMPLES] == [[word] for word in words]


def test_generate_in_the_callers_jit_on_a_mesh_of_eight_equals_one_device():
    report = "\nprint(len(tokens.sharding.device_set), jax.device_get(tokens).tolist())"
    flags = "--xla_force_host_platform_device_count=8"
    num_devices, _, sharded = run(EXAMPLES[1] + report, XLA_FLAGS=flags).partition(" ")
    assert num_devices == "8"
    one = EXAMPLES[1].replace("make_mesh((2, 4)", "make_mesh((1, 1)")
    num_devices, _, single = run(one + report).partition(" ")
    assert num_devices == "1"
    assert sharded == single


@pytest.fixture
def small(tmp_path) -> Callable[[str], str]:
    """An example on a random model of two layers."""
    folder = make_checkpoint(tmp_path / "small")

    def change(example: str) -> str:
        assert '"smollm2-135m"' in example
        return example.replace('"smollm2-135m"', repr(str(folder)))

    return change


def test_the_friendly_example(small):
    assert len(run(small(EXAMPLES[0]))) > 50


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_native_path")
def test_the_friendly_example_on_the_real_model():
    assert "Paris" in run(EXAMPLES[0])


def check_policy(printed: str) -> list[str]:
    served = re.findall(r"request (\d) '(.*)'", printed)
    assert [number for number, _ in served] == ["1", "0"]
    met = dict(re.findall(r"(\w+): (\d+)% of the TTFT targets met", printed))
    assert list(met) == ["short_first", "deadline", "fcfs"]
    assert int(met["fcfs"]) < min(int(met["short_first"]), int(met["deadline"])) <= 100
    return [text for _, text in served]


def test_a_policy_of_ones_own_in_the_engine_and_in_the_simulator(small):
    check_policy(run(small(EXAMPLES[2])))


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_native_path")
def test_a_policy_of_ones_own_serves_the_real_model():
    assert "Paris" in check_policy(run(EXAMPLES[2]))[0]


def check_proposer(printed: str) -> list[str]:
    texts = re.findall(r"^(?:engine|library): (.*)$", printed, re.MULTILINE)
    assert len(texts) == 2
    accepted = re.findall(r"num_accepted=(\d+)", printed)
    assert sum(map(int, accepted)) > 0
    return texts


def test_a_proposer_and_a_rule_of_ones_own_in_the_engine_and_in_the_library(small):
    assert all(len(text) > 20 for text in check_proposer(run(small(EXAMPLES[3]))))


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_native_path")
def test_a_proposer_and_a_rule_of_ones_own_serve_the_real_model():
    texts = check_proposer(run(EXAMPLES[3]))
    assert all("green" in text and "blue" in text for text in texts)
