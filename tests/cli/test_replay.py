"""Does `helios replay` send a trace, report in vLLM's names, and climb the ladder in order?"""

import json
from types import SimpleNamespace

import pytest

import checkpoints_conv
from helios_jax import hub
from helios_jax.bench import ladder
from helios_jax.bench import replay as replaying
from helios_jax.bench.replay import Serving, Traffic
from helios_jax.outputs import StreamOutput
from helios_jax.replay.calibration import StepCosts, to_json
from helios_jax.replay.report import TABLE
from tests import tiny
from tests.checkpoints.tiny_checkpoints import EOS, random_weights, tiny_config, write_huggingface

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:00:00,40,3
2023-11-16 18:00:00.1,900,2
2023-11-16 18:00:00.2,8,5
2023-11-16 18:30:00,8,5
"""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def test_a_window_is_replayed_on_a_model(helios, trace, tmp_path, monkeypatch):
    monkeypatch.setattr(Serving, "load", lambda self: tiny.llm(max_num_seqs=1))
    monkeypatch.setattr(replaying, "warm_up", lambda engine, requests: None)
    report_path, table_path = tmp_path / "report.json", tmp_path / "table.md"
    costs = tmp_path / "costs.json"
    limits = tiny.llm(max_num_seqs=1).engine.scheduler_config
    # A second a step: far slower than the engine, so that nothing overlaps.
    slow = StepCosts(1.0, 0, 0, 0, 0, 0, 0, limits.max_num_batched_tokens)
    costs.write_text(json.dumps(to_json(slow, limits)))
    code, out, err = helios(
        "replay", trace, "tiny", "--window-seconds", "60", "--time-stretch", "0.5",
        "--max-prompt", "60", "--max-model-len", "512", "--goodput", "e2el:1000000",
        "--json", str(report_path), "--markdown", str(table_path), "--predict", str(costs),
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(report_path.read_text())
    assert report["completed"] == report["num_prompts"] == 3 and report["failed"] == 0
    assert report["input_lens"] == [40, 60, 8] and report["output_lens"] == [3, 2, 5]
    assert report["total_output_tokens"] == 10
    assert report["request_goodput"] == pytest.approx(report["request_throughput"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "p95", "p99"):
            assert report[f"{statistic}_{name}_ms"] > 0
    assert report["traffic"]["seconds"] == pytest.approx(0.1)
    simulated = report["predicted"]
    # Chunks of 32 tokens, one row: the first takes two steps, and one for its two later tokens.
    assert simulated["num_served"] == 3 and simulated["num_events"] >= 8
    assert simulated["ttft_p50_seconds"] >= 3
    assert simulated["ratios"]["median_ttft"] == pytest.approx(
        1e3 * simulated["ttft_p50_seconds"] / report["median_ttft_ms"]
    )
    assert report["num_new_programs"] > 0 and "programs compiled while it ran" in out
    assert all(title in table_path.read_text() for title in TABLE.values())


def test_a_run_too_short_to_fit_costs_to_is_reported_all_the_same(
    helios, trace, tmp_path, monkeypatch
):
    monkeypatch.setattr(Serving, "load", lambda self: tiny.llm(max_num_seqs=1))
    monkeypatch.setattr(replaying, "warm_up", lambda engine, requests: None)
    path = tmp_path / "report.json"
    code, _, err = helios(
        "replay", trace, "tiny", "--window-seconds", "0.05", "--max-model-len", "512",
        "--json", str(path), "--costs", str(tmp_path / "costs.json"),
    )  # fmt: skip
    assert code == 2 and "steps are too few to fit" in err
    assert json.loads(path.read_text())["completed"] == 1
    assert not (tmp_path / "costs.json").exists()


def test_a_running_server_is_replayed_to(helios, trace, tmp_path, monkeypatch):
    asked = []

    class Server:
        def __init__(self, address):
            asked.append(address)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def stream(self, prompt, *, max_tokens, **options):
            asked.append(len(prompt))
            for i in range(max_tokens):
                yield StreamOutput("", [1], "length" if i == max_tokens - 1 else None)

    monkeypatch.setattr("helios_jax.server.client.Client", Server)
    monkeypatch.setattr(hub, "resolve", lambda name: name)
    checkpoint = SimpleNamespace(tokenizer=tiny.tokenizer())
    monkeypatch.setattr(checkpoints_conv, "open_checkpoint", lambda path: checkpoint)
    path = tmp_path / "report.json"
    code, out, err = helios(
        "replay", trace, "m", "--server", "host:1", "--window-seconds", "60", "--max-prompt", "60",
        "--max-model-len", "512", "--json", str(path),
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(path.read_text())
    assert report["completed"] == 3 and report["output_lens"] == [3, 2, 5]
    assert asked[0] == "host:1" and sorted(asked[1:]) == [8, 40, 60]
    assert report["backend"] == "helios-server" and "0 failed" in out


@pytest.mark.parametrize("arguments, message", [
    (["--server", "h:1", "--ladder"], "server: has one configuration"),
    (["--sample", "0"], "sample=0.0"),
    (["--sample", "1.5"], "sample=1.5"),
    (["--max-prompt", "0"], "max_prompt=0: must be at least 1"),
    (["--time-stretch", "-1"], "time_stretch=-1.0: must be above 0"),
    (["--length-scale", "0"], "length_scale=0.0"),
    (["--max-prompt", "1000", "--max-output", "500"], "exceed max_model_len=1024"),
    (["--start-seconds", "9000"], "holds no requests"),
    (["--goodput", "ttft"], "goodput='ttft': must be ttft:MS"),
    (["--row", "1"], "row, quantised: are for --ladder"),
    (["--ladder", "--row", "6"], "row=[6]: must be in 1..5"),
    (["--ladder", "--costs", "c.json"], "of which row?"),
    (["--costs", "c.json", "--prompt-lookup", "4"], "costs, predict: are of plain decoding"),
    (["--predict", "c.json", "--draft", "d"], "costs, predict: are of plain decoding"),
    (["--json", "no/such/folder.json"], "its folder must exist"),
    (["--prompt-lookup", "3", "--draft", "x"], "one of them says who drafts"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_a_model_is_loaded(helios, trace, arguments, message):
    code, out, err = helios("replay", trace, "no-such-model", *arguments)
    assert code == 2 and message in err and not out


def test_what_serves_a_trace_stops_where_a_loaded_model_does(tmp_path):
    config = tiny_config()
    folder = write_huggingface(
        tmp_path, config, random_weights(config), changes={"eos_token_id": 7}
    )
    llm = Serving(str(folder), dtype="float32", num_kv_heads=4, policy="fcfs").load()
    assert llm.config.eos_token_ids == (7, EOS) and llm.config.num_kv_heads == 4
    # No longer than the model's own.
    assert llm.max_model_len == config.max_model_len


def test_the_ladder_keeps_what_the_rows_before_brought(monkeypatch):
    served = []

    def fake(traffic, serving, **options):
        served.append(serving)
        number = len(served)
        report = {
            "median_ttft_ms": 100.0 * number, "p95_ttft_ms": 200.0,
            "median_user_tokens_per_second": 10.0 / number, "output_throughput": 5.0,
            "is_interrupted": False, "traffic": {},
        }  # fmt: skip
        return SimpleNamespace(report=report)

    monkeypatch.setattr(ladder, "replay_trace", fake)
    monkeypatch.setattr(hub, "resolve", lambda name: name)
    checkpoint = SimpleNamespace(config=tiny.config())
    monkeypatch.setattr(checkpoints_conv, "open_checkpoint", lambda path: checkpoint)
    report = ladder.run_ladder(
        Traffic("t.csv"), Serving("m", speculative_config={"model": "d"}), quantised="m4"
    )  # fmt: skip
    assert [row.num_kv_heads for row in served] == [4, 4, None, None, None]
    assert [row.model for row in served] == ["m", "m4", "m4", "m4", "m4"]
    assert [row.kv_cache_dtype for row in served] == ["bfloat16"] * 2 + ["fp8_e4m3"] * 3
    assert [row.speculative_config for row in served] == [None] * 3 + [{"model": "d"}] * 2
    assert [row.policy for row in served] == ["fcfs"] * 4 + ["deadline"]
    assert [row["ratios"]["median_ttft_ms"] for row in report["ladder"]] == [1, 2, 3, 4, 5]
    table = ladder.ladder_markdown(report)
    assert "| + speculative decoding | 4.00x | 1.00x | 0.25x | 1.00x |" in table
    some = ladder.run_ladder(Traffic("t.csv"), Serving("m"), rows=(0, 3))
    names = [row["name"] for row in report["ladder"]]
    assert len(served) == 7 and [row["name"] for row in some["ladder"]] == names[::3]


def test_prompt_lookup_drafts_where_nobody_is_named():
    rows = ladder.steps(9, "m", ladder.DEFAULT_DRAFT)
    assert rows[3].changes["speculative_config"]["method"] == "ngram"
    assert [row.article for row in rows][0] == "FP16 + MHA + greedy"
