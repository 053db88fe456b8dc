"""Does the benchmark of speculation ask what the file holds, count right and show what it found?"""

import json

import pytest

from helios_jax import SamplingParams
from helios_jax.bench import SpeculationWorkload, speculation_worker, tables
from helios_jax.bench.speculation import read_prompts, summarise
from helios_jax.speculative import FixedLength, PromptLookup, Speculation
from tests.checkpoints.tiny_checkpoints import EOS, random_weights, tiny_config, write_huggingface
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
        ([{"prompt": ""}], {}, "prompts.jsonl:1: asks nothing"),
        ([{"prompt": "x", "category": "all"}], {}, "prompts.jsonl:1: category='all'"),
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
        "acceptance": speculation_worker._by_position(engines["speculative"]), "prompts": prompts,
    }  # fmt: skip
    text = text_of(tables.speculation_table(report))
    assert f"{rows[0]['ratio']:.2f}x" in text and "COMPILED" not in text
    described = tables.describe_speculation(report)
    assert "accepted by place in the draft: " in described[0] and len(described) == 2
    prompts[0]["difference"] = {"index": 3, "margin": 0.25}
    assert "1 greedy outputs differ" in tables.describe_speculation(report)[2]


def test_answers_that_end_at_their_first_token_have_no_rate():
    side = {"num_tokens": 1, "ttft_seconds": 0.5, "total_seconds": 0.5, "num_draft_tokens": 0,
            "num_accepted_tokens": 0, "num_verifications": 0, "num_rounds": 0}  # fmt: skip
    prompt = {"category": "c", "plain": side, "speculative": side, "is_equal": True,
              "is_compiled": False}  # fmt: skip
    (row,) = summarise([prompt, prompt])
    assert (row["plain_rate"], row["rate"], row["ratio"]) == (None, None, None)
    assert row["total_ratio"] == 1 and row["num_equal"] == 2
    workload = {"model": "m", "output_tokens": 2, "temperature": 0.0, "speculative_config": {}}
    text = text_of(tables.speculation_table({"workload": workload, "categories": [row]}))
    assert "1.00x" in text and "None" not in text


def test_the_margin_of_a_first_difference_is_that_of_the_logits_there():
    engine = make_engine()
    prompt = [5, 6, 7, 8]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    [output] = engine.generate([prompt], [params])
    ids = list(output.outputs[0].token_ids)
    other = [*ids[:3], ids[3] + 1, *ids[4:]]
    found = speculation_worker.first_difference(engine, prompt, ids, other)
    first, second = sorted(
        (each.logprob for each in output.outputs[0].logprobs[3].values()), reverse=True
    )
    assert found["index"] == 3 and found["margin"] == pytest.approx(first - second, abs=1e-4)
    assert speculation_worker.first_difference(engine, prompt, ids, ids[:2])["index"] == 2


def test_a_rule_is_called_by_its_name():
    text = speculation_worker.describe(Speculation(PromptLookup(2, 1), 3, FixedLength()))
    assert text.startswith("Speculation(proposer=PromptLookup(max_ngram=2")
    assert "rule=accept, " in text and " at 0x" not in text


def test_both_engines_stop_where_a_loaded_model_does(tmp_path, monkeypatch):
    """At the end of sequence that the tokenizer alone knows, too; and they share the weights."""
    config = tiny_config()
    folder = write_huggingface(
        tmp_path / "model", config, random_weights(config), changes={"eos_token_id": 7}
    )
    seen = {}
    monkeypatch.setattr(speculation_worker, "compare", lambda engines, *_: seen.update(engines))
    monkeypatch.setattr(speculation_worker, "_by_position", lambda engine: [])
    job = {
        "model": str(folder), "dtype": "float32", "kv_cache_dtype": "auto",
        "speculative_config": {"method": "ngram", "controller": "fixed"},
    }  # fmt: skip
    found = speculation_worker.measure(job, print)
    assert "controller=FixedLength()" in found["speculation"]
    plain, ours = seen["plain"], seen["speculative"]
    assert plain.form is ours.form and plain.config == ours.config
    for engine in (plain, ours):
        assert engine.model_config.eos_token_ids == (7, EOS)
    with pytest.raises(ValueError, match="drafts nothing"):
        job["speculative_config"] |= {"num_speculative_tokens": 0}
        speculation_worker.measure(job, print)
