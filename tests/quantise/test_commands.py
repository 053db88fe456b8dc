"""Do `helios quantize` and `helios evaluate` do what they say, and say what they refuse?"""

import json

import pytest

from checkpoints_conv import open_checkpoint
from helios_jax.quant import QuantTensor
from tests.quantise.conftest import helios


def test_quantise_evaluate_generate(source, text_file, tmp_path, capsys):
    out = tmp_path / "out"
    helios(
        "quantize", source, "--method", "awq", "--group-size", 32, "--rule", "*/ffn/down=8",
        "--rule", "embed=8", "--calibration", text_file, "--num-sequences", 4,
        "--sequence-length", 64, "--check-tokens", 256, "--out", out,
    )  # fmt: skip
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "calibration: 4 x 64 tokens" in said.err and "peak memory" in said.err
    assert "held-out text, 255 tokens: perplexity" in said.err
    assert not [*tmp_path.glob(".*")]
    checkpoint = open_checkpoint(out)
    bits = {path: leaf.bits for path, leaf in checkpoint.tensors() if isinstance(leaf, QuantTensor)}
    assert bits["embed", "embedding"] == bits["layers_1", "ffn", "down", "kernel"] == 8
    assert bits["layers_1", "ffn", "up", "kernel"] == 4
    described = checkpoint.describe_source()["quantization"]
    assert described["method"] == "awq" and described["calibration"]["num_sequences"] == 4
    # The same folder again is refused before any work.
    helios("quantize", source, "--calibration", text_file, "--out", out, code=2)
    assert "out" in capsys.readouterr().err

    task = tmp_path / "quiz.jsonl"
    task.write_text(json.dumps({"prompt": "The fox", "choices": [" ran", " lay"], "answer": 0}))
    helios(
        "evaluate", out, "--against", source, "--text", f"words={text_file}", "--context", 64,
        "--max-text-tokens", 200, "--task", task, "--json", tmp_path / "report.json",
        "--markdown", tmp_path / "report.md",
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    first, second = report["models"]
    assert (first["model"], second["model"]) == (str(source), str(out))
    assert first["texts"]["words"]["kl"] is None
    assert second["texts"]["words"]["kl"] == second["mean"]["kl"] > 0
    assert second["texts"]["words"]["num_tokens"] == 199
    assert {*second["tasks"]} == {"quiz"} and second["tasks"]["quiz"]["num_items"] == 1
    assert {"command", "commit", "versions", "machine", "date"} <= {*report["circumstances"]}
    tables = (tmp_path / "report.md").read_text()
    assert tables == capsys.readouterr().out and "| KL to the reference, nats | words |" in tables


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--method", "awq"), "method='awq': needs calibration text (--calibration)"),
        (("--method", "nf4"), "method='nf4': must be one of ('rtn', 'awq', 'gptq')"),
        (("--calibration", "none.txt"), "none.txt: cannot be read as UTF-8 text"),
        (("--method", "rtn", "--group-size", "128"), "layers_0/attention/q: group_size=128 does"),
        (("--method", "rtn", "--rule", "head=8"), "rule 'head': matches no linear"),
        (("--method", "rtn", "--asymmetric", "--narrow"), "asymmetric=True, narrow=True:"),
    ],
)
def test_quantize_says_what_is_wrong(source, tmp_path, capsys, arguments, message):
    helios("quantize", source, "--out", tmp_path / "out", *arguments, code=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "nothing to evaluate on: give --text FILE or --task FILE"),
        (("--text", "none.txt"), "none.txt: cannot be read as UTF-8 text"),
        (("--task", "none.jsonl"), "none.jsonl: cannot be read as UTF-8 text"),
        (("--text", "a=x.txt", "--text", "a=y.txt"), "two files have the same name"),
        (("--text", "x.txt", "--max-text-tokens", "1"), "max_text_tokens=1: must be at least 2"),
        (("--text", "x.txt", "--context", "9999"), "context=9999: "),
    ],
)
def test_evaluate_says_what_is_wrong(source, capsys, arguments, message):
    helios("evaluate", source, *arguments, code=2)
    assert message in capsys.readouterr().err
