"""Is the report made of what commands gave, repeatable, and whole without other files?"""

import json
import re
import shutil
from pathlib import Path

import pytest

from helios_jax import evidence
from helios_jax.evidence import (
    article,
    kept_inputs,
    kept_parts,
    make_inputs,
    parts_of,
    recheck,
    run_part,
    tables_of,
    write_pages,
)
from helios_jax.evidence.pages import to_html, to_markdown
from helios_jax.evidence.parts import _key
from helios_jax.evidence.tables import shipped_results

ABOUT = {
    "command": "helios x", "commit": "abc", "versions": {"jax": "0"}, "machine": {"cpu": "c"},
    "date": "2026-01-01 00:00 UTC",
}  # fmt: skip


def kept(result, is_measured=False, name="x"):
    return {
        "name": name, "title": "t", "is_measured": is_measured, "circumstances": ABOUT,
        "seconds": 1.0, "result": result, "arguments": [],
    }  # fmt: skip


@pytest.fixture
def inputs(tmp_path):
    return make_inputs(tmp_path, model="smollm2-135m")


def ladder_parts(figures, weights="int4 on gpu: int4 weights"):
    keys = ("median_ttft_ms", "p95_ttft_ms", "median_user_tokens_per_second", "output_throughput")
    return {
        f"ladder_{number}": kept({
            "ladder": [{
                "name": name, "article": name,
                "report": dict(zip(keys, row, strict=True))
                | {"acceptance_rate": 0.5, "ttfts": [0.1, 0.2], "weights": weights},
            }]
        }, True)
        for number, (name, row) in enumerate(figures.items())
    }  # fmt: skip


def test_inputs_are_made_where_none_are_given_and_named(tmp_path, inputs):
    assert (tmp_path / inputs.trace).read_text().startswith("TIMESTAMP,ContextTokens")
    assert "statement" in (tmp_path / inputs.text).read_text()
    assert any("generated requests" in line for line in inputs.descriptions)
    mine = tmp_path / "mine.txt"
    mine.write_text("some text")
    given = make_inputs(tmp_path, model="m", text=mine, draft="folder/d")
    assert (tmp_path / given.text).read_text() == "some text"
    assert "text: mine.txt" in given.descriptions and "draft: d" in given.descriptions
    with pytest.raises(ValueError, match="trace='.*none.csv': is no file"):
        make_inputs(tmp_path, model="m", trace=tmp_path / "none.csv")


def test_every_cell_names_a_part_that_is_run(inputs):
    names = [part.name for part in parts_of(inputs, quick=False)]
    assert len(names) == len(set(names))
    all_cells = [cell for table in tables_of(names) for cell in table.cells]
    assert {cell.part for cell in all_cells} == {*names, "shipped"}
    for part in parts_of(inputs, quick=True):
        assert part.name in names


def test_our_number_stands_beside_theirs_with_a_link_and_a_verdict(inputs):
    # Ours does what theirs does, but speculation, which slows ours.
    figures = {name: [float(x) for x in row] for name, row in article.LADDER.items()}
    figures["+ speculative decoding (gamma 4)"][2] = 19.0
    figures["+ priority-aware paged batching"][2] = 19.1
    parts = ladder_parts(figures)
    text = to_markdown(tables_of(list(parts)), parts, inputs)
    assert "| 412 | [412 ms](parts/ladder_0.json) |" in text
    assert "median tok/s per user x2.00 there, x0.50 here: contradicted" in text
    assert "x0.89 there, x1.01 here: not seen" in text
    assert "tok/s in all x1.13 there, x1.13 here: supported" in text
    assert "| [ladder_4](parts/ladder_4.json) | `helios x` |" in text
    # What was measured before and shipped stands in any report.
    assert "Quantised weights" in text
    page = to_html(text, {"ladder": "data:image/png;base64,AA"})
    assert page.count("<table>") == text.count("|---|---|---|---|---|")
    assert '<img alt="The ladder, measured here" src="data:image/png;base64,AA">' in page
    assert not re.findall(r'(?:src|href)="https?:', page)
    assert "no picture of" in to_html(text, {})


