"""Is the report made of what commands gave, repeatable, and whole without other files?"""

import json
import re

import pytest

from helios_jax.evidence import (
    article,
    make_inputs,
    parts_of,
    recheck,
    run_part,
    tables_of,
    write_pages,
)
from helios_jax.evidence.pages import to_html, to_markdown
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


def ladder_parts(figures):
    keys = ("median_ttft_ms", "p95_ttft_ms", "median_user_tokens_per_second", "output_throughput")
    return {
        f"ladder_{number}": kept({
            "ladder": [{
                "name": name, "article": name,
                "report": dict(zip(keys, row, strict=True))
                | {"acceptance_rate": 0.5, "ttfts": [0.1, 0.2]},
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


def test_a_command_that_fails_says_why(tmp_path, inputs):
    (part,) = [p for p in parts_of(inputs, quick=True) if p.name == "bytes_gqa8"]
    bad = type(part)("bad", ("profile", "llama-2-7b", "--gpu", "abacus"), False, "t")
    with pytest.raises(RuntimeError, match="gpu='abacus': must be one of"):
        run_part(bad, tmp_path)
    assert not (tmp_path / "parts" / "bad.json").exists()
