"""Does the serving benchmark run what it says, count tokens, judge by its bars and show misses?"""

import json

import numpy as np
import pytest

from helios_jax.bench import serving, serving_worker, tables
from helios_jax.bench.serving import BARS, report
from helios_jax.bench.serving_workload import ServingWorkload
from tests import tiny
from tests.engine.conftest import make_engine
from tests.engine.conftest import model as tiny_model
from tests.test_bench import text_of

SMALL = ServingWorkload(
    single_sizes=((9, 4),), row_limits=(2,), batch_size=2, batch_tokens=(5, 3),
    kv_cache_dtypes=("float32",), mix_requests=5, mix_medians=(12, 4), mix_sigmas=(0.5, 0.5),
    long_tokens=100, short_tokens=(6, 2), shared_tokens=64, pairs=2,
)  # fmt: skip


@pytest.fixture
def bench(monkeypatch) -> serving_worker.Bench:
    form, tokenizer, config = tiny_model()
    job = SMALL.job(config.vocab_size, config.max_model_len)
    bench = serving_worker.Bench(form, tokenizer, config, job, np.random.default_rng(0))
    # One engine for all parts, with the programs of the engine's own tests.
    engine = make_engine()
    monkeypatch.setattr(bench, "engine", lambda **options: engine)
    monkeypatch.setattr(serving_worker, "load", lambda job: bench)
    monkeypatch.setattr(serving_worker, "use_compilation_cache", lambda: None)
    return bench


def test_every_part_is_measured_in_pairs_and_nothing_compiles_meanwhile(bench):
    result = json.loads(json.dumps(serving_worker.measure(bench.job)))
    rows = result["rows"]
    measures = [row["measure"] for row in rows]
    assert measures == ["single", "batch", "mix", "ttft", "ttft", "prefix"]
    for row in rows:
        assert len(row["values"]) == 2 and row["num_new_programs"] == 0
        assert len(row["others"]) == (0 if row["measure"] == "prefix" else 2)
        if row["measure"] != "prefix":
            assert min(row["values"] + row["others"] + row["cpu_seconds"]) > 0
    produced = [row["metrics"]["num_output_tokens"] for row in rows[:3]]
    assert produced == [2 * 4, 2 * 2 * 3, 2 * sum(output for _, output in bench.job["mix"])]
    # Nothing is found in the prefix cache that should not be, and all of it that should.
    assert not any(row["metrics"]["num_prefix_hit_tokens"] for row in rows[:5])
    assert rows[5]["values"] == [0, 0]


def test_static_batches_hold_similar_prompts_and_serve_every_token(bench):
    requests = bench.requests([(size, 3) for size in (500, 4, 400, 5, 6, 7, 8, 9, 10, 11, 12)])
    batches = serving_worker.static_batches(requests)
    lengths = [[len(row.prompt_token_ids) for row in batch] for batch in batches]
    assert lengths == [[4, 5, 6, 7, 8, 9, 10, 11], [12, 400, 500]]
    assert serving_worker.run_static(bench, requests[1:4]) == 9


