"""Is the real model better quantised with AWQ and GPTQ than rounded to nearest?"""

import argparse
import inspect

import numpy as np
import pytest

from tests.quantise.conftest import helios
from tests.quantise.interruption import kill_and_resume


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    """Text that every machine has: the sources and docstrings of a few modules."""
    text = "\n\n".join(inspect.getsource(module) for module in (argparse, inspect))
    text += "\n\n".join(
        inspect.getdoc(getattr(np, name)) or "" for name in sorted(np.__all__)[:200]
    )
    path = tmp_path_factory.mktemp("text") / "python.txt"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_three_bits_on_held_out_text(smollm2_native_path, text_file, tmp_path, capsys):
    """16 sequences of 256 tokens are enough to halve the distance; the result generates."""
    kl = {}
    for method in ("rtn", "awq", "gptq"):
        helios(
            "quantize", smollm2_native_path, "--method", method, "--bits", 3, "--calibration",
            text_file, "--num-sequences", 16, "--sequence-length", 256, "--check-tokens", 2048,
            "--out", tmp_path / method,
        )  # fmt: skip
        line = next(
            line for line in capsys.readouterr().err.splitlines() if line.startswith("held-out")
        )
        print(line)
        kl[method] = float(line.split("KL ")[1].split(",")[0])
    assert kl["awq"] < 0.75 * kl["rtn"] and kl["gptq"] < 0.75 * kl["rtn"], kl
    helios("generate", "What is gravity?", "--model", tmp_path / "gptq", "--max-tokens", 20)
    assert len(capsys.readouterr().out.split()) > 5


@pytest.mark.slow
@pytest.mark.parametrize("method", ("awq", "gptq"))
def test_killed_at_random_times_it_resumes(smollm2_native_path, text_file, tmp_path, method):
    options = (
        "--method", method, "--calibration", text_file, "--num-sequences", 4,
        "--sequence-length", 256, "--check-tokens", 0,
    )  # fmt: skip
    kill_and_resume(smollm2_native_path, options, tmp_path, num_kills=4, longest_wait=3)
