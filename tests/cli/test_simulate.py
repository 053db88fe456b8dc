"""Does `helios simulate` serve a trace by the policies asked for, and say what it cannot do?"""

import json
import sys

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000,
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
POLICY = "def newest(state, now):\n    return state.arrival_time_R - now\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a trace of a burst, a model's config and a policy."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "my_cli_policy.py").write_text(POLICY)
    lines = [
        json.dumps({
            "timestamp": 10 * i, "input_length": 1100, "output_length": 4,
            "hash_ids": [i % 2, 2 + i, 50 + i],
        })
        for i in range(40)
    ]  # fmt: skip
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_cli_policy", None)


def test_a_policy_of_ones_own_beside_a_shipped_one(helios, folder):
    code, out, err = helios(
        "simulate", "trace.jsonl", "--model", "model", "--gpu", "l4", "--policy", "fcfs",
        "--policy", "my_cli_policy:newest", "--load", "1.2", "--num-requests", "30",
        "--max-num-seqs", "4", "--ttft-target-seconds", "0.02", "--json", "runs.json",
    )  # fmt: skip
    assert code == 0, err
    fcfs, newest = json.loads((folder / "runs.json").read_text())
    assert [run["policy"] for run in (fcfs, newest)] == ["fcfs", "my_cli_policy:newest"]
    for run in (fcfs, newest):
        assert run["load"] == 1.2 and run["num_served"] == 30
        # All but the first two find the 512 tokens of their id; an L4 with 4 slots is busy.
        assert run["prefix_hit_rate"] >= 28 * 512 / (30 * 1100)
    assert newest["ttft_p50_seconds"] < fcfs["ttft_p50_seconds"]
    assert "newest" in out and "30 requests; recorded at a load of" in out


@pytest.mark.parametrize("arguments, message", [
    (["--policy", "lifo"], "policy='lifo': must be one of deadline"),
    (["--policy", "my_cli_policy:oldest"], "has no function 'oldest'"),
    (["--model", "gpt-5"], "model='gpt-5': must be one of llama-3-8b, llama-2-7b"),
    (["--gpu", "b2000"], "gpu='b2000'"),
    (["--kv-cache-dtype", "int2"], "kv_cache_dtype='int2': must be one of fp8, bfloat16"),
    (["--load", "-1"], "load=-1.0: must be above 0"),
    (["--num-requests", "0"], "num_requests=0"),
    (["--window-seconds", "0"], "window_seconds=0.0: must be above 0"),
    (["--json", "no/such/folder.json"], "its folder must exist"),
])  # fmt: skip
def test_what_cannot_be_is_refused(helios, folder, arguments, message):
    code, out, err = helios("simulate", "trace.jsonl", *arguments)
    assert code == 2 and message in err and not out


def test_a_trace_must_exist_and_have_a_known_form(helios, folder):
    code, _, err = helios("simulate", "trace.parquet")
    assert code == 2 and "must end in .csv" in err
    code, _, err = helios("simulate", "other.csv")
    assert code == 1 and "other.csv" in err


@pytest.mark.slow
def test_a_sweep_runs_all_combinations_and_finds_the_load_that_is_met(helios, folder):
    code, out, err = helios(
        "simulate", "trace.jsonl", "--model", "model", "--gpu", "l4", "--policy", "fcfs",
        "--policy", "deadline", "--num-requests", "16", "--max-num-seqs", "4", "--sweep",
        "--max-model-len", "2048", "--load", "0.01", "--load", "50", "--seed", "1", "--seed", "2",
        "--ttft-target-seconds", "0.002", "--kv-cache-bytes", "5e7", "--kv-cache-bytes", "2e7",
        "--json", "sweep.json",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads((folder / "sweep.json").read_text())
    assert len(report["runs"]) == 2 * 2 * 2 * 2 and report["seconds"] > 0
    assert {run["seed"] for run in report["runs"]} == {1, 2}
    pools = {run["kv_cache_blocks"] for run in report["runs"]}
    assert len(pools) == 2 and max(pools) == pytest.approx(2.5 * min(pools), rel=0.01)
    assert all(run["num_served"] == 16 for run in report["runs"])
    assert 0.01 < report["highest_load"]["fcfs"] < 50
    assert "16 lanes in" in out and "of the TTFT targets are met up to a load of" in out


def test_several_values_need_a_sweep(helios, folder):
    code, _, err = helios("simulate", "trace.jsonl", "--seed", "1", "--seed", "2")
    assert code == 2 and "several are compared with --sweep" in err
