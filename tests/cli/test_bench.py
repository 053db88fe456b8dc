"""Do `helios bench generate` and `serve` hand their options on, print tables and write files?"""

import json

import pytest

from helios_jax import bench
from helios_jax.bench import comparison
from helios_jax.bench.serving_workload import ServingWorkload
from helios_jax.bench.workload import Workload
from tests.test_bench_serving import made_up


@pytest.fixture
def asked(monkeypatch) -> list:
    """What the verb asked for; the answer is a report of made-up seconds."""
    calls = []

    def compare(workload: Workload, against, peer_python, progress):
        calls.append((workload, list(against), peer_python))
        progress("helios, process 1 of 1")
        result = {
            "versions": {"jax": "0"},
            "weights": "some",
            "decode_seconds": [1.0] * len(workload.batch_sizes),
            "prefill_seconds": 1.0,
        }
        report = comparison.report(workload, {name: [result] for name in ("helios", *against)})
        return report | {"machine": comparison.machine.describe()}

    monkeypatch.setattr(bench, "compare", compare)
    return calls


def test_defaults(asked, helios):
    code, out, _ = helios("bench", "generate")
    assert code == 0
    assert asked == [(Workload(), [], None)]
    assert "decode, batch 8" in out and "jax 0; some" in out and "threads" in out


def test_options_and_the_file(asked, helios, tmp_path):
    code, out, _ = helios(
        "bench", "generate", "--model", "m", "--dtype", "int8", "--batch-size", "2",
        "--batch-size", "3", "--prompt-tokens", "7", "--context-tokens", "6",
        "--output-tokens", "5", "--against", "llama.cpp", "--repeats", "1", "--seed", "4",
        "--peer-dtype", "float32", "--peer-python", "/p", "--json", str(tmp_path / "r.json"),
    )  # fmt: skip
    assert code == 0
    workload = Workload("m", "int8", "float32", (2, 3), 7, 6, 5, 1, 4)
    assert asked == [(workload, ["llama.cpp"], "/p")]
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ratios"]["llama.cpp"] == {"decode_b2": 1, "decode_b3": 1, "prefill_b1": 1}
    assert "helios / llama.cpp" in out and "1.00x" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--batch-size", "0"], "batch_size=0"),
        (["--repeats", "0"], "repeats=0"),
        (["--peer-dtype", "int4"], "peer_dtype='int4'"),
        (["--cold-start", "--prompt-tokens", "0"], "prompt_tokens=0"),
        (["--cold-start", "--against", "llama.cpp"], "leave one option away"),
        (["--json", "/no/such/folder/r.json"], "its folder must exist"),
    ],
)
def test_bad_options_end_before_anything_is_measured(asked, helios, arguments, message):
    code, out, err = helios("bench", "generate", *arguments)
    assert (code, out) == (2, "") and message in err
    assert asked == []


def test_serve_hands_its_options_on(monkeypatch, helios, tmp_path):
    calls = []

    def measure_serving(workload, against, peer_python, progress):
        calls.append((workload, against, peer_python))
        progress("helios")
        return made_up() | {"machine": comparison.machine.describe()}

    monkeypatch.setattr(bench, "measure_serving", measure_serving)
    code, out, _ = helios(
        "bench", "serve", "--model", "m", "--part", "batch", "--part", "mix", "--num-requests", "9",
        "--trace", "t.csv", "--trace-scale", "0.5", "--against", "transformers", "--peer-python",
        "/p", "--pairs", "2", "--repeats", "3", "--seed", "4", "--json", str(tmp_path / "r.json"),
    )  # fmt: skip
    assert code == 0 and "MISSED" in out and "threads" in out
    asked = ServingWorkload(
        "m", parts=("batch", "mix"), mix_requests=9, trace="t.csv", trace_scale=0.5, pairs=2,
        repeats=3, seed=4,
    )  # fmt: skip
    assert calls == [(asked, "transformers", "/p")]
    assert len(json.loads((tmp_path / "r.json").read_text())["serving"]) == 5
    assert helios("bench", "serve")[0] == 0 and calls[1] == (ServingWorkload(), None, None)
    code, out, err = helios("bench", "serve", "--pairs", "0")
    assert (code, out) == (2, "") and "pairs=0" in err
