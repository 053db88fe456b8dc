"""How does the report read? One Markdown file, and one HTML file with its pictures in it."""

import base64
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helios_jax.evidence.parts import PARTS, Inputs
from helios_jax.evidence.tables import SHIPPED, Cell, Table, ladder_parts, shipped_results

MARKDOWN, HTML, PICTURES = "report.md", "report.html", "pictures"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px }
th, td { border-bottom: 1px solid #ccc; padding: 3px 8px; text-align: left; vertical-align: top }
img { max-width: 100% } code { font-size: 12px }
"""


def write_pages(
    folder: Path, tables: list[Table], kept: Mapping[str, Mapping[str, Any]], inputs: Inputs
) -> tuple[Path, Path]:
    """Writes both, and what Markdown links to: pictures, and results that are shipped.

    The HTML has the pictures in it, where matplotlib is there, and says so where not.
    """
    text, drawn = to_markdown(tables, kept, inputs), pictures_of(kept)
    markdown, page = folder / MARKDOWN, folder / HTML
    page.write_text(to_html(text, drawn))
    for name, url in drawn.items():
        path = folder / PICTURES / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(base64.b64decode(url.partition(",")[2]))
        text = text.replace(f"(picture:{name})", f"({PICTURES}/{name}.png)")
    markdown.write_text(re.sub(r"!\[.*\]\(picture:.*\)\n", "", text))
    (folder / f"{SHIPPED}.json").write_text(json.dumps(shipped_results(), indent=1) + "\n")
    return markdown, page


def to_markdown(tables: list[Table], kept: Mapping[str, Mapping[str, Any]], inputs: Inputs) -> str:
    """The report; a picture is a line `![name](picture:name)`, which `to_html` fills in."""
    about = [part["circumstances"] for part in kept.values()]
    results = {name: part["result"] for name, part in kept.items()} | {SHIPPED: shipped_results()}
    lines = ["# What the source articles report, and what comes out here", ""]
    lines += [f"- {line}" for line in inputs.descriptions]
    for what in ("machine", "versions", "commit"):
        values = dict.fromkeys(str(each[what]) for each in about)
        lines.append(f"- {what}: {'; '.join(values)}")
    dates = sorted(each["date"] for each in about)
    if dates:
        lines.append(f"- measured from {dates[0]} to {dates[-1]}")
    for table in tables:
        lines += ["", f"## {table.title}", ""]
        if table.intro:
            lines += [table.intro, ""]
        lines += ["| | | article | here | what differs |", "|---|---|---|---|---|"]
        before, said = None, None
        for cell in table.cells:
            shown = "" if cell.row == before else cell.row
            before = cell.row
            link = _link(cell)
            result = results[cell.part]
            value = show(cell.value(result), cell.unit)
            if cell.is_lower_bound(result):
                value = f"at least {value}"
            saying = cell.differs if isinstance(cell.differs, str) else cell.differs(result)
            differs = "" if saying == said else saying
            said = saying
            lines.append(
                f"| {shown} | {cell.column} | {cell.article} | [{value}]({link}) | {differs} |"
            )
        if table.picture is not None:
            lines += ["", f"![{table.title}](picture:{table.picture})"]
        if table.closing is not None and all(cell.part in results for cell in table.cells):
            lines += ["", table.closing(results)]
    lines += ["", "## Commands", "", "| part | command | date | commit | seconds |"]
    lines.append("|---|---|---|---|---|")
    for name, part in kept.items():
        each = part["circumstances"]
        lines.append(
            f"| [{name}]({PARTS}/{name}.json) | `{each['command']}` | {each['date']} | "
            f"{each['commit']} | {part['seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def show(value: float | None, unit: str) -> str:
    """A number with its unit, for people."""
    if value is None:
        return "–"
    if unit == "%":
        return f"{value:.1%}"
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def pictures_of(kept: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Data URLs by name; empty where matplotlib is missing."""
    try:
        from helios_jax import plots
    except ImportError:
        return {}
    drawn = {}
    results = {name: part["result"] for name, part in kept.items()}
    rows = [row for part in ladder_parts(results) for row in part["ladder"]]
    if rows:
        reports = {row["name"]: row["report"] for row in rows}
        drawn["ladder"] = plots.as_data_url(plots.replay_picture(reports))
    for name, draw in (("profile", plots.profile_picture), ("sweep", plots.sweep_picture)):
        if name in kept:
            drawn[name] = plots.as_data_url(draw(results[name]))
    return drawn


def to_html(markdown: str, pictures: Mapping[str, str]) -> str:
    """The subset of Markdown that `to_markdown` writes, as a page that needs no other file."""
    body: list[str] = []
    block: list[str] = []

    def flush() -> None:
        if not block:
            return
        if block[0].startswith("|"):
            body.append(_table(block))
        elif block[0].startswith("- "):
            items = "".join(f"<li>{_inline(line[2:])}</li>" for line in block)
            body.append(f"<ul>{items}</ul>")
        else:
            body.append(f"<p>{_inline(' '.join(block))}</p>")
        block.clear()

    for line in markdown.splitlines():
        heading = re.match(r"(#+) (.*)", line)
        picture = re.match(r"!\[(.*)\]\(picture:(.*)\)", line)
        if heading or picture or not line:
            flush()
        if heading:
            level = len(heading[1])
            body.append(f"<h{level}>{_inline(heading[2])}</h{level}>")
        elif picture:
            url = pictures.get(picture[2])
            alt = html.escape(picture[1])
            body.append(
                f'<img alt="{alt}" src="{url}">'
                if url
                else f"<p>(no picture of {alt}: pip install 'helios-jax[plots]')</p>"
            )
        elif line:
            block.append(line)
    flush()
    head = f'<meta charset="utf-8"><title>HELIOS-JAX: evidence</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _table(lines: list[str]) -> str:
    rows = []
    for number, line in enumerate(lines):
        if number == 1:
            continue
        tag = "th" if number == 0 else "td"
        cells = line.strip("|").split("|")
        rows.append("".join(f"<{tag}>{_inline(cell.strip())}</{tag}>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _inline(text: str) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]*)\*\*", r"<b>\1</b>", text)
    return re.sub(r"\[([^\]]*)\]\(([^)]*)\)", r'<a href="\2">\1</a>', text)


def _link(cell: Cell) -> str:
    if cell.part == SHIPPED:
        return f"{SHIPPED}.json"
    return f"{PARTS}/{cell.part}.json"