def test_mixed_lengths_are_drawn_or_read_and_fit_the_model(tmp_path):
    drawn = SMALL.mix(64)
    assert drawn == SMALL.mix(64) and len(drawn) == 5
    assert all(1 <= size <= 32 for pair in drawn for size in pair)
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,9000,1\n"
    )
    read = ServingWorkload(trace=str(trace), trace_scale=0.5)
    assert read.mix(512) == [(187, 22), (256, 1)]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"parts": ("all",)}, "part='all': must be one of single"),
        ({"pairs": 0}, "pairs=0"),
        ({"trace_scale": 0.0}, "trace_scale=0.0"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ServingWorkload(**changes)


def test_a_peer_needs_the_part_it_runs():
    with pytest.raises(ValueError, match="part 'batch'"):
        serving.measure_serving(ServingWorkload(parts=("mix",)), "transformers")
    with pytest.raises(ValueError, match="against='vllm': must be transformers"):
        serving.measure_serving(ServingWorkload(), "vllm")


def row(measure: str, values: list, others: list, unit: str = "tokens/s", new: int = 0) -> dict:
    return {
        "measure": measure, "name": f"what {measure} does", "against": "other", "unit": unit,
        "values": values, "others": others, "cpu_seconds": [1.0] * len(values),
        "other_cpu_seconds": [0.5] * len(others), "metrics": {"num_steps": 2},
        "num_new_programs": new,
    }  # fmt: skip


def made_up_peer(seconds: list[float]) -> dict:
    times = {"total_seconds": seconds, "cpu_seconds": [3.0] * len(seconds)}
    return {"versions": {"torch": "1"}, "weights": "dense"} | times


def made_up() -> dict:
    """Two processes of two pairs each, and the peer's."""
    rows = [
        row("batch", [80.0, 60.0], [100.0, 100.0]), row("mix", [3.0, 3.0], [3.0, 3.0]),
        row("ttft", [1.0, 1.0], [1.0, 2.0], "seconds"), row("prefix", [0.1, 0.1], [], "share"),
    ]  # fmt: skip
    ours = {"versions": {"jax": "0"}, "weights": "some", "rows": rows}
    # 2 requests of 3 tokens in 0.1 s: 60 tokens/s.
    peer = made_up_peer([0.1, 0.1])
    return report(SMALL, [ours, ours], [peer, peer])


def test_medians_of_pairs_are_judged_by_their_bars():
    rows = {row["measure"]: row for row in made_up()["serving"]}
    assert set(rows) == {"batch", "mix", "ttft", "prefix", "peer"} <= set(BARS)
    batch = rows["batch"]
    assert batch["median"] == 70 and batch["ratio"] == 0.7 and batch["is_met"]
    assert len(batch["values"]) == 4 and batch["metrics"]["num_steps"] == 4
    assert batch["cpu_ratio"] == 0.5 and rows["ttft"]["cpu_ratio"] is None
    assert rows["mix"]["ratio"] == 1 and not rows["mix"]["is_met"]
    assert rows["ttft"]["ratio"] == 0.75 and rows["ttft"]["is_met"]
    assert rows["prefix"]["ratio"] is None and not rows["prefix"]["is_met"]
    assert rows["peer"]["ratio"] == pytest.approx(70 / 60) and not rows["peer"]["is_met"]
    assert rows["peer"]["cpu_ratio"] == 3


def test_the_table_says_what_misses_its_bar():
    made = made_up()
    lines = text_of(tables.serving_table(made)).splitlines()
    [mix] = [line for line in lines if "what mix does" in line]
    assert "1.00x" in mix and "at least 1.5, MISSED" in mix
    [kept] = [line for line in lines if "what batch does" in line and "other" in line]
    assert "MISSED" not in kept and "70 tokens/s" in kept and "at least 0.7" in kept
    assert "programs compiled while timed: 0" in tables.describe_serving(made)
    made["serving"][0]["num_new_programs"] = 1
    assert "COMPILED WHILE TIMED" in text_of(tables.serving_table(made))


def test_a_process_of_helios_then_one_of_the_peer(monkeypatch, tmp_path):
    asked = []

    def ours(command, job):
        asked.append(("helios", job["model"], job["parts"]))
        rows = [row("batch", [2.0, 2.0], [1.0, 1.0])]
        return {"versions": {"jax": "0"}, "weights": "some", "rows": rows}

    def peer(name, interpreter, job):
        asked.append((name, job["dtype"], [len(batch) for batch in job["decode_prompts"]]))
        lengths = {len(prompt) for batch in job["decode_prompts"] for prompt in batch}
        assert lengths == {5} and job["output_tokens"] == 3 - 1
        return made_up_peer([1.0, 1.0])

    class Checkpoint:
        config = tiny.config()

    monkeypatch.setattr(serving.hub, "resolve", lambda model: tmp_path)
    monkeypatch.setattr(serving, "peer_checkpoint", lambda *arguments: tmp_path / "m.gguf")
    monkeypatch.setattr(serving, "check_peer", lambda *arguments: None)
    monkeypatch.setattr(serving, "run_worker", ours)
    monkeypatch.setattr(serving, "run_peer", peer)
    monkeypatch.setattr("checkpoints_conv.open_checkpoint", lambda path: Checkpoint)
    small = ServingWorkload(parts=("batch",), batch_size=2, batch_tokens=(5, 3), pairs=2, repeats=2)
    made = serving.measure_serving(small, "transformers")
    assert asked == [
        ("helios", str(tmp_path), ["batch"]), ("transformers", "bfloat16", [2, 2]),
    ] * 2  # fmt: skip
    assert [row["ratio"] for row in made["serving"]] == [2.0, 2.0 / 6]
    assert made["machine"]["num_threads"] >= 1
