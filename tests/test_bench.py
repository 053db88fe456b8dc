"""Does the benchmark measure what it says, take turns, and compute its table right?"""

import dataclasses
import io
import json
import statistics
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import helios_jax
from helios_jax.bench import (
    cold_start,
    comparison,
    engines,
    helios_worker,
    machine,
    serving,
    speculation,
    tables,
)
from helios_jax.bench.cold_start import CACHES, MEMORY, STAGES
from helios_jax.bench.cold_start_worker import measure as measure_start
from helios_jax.bench.engines import PEERS, Peer, check_peer, peer_checkpoint, run_worker
from helios_jax.bench.workload import Workload
from tests import tiny

SMALL = Workload(batch_sizes=(1, 2), prompt_tokens=16, context_tokens=5, output_tokens=6, repeats=3)


def measured(decode_1: float, decode_2: float, prefill: float) -> dict:
    return {
        "versions": {"engine": "1.0"},
        "weights": "some",
        "decode_seconds": [decode_1, decode_2],
        "prefill_seconds": prefill,
    }


def text_of(table) -> str:
    shown = io.StringIO()
    Console(width=200, file=shown).print(table)
    return shown.getvalue()


# The workload


def test_every_engine_gets_the_same_prompts_of_the_sizes_asked_for():
    job = SMALL.job(vocab_size=50)
    assert [[len(prompt) for prompt in batch] for batch in job["decode_prompts"]] == [[5], [5, 5]]
    assert len(job["prefill_prompt"]) == 16
    assert all(0 <= token < 50 for token in job["prefill_prompt"])
    assert json.loads(json.dumps(job)) == job == SMALL.job(50)
    assert dataclasses.replace(SMALL, seed=1).job(50) != job


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"batch_sizes": (0,)}, "batch_size=0"),
        ({"batch_sizes": ()}, "batch_sizes"),
        ({"output_tokens": 0}, "output_tokens=0"),
        ({"repeats": -1}, "repeats=-1"),
        ({"peer_dtype": "int8"}, "peer_dtype='int8'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Workload(**changes)


def test_rates_count_every_row_and_step():
    # 6 steps of 1 row in 2 s, 6 of 2 rows in 3 s, 16 prompt tokens in 0.5 s.
    rates = SMALL.rates(measured(2.0, 3.0, 0.5))
    assert rates == {"decode_b1": 3.0, "decode_b2": 4.0, "prefill_b1": 32.0}


# Helios' side


def test_helios_runs_exactly_the_steps_asked_for(monkeypatch):
    llm = tiny.llm(enable_prefix_caching=False)
    calls, loaded = [], []
    generate = llm.generate

    def spy(prompts, params):
        outputs = generate(prompts, params)
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        calls.append(([len(prompt) for prompt in prompts], lengths))
        return outputs

    monkeypatch.setattr(llm, "generate", spy)
    monkeypatch.setattr(helios_jax, "load", lambda model, **options: loaded.append(options) or llm)
    job = SMALL.job(258) | {"model": "tiny", "dtype": "float32"}
    result = helios_worker.measure(job)
    assert loaded == [{"dtype": "float32", "max_num_seqs": 2, "enable_prefix_caching": False}]
    # Each decode measurement has one further token, the prefill's; each shape is warmed up first.
    decodes = [([5], [7]), ([5], [7]), ([5, 5], [7, 7]), ([5, 5], [7, 7])]
    assert calls == decodes + [([16], [1])] * (1 + job["num_prefills"])
    assert [options["enable_prefix_caching"] for options in loaded] == [False]
    assert set(result) == {"versions", "weights", "decode_seconds", "prefill_seconds"}
    assert len(result["decode_seconds"]) == 2 and min(result["decode_seconds"]) > 0
    assert result["prefill_seconds"] > 0 and "float32" in result["weights"]
    assert set(SMALL.rates(json.loads(json.dumps(result)))) == set(SMALL.metrics)


def test_a_cold_start_passes_its_stages_in_order(monkeypatch):
    llm = tiny.llm()
    monkeypatch.setattr(helios_jax, "load", lambda model, dtype: llm)
    job = {"model": "tiny", "dtype": "float32", "prompt_tokens": 4, "output_tokens": 9, "seed": 0}
    result = measure_start(job | {"started": time.time()})
    times = [result[stage] for stage in STAGES]
    assert times == sorted(times) and times[0] >= 0
    assert "float32" in result["weights"]


# Peers


def test_a_missing_peer_says_what_to_install(monkeypatch):
    missing = Peer(Path("unused.py"), ("json", "no_such_module"), ("gguf",))
    monkeypatch.setitem(PEERS, "transformers", missing)
    with pytest.raises(ValueError) as raised:
        check_peer("transformers", sys.executable)
    message = str(raised.value)
    assert "lacks no_such_module;" in message
    assert "pip install 'helios-jax[bench]'" in message and "--peer-python" in message
    monkeypatch.setitem(PEERS, "transformers", dataclasses.replace(missing, modules=("json",)))
    check_peer("transformers", sys.executable)


def test_wrong_peers_and_interpreters(tmp_path):
    with pytest.raises(ValueError, match="against='vllm': must be one of transformers, llama.cpp"):
        check_peer("vllm", sys.executable)
    with pytest.raises(ValueError, match="peer_python='/no/python': cannot be run"):
        check_peer("transformers", "/no/python")
    (tmp_path / "old").write_text("#!/bin/sh\necho Unknown option: -P >&2; exit 2\n")
    (tmp_path / "old").chmod(0o755)
    with pytest.raises(ValueError, match="is no Python 3.11 or newer: Unknown option"):
        check_peer("transformers", str(tmp_path / "old"))


def test_peers_read_the_gguf_and_say_so_where_there_is_none(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for name in PEERS:
        assert peer_checkpoint(name, str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    monkeypatch.setattr(engines.hub, "fetch_gguf", lambda name: tmp_path / "m.gguf")
    assert peer_checkpoint("llama.cpp", "smollm2-135m") == tmp_path / "m.gguf"
    (tmp_path / "native").mkdir()
    (tmp_path / "native/manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="reads gguf or huggingface, and .*native is native"):
        peer_checkpoint("transformers", str(tmp_path / "native"))


def test_a_worker_that_fails_shows_its_last_words(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; print('noise'); sys.exit('out of luck')")
    with pytest.raises(RuntimeError, match="(?s)ended with code 1:.*out of luck"):
        run_worker([sys.executable, str(worker)], {})
    worker.write_text("import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('[1]')")
    assert run_worker([sys.executable, str(worker)], {}) == [1]


# The comparison


@pytest.fixture
def turns(tmp_path, monkeypatch) -> list[str]:
    """Engines that answer at once; which process ran when."""
    order: list[str] = []
    seconds = {"helios": [1.0, 2.0, 9.0], "transformers": [8.0, 4.0, 0.1], "llama.cpp": [1.0] * 3}

    def run(name: str) -> dict:
        order.append(name)
        time_ = seconds[name][order.count(name) - 1]
        return measured(time_, time_, time_)

    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(comparison.hub, "resolve", lambda model: tmp_path / "m.gguf")
    monkeypatch.setattr(comparison, "peer_checkpoint", lambda *arguments: tmp_path / "m.gguf")
    monkeypatch.setattr(comparison, "check_peer", lambda *arguments: None)
    monkeypatch.setattr(comparison, "run_helios", lambda job: run("helios"))
    monkeypatch.setattr(comparison, "run_peer", lambda name, interpreter, job: run(name))

    class Checkpoint:
        config = tiny.config()

    monkeypatch.setattr("checkpoints_conv.open_checkpoint", lambda path: Checkpoint)
    return order


def test_engines_take_turns_and_medians_make_the_ratio(turns):
    report = comparison.compare(SMALL, ["transformers", "llama.cpp", "transformers"])
    assert turns == ["helios", "transformers", "llama.cpp"] * 3
    # Median seconds are 2, 4 and 1.
    assert report["ratios"] == {
        "transformers": dict.fromkeys(SMALL.metrics, 2.0),
        "llama.cpp": dict.fromkeys(SMALL.metrics, 0.5),
    }
    assert report["engines"]["helios"]["medians"] == SMALL.rates(measured(2.0, 2.0, 2.0))
    assert len(report["engines"]["helios"]["runs"]) == 3
    assert report["schema"] == 1 and report["workload"]["output_tokens"] == 6
    assert report["machine"]["num_threads"] == machine.num_threads() >= 1
    assert json.loads(json.dumps(report))["ratios"] == report["ratios"]


def test_the_table_shows_rates_and_ratios(turns):
    report = comparison.compare(SMALL, ["transformers"])
    lines = text_of(tables.comparison_table(report)).splitlines()
    [ours] = [line for line in lines if "helios  " in line]
    [ratio] = [line for line in lines if "helios / transformers" in line]
    assert [cell.strip() for cell in ours.split("│")[2:5]] == ["3", "6", "8"]
    assert ratio.count("2.00x") == 3
    assert any("decode, batch 2" in line and "prefill 16" in line for line in lines)
    assert tables.describe_engines(report)[0] == "helios: engine 1.0; some"
    assert "threads" in tables.describe_machine(report["machine"])


def test_cold_starts_in_pairs_and_their_table(monkeypatch, tmp_path):
    seen = []

    def run(job, cache):
        seen.append(cache)
        warm = seen.count(cache) - 1
        times = {stage: (4 - 2 * warm) * (i + 1.0) for i, stage in enumerate(STAGES)}
        return times | {MEMORY: 1_500_000_000, "weights": "some"}

    monkeypatch.setattr(cold_start, "_run_process", run)
    monkeypatch.setattr(cold_start.hub, "resolve", lambda model: tmp_path)
    report = cold_start.measure_cold_start("m", repeats=2)
    # Each cache is met twice: empty by the first process, warm by the second.
    assert [seen.count(cache) for cache in dict.fromkeys(seen)] == [2, 2]
    medians = report["cold_start"]["medians"]
    assert [medians[cache]["first_token_seconds"] for cache in CACHES] == [12.0, 6.0]
    table = text_of(tables.cold_start_table(report))
    assert "12.00" in table and "6.00" in table and "1.50 GB" in table
    assert json.loads(json.dumps(report)) == report


def test_a_cold_process_gets_its_cache_and_its_memory_is_its_own(monkeypatch, tmp_path):
    # A stand-in for python -m: it reports its environment and holds 100 MB.
    worker = tmp_path / "python"
    worker.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "job = json.load(open(sys.argv[3])); held = b'x' * 100_000_000\n"
        "json.dump({'cache': os.environ['HELIOS_CACHE'], 'job': job}, open(sys.argv[4], 'w'))\n"
    )
    worker.chmod(0o755)
    monkeypatch.setattr(cold_start.sys, "executable", str(worker))
    result = cold_start._run_process({"seed": 3}, tmp_path)
    assert result["cache"] == str(tmp_path) and result["job"]["seed"] == 3
    assert result["job"]["started"] <= time.time()
    assert result[MEMORY] > 100_000_000


@pytest.mark.parametrize("path", sorted(Path(comparison.__file__).parent.glob("results/*.json")))
def test_committed_results_say_where_they_come_from(path):
    report = json.loads(path.read_text())
    assert report["schema"] == 1 and report["date"]
    assert report["machine"]["commit"] and report["machine"]["num_threads"]
    if "cold_start" in report:
        assert set(report["cold_start"]["medians"]) == set(CACHES)
        return
    if "serving" in report:
        assert report["versions"]["helios"]["jax"] and report["serving"]
        for row in report["serving"]:
            assert serving.judged(row) == {key: row[key] for key in serving.judged(row)}
        return
    if "categories" in report:
        assert report["versions"]["jax"] and report["prompts"]
        for row, again in zip(
            report["categories"], speculation.summarise(report["prompts"]), strict=True
        ):
            assert again == {key: row[key] for key in again}
        assert " at 0x" not in path.read_text(), "an address says nothing to anybody"
        return
    if "added_seconds" in report:
        assert report["versions"]["jax"]
        rates = [pair["grpc"] / pair["engine"] for pair in report["pairs"]]
        assert report["ratio"] == pytest.approx(statistics.median(rates))
        return
    again = comparison.report(
        Workload(**report["workload"] | {"batch_sizes": tuple(report["workload"]["batch_sizes"])}),
        _measured_again(report),
    )
    for name, ratios in report["ratios"].items():
        assert again["ratios"][name] == pytest.approx(ratios)


def _measured_again(report) -> dict:
    """What the workers must have returned, from the rates of every process."""
    workload = report["workload"]
    return {
        name: [
            {
                "versions": engine["versions"],
                "weights": engine["weights"],
                "decode_seconds": [
                    size * workload["output_tokens"] / run[f"decode_b{size}"]
                    for size in workload["batch_sizes"]
                ],
                "prefill_seconds": workload["prompt_tokens"] / run["prefill_b1"],
            }
            for run in engine["runs"]
        ]
        for name, engine in report["engines"].items()
    }