def test_what_a_cpu_serves_says_nothing_about_4_bit_weights(inputs):
    figures = {name: [float(x) for x in row] for name, row in article.LADDER.items()}
    parts = ladder_parts(figures, weights="int8 on cpu: int8 weights")
    text = to_markdown(tables_of(list(parts)), parts, inputs)
    (line,) = [line for line in text.splitlines() if line.startswith("- **+ AWQ 4-bit")]
    assert "no verdict, served is int8 on cpu: int8 weights; median TTFT, ms x0.89 there" in line
    assert "supported" not in line
    assert "- **+ GQA + FP8 KV**: median TTFT, ms x0.87 there, x0.87 here: supported" in text
    assert "compare the ratios; int8 on cpu: int8 weights |" in text


def test_the_end_of_a_sweep_is_a_lower_bound(inputs):
    runs = [{"policy": policy, "load": load, "ttft_met": 1.0, "ttft_p95_seconds": None}
            for policy in ("deadline", "fcfs", "priority") for load in (0.5, 1.1)]  # fmt: skip
    loads = {"deadline": 1.1, "fcfs": 0.83, "priority": None}
    parts = {"sweep": kept({"runs": runs, "highest_load": loads, "wanted": 0.95})}
    text = to_markdown(tables_of(["sweep"]), parts, inputs)
    assert "| [at least 1.1](parts/sweep.json) |" in text
    assert "| [0.83](parts/sweep.json) |" in text and "| [–](parts/sweep.json) |" in text


def test_waits_that_never_end_leave_cells_empty(tmp_path, inputs):
    """A trace of which requests are refused gives infinite waits, which the JSON has as null."""
    run = {"ttft_p50_seconds": 0.1, "ttft_p95_seconds": None, "tpot_p50_seconds": None,
           "capacity_tokens_per_second": 9.0, "preemption_rate": 0.5}  # fmt: skip
    sweep = [{"policy": "fcfs", "load": 0.5, "ttft_met": 0.5, "ttft_p95_seconds": None}]
    highest = dict.fromkeys(("deadline", "fcfs", "priority"))
    parts = {
        "predicted_0": kept([run]), "predicted_1": kept([run | {"ttft_p95_seconds": 0.2}]),
        "pressure": kept([run, run | {"ttft_p95_seconds": 0.2}]),
        "sweep": kept({"runs": sweep, "highest_load": highest, "wanted": 0.95}),
    }  # fmt: skip
    markdown, _ = write_pages(tmp_path, tables_of(list(parts)), parts, inputs)
    assert markdown.read_text().count("[–]") == 2 + 1 + 1 + 3


def test_a_rounding_is_set_beside_awq_as_the_article_does():
    (weights,) = [table for table in tables_of([]) if table.name == "weights"]
    awq, rounding = (cell.value(shipped_results()) for cell in weights.cells[:2])
    models = shipped_results()["weights_4bit.json"]["models"]
    means = {
        name: sum(text["perplexity"] for text in model["texts"].values()) / len(model["texts"])
        for model in models
        for name in [model["model"].partition("-")[0]]
    }
    assert rounding == pytest.approx(means["rtn"] - means["awq"])
    assert awq == pytest.approx(means["awq"] - means["smollm2"])
    assert [cell.article for cell in weights.cells[:2]] == ["under 0.3", "0.1 to 0.2"]


def test_the_pages_need_no_file_that_is_not_written(tmp_path, inputs):
    figures = {name: [float(x) for x in row] for name, row in article.LADDER.items()}
    parts = ladder_parts(figures)
    markdown, page = write_pages(tmp_path, tables_of(list(parts)), parts, inputs)
    linked = set(re.findall(r"\]\(([^)]*)\)", markdown.read_text()))
    assert {"shipped.json", "parts/ladder_0.json"} <= linked
    for link in linked - {f"parts/{name}.json" for name in parts}:
        assert (tmp_path / link).is_file(), link
    assert "picture:" not in page.read_text()


def test_shipped_results_have_the_models_that_the_table_asks_for():
    (weights,) = [table for table in tables_of([]) if table.name == "weights"]
    values = [cell.value(shipped_results()) for cell in weights.cells]
    assert all(value is not None and 0 < value < 100 for value in values)


