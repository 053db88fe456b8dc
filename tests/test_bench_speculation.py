"""Does the benchmark of speculation ask what the file holds, count right and show what it found?"""

import json

import pytest

from helios_jax.bench import SpeculationWorkload, speculation_worker, tables
from helios_jax.bench.speculation import read_prompts, summarise
from helios_jax.speculative import FixedLength, PromptLookup, Speculation
from tests.engine.conftest import make_engine
from tests.test_bench import text_of

LINES = [
    {"category": "sums", "turns": ["What is 1 + 1?", "And 2 + 2?"]},
    {"category": "sums", "prompt": "1, 2, 3, 1, 2, 3, 1, 2,"},
    {"prompt": "abc abc abc abc abc"},
    {"category": "sums", "messages": [{"role": "user", "content": "Count."}]},
]


def write(path, lines):
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def test_requests_of_a_file(tmp_path):
    file = write(tmp_path / "prompts.jsonl", LINES)
    found = read_prompts(SpeculationWorkload(prompts=file))
    assert [request["category"] for request in found] == ["sums", "sums", "prompt", "sums"]
    assert found[0]["messages"] == [{"role": "user", "content": "What is 1 + 1?"}]
    assert found[3]["messages"] == LINES[3]["messages"]
    some = read_prompts(SpeculationWorkload(prompts=file, categories=("sums",), limit=2))
    assert some == [found[0], found[1]]


@pytest.mark.parametrize(
    "lines, options, message",
    [
        ([{"text": "x"}], {}, "prompts.jsonl:1: must have `prompt`"),
        ([["x"]], {}, "prompts.jsonl:1: must be a JSON object"),
        (LINES, {"categories": ("maths",)}, "category='maths': .* has prompt, sums"),
        ([], {}, "holds no prompt"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, lines, options, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(
            SpeculationWorkload(prompts=write(tmp_path / "prompts.jsonl", lines), **options)
        )


def test_limits_that_make_no_sense():
    with pytest.raises(ValueError, match="output_tokens=1: must be at least 2"):
        SpeculationWorkload(prompts="x", output_tokens=1)
    with pytest.raises(ValueError, match="limit=0: must be at least 1"):
        SpeculationWorkload(prompts="x", limit=0)


def test_both_engines_serve_every_prompt_and_nothing_compiles_while_timed(tmp_path):
    file = write(tmp_path / "prompts.jsonl", LINES[1:3])
    engines = {
        "plain": make_engine(enable_prefix_caching=False),
        "speculative": make_engine(
            enable_prefix_caching=False,
            speculation=Speculation(PromptLookup(2, 1), 3, FixedLength()),
        ),
    }
    requests = read_prompts(SpeculationWorkload(prompts=file))
    job = {"requests": requests, "output_tokens": 24, "temperature": 0.0, "seed": 0}
    told = []
    prompts = speculation_worker.compare(engines, job, told.append)
    assert [p["category"] for p in prompts] == ["sums", "prompt"] and len(told) == 2
    assert all(p["is_equal"] and not p["is_compiled"] for p in prompts)
    for prompt in prompts:
        plain, ours = prompt["plain"], prompt["speculative"]
        assert plain["num_tokens"] == ours["num_tokens"] == plain["num_rounds"] + 1
        assert ours["num_rounds"] + ours["num_accepted_tokens"] + 1 == ours["num_tokens"]
        assert plain["num_draft_tokens"] == 0 < ours["num_draft_tokens"]
        assert 0 < ours["ttft_seconds"] < ours["total_seconds"]
    rows = summarise(prompts)
    assert [row["category"] for row in rows] == ["sums", "prompt", "all"]
    assert rows[2]["num_draft_tokens"] == sum(row["num_draft_tokens"] for row in rows[:2])
    ours, plain = ([p[side] for p in prompts] for side in ("speculative", "plain"))
    seconds = [sum(p["total_seconds"] - p["ttft_seconds"] for p in side) for side in (ours, plain)]
    # Both drew as many tokens, so the rates' ratio is that of the times.
    assert rows[2]["ratio"] == pytest.approx(seconds[1] / seconds[0])
    workload = {
        "model": "tiny", "output_tokens": 24, "temperature": 0.0,
        "speculative_config": {"method": "ngram"},
    }  # fmt: skip
    report = {
        "workload": workload, "categories": rows, "versions": {"jax": "1"}, "weights": "float32",
        "acceptance": speculation_worker._by_position(engines["speculative"]),
    }  # fmt: skip
    text = text_of(tables.speculation_table(report))
    assert f"{rows[0]['ratio']:.2f}x" in text and "COMPILED" not in text
    assert "accepted by place in the draft: " in tables.describe_speculation(report)[0]