def test_a_part_is_kept_checked_and_found_out(tmp_path, inputs):
    (part,) = [p for p in parts_of(inputs, quick=True) if p.name == "bytes_gqa8"]
    first = run_part(part, tmp_path)
    assert first["circumstances"]["command"].startswith("helios profile llama-2-7b-gqa")
    # 2 x 32 layers x 8 heads x 128 x 2048 tokens at a byte.
    assert first["result"]["bytes"]["kv_read"] == pytest.approx(134_217_728, rel=1e-5)
    said = []
    assert run_part(part, tmp_path, said.append) == first and said == ["bytes_gqa8: kept"]
    assert "/" not in json.dumps(first["circumstances"]["machine"])
    tables = tables_of(["bytes_gqa8"])
    results = recheck(tables, {"bytes_gqa8": first}, tmp_path, number=2, seed=0)
    assert len(results) == 2 and all(each.agrees for each in results)
    for key in first["result"]["bytes"]:
        first["result"]["bytes"][key] *= 1.1
    first["result"]["kv_share"] *= 1.1
    (wrong,) = recheck(tables, {"bytes_gqa8": first}, tmp_path, number=1, seed=0)
    assert not wrong.agrees and wrong.found == pytest.approx(wrong.reported / 1.1)


def test_one_part_anew_leaves_the_others_in_the_report_which_is_checked_without_its_inputs(
    helios, tmp_path
):
    out = tmp_path / "report"
    for name in ("bytes_gqa8", "bytes_gqa16"):
        code, _, err = helios("evidence", "--out", str(out), "--part", name)
        assert code == 0, err
    text = (out / "report.md").read_text()
    assert "parts/bytes_gqa8.json" in text and "parts/bytes_gqa16.json" in text
    shutil.rmtree(out / "inputs")
    code, printed, err = helios("evidence", "--out", str(out), "--check", "--seed", "1")
    assert code == 0 and printed.count(": agrees") == 3, err
    assert (out / "inputs" / "reference.txt").is_file()
    code, _, err = helios("evidence", "--out", str(out), "--part", "profile", "--model", "other")
    assert code == 2 and "leave --part out, or name another folder" in err
    code, _, err = helios("evidence", "--out", str(tmp_path / "none"), "--check")
    assert code == 2 and "holds no report" in err


def test_local_models_are_linked_and_retraining_a_draft_is_seen(tmp_path, monkeypatch):
    for name in ("mine", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(name)
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    made = make_inputs(out, model="mine", draft=str(tmp_path / "draft"))
    assert (made.model, made.draft) == ("inputs/model/mine", "inputs/draft/draft")
    assert (out / made.draft / "manifest.json").read_text() == "draft"
    assert {"model: mine", "draft: draft"} <= set(made.descriptions)
    (part,) = [each for each in parts_of(made, True) if each.name == "ladder_3"]
    assert str(tmp_path) not in " ".join(part.arguments)
    keys = [_key(part, out)]
    monkeypatch.chdir("/")
    assert kept_inputs(out) == made and _key(part, out) == keys[0]
    (tmp_path / "draft" / "manifest.json").write_text("retrained")
    assert _key(part, out) != keys[0]
    shutil.rmtree(tmp_path / "draft")
    arguments = (out / "inputs.json").read_text()
    with pytest.raises(ValueError, match="draft='inputs/draft/draft': what it links to .* is gone"):
        kept_inputs(out)
    assert (out / "inputs.json").read_text() == arguments
    # A known name is no folder of that name.
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert make_inputs(out, model="smollm2-135m").model == "smollm2-135m"


def test_the_shipped_report_is_what_its_parts_make_today(tmp_path):
    """But for pictures, which differ with matplotlib's version."""
    folder = Path(evidence.__file__).parent / "results"
    shutil.copytree(folder, tmp_path / "report")
    inputs = kept_inputs(tmp_path / "report")
    names = [each.name for each in parts_of(inputs, False)]
    parts = kept_parts(tmp_path / "report", names)
    assert {f"{name}.json" for name in parts} == {p.name for p in (folder / "parts").iterdir()}
    markdown, _ = write_pages(tmp_path / "report", tables_of(list(parts)), parts, inputs)

    def lines(text):
        return [line for line in text.splitlines() if line and not line.startswith("![")]

    assert lines(markdown.read_text()) == lines((folder / "report.md").read_text())


def test_a_command_that_fails_says_why(tmp_path, inputs):
    (part,) = [p for p in parts_of(inputs, quick=True) if p.name == "bytes_gqa8"]
    bad = type(part)("bad", ("profile", "llama-2-7b", "--gpu", "abacus"), False, "t")
    with pytest.raises(RuntimeError, match="gpu='abacus': must be one of"):
        run_part(bad, tmp_path)
    assert not (tmp_path / "parts" / "bad.json").exists()
