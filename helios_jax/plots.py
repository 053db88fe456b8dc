"""How do the reports look? One picture each, drawn with matplotlib, which is an optional extra.

Functions take a report as its JSON has it and return a matplotlib Figure; no window is opened, no
backend chosen.
"""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from helios_jax.profiler import PARTS

# Okabe and Ito's palette: told apart by everybody.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")


def save(figure: Figure, path: str | Path) -> None:
    """Writes the picture; the file's ending says in which format."""
    figure.savefig(path, dpi=150, bbox_inches="tight")


def as_data_url(figure: Figure) -> str:
    """The picture as a URL that a page may embed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight", metadata={"Software": ""})
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def profile_picture(report: Mapping[str, Any]) -> Figure:
    """Where a decode round's bytes go, and how its time compares with the floor."""
    has_times = "measured" in report
    figure = Figure(figsize=(9, 4.2 if has_times else 3.4))
    bytes_axes, time_axes = figure.subplots(2, 1, gridspec_kw={"height_ratios": [1, 2]})
    left = 0.0
    for (part, title), color in zip(PARTS.items(), COLORS, strict=True):
        megabytes = report["bytes"][part] / 1e6
        share = report["bytes"][part] / report["total_bytes"]
        bytes_axes.barh([0], [megabytes], left=left, color=color, label=f"{title} {share:.1%}")
        left += megabytes
    bytes_axes.set_yticks([])
    bytes_axes.set_xlabel("MB moved a round")
    bytes_axes.set_title(
        f"{report['model']}: {report['num_rows']} rows, {report['context_tokens']} tokens each"
    )
    bytes_axes.legend(ncols=4, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.25))
    bars: list[tuple[str, float, str]] = []
    if has_times:
        measured = report["measured"]
        bars.append(("here, measured", measured["round_seconds"], COLORS[5]))
        bars.append(("here, at full bandwidth", measured["floor_seconds"], COLORS[0]))
    bars += [(gpu["name"], gpu["seconds"], COLORS[4]) for gpu in report["gpus"].values()]
    names, seconds, colors = zip(*reversed(bars), strict=True)
    drawn = time_axes.barh(names, [1e3 * s for s in seconds], color=colors)
    time_axes.bar_label(drawn, fmt="%.3g ms", padding=3, fontsize=8)
    time_axes.set_xscale("log")
    time_axes.margins(x=0.15)
    time_axes.set_xlabel("ms a round (log scale); GPUs predicted from data sheets")
    figure.tight_layout()
    return figure


def replay_picture(reports: Mapping[str, Mapping[str, Any]]) -> Figure:
    """How long first tokens took, as a distribution, and tokens/s by run."""
    figure = Figure(figsize=(10, 3.8))
    waits, rates = figure.subplots(1, 2)
    for number, (name, report) in enumerate(reports.items()):
        ttft = sorted(seconds for seconds in report["ttfts"] if seconds is not None)
        share = [(i + 1) / len(ttft) for i in range(len(ttft))]
        waits.plot(ttft, share, color=COLORS[number % len(COLORS)], label=name)
    waits.set_xscale("log")
    waits.set_xlabel("seconds to the first token")
    waits.set_ylabel("share of requests")
    waits.grid(alpha=0.3)
    waits.legend(fontsize=7)
    names = list(reports)
    places = range(len(names))
    for offset, (key, title) in enumerate(
        (("median_user_tokens_per_second", "of a user"), ("output_throughput", "of all"))
    ):
        values = [reports[name][key] or 0.0 for name in names]
        drawn = rates.barh(
            [p + 0.4 * offset for p in places], values, 0.38, label=title, color=COLORS[offset]
        )
        rates.bar_label(drawn, fmt="%.3g", padding=2, fontsize=7)
    rates.set_yticks([p + 0.2 for p in places], names, fontsize=7)
    rates.invert_yaxis()
    rates.margins(x=0.15)
    rates.set_xlabel("output tokens per second")
    rates.legend(fontsize=7)
    figure.tight_layout()
    return figure


def sweep_picture(report: Mapping[str, Any]) -> Figure:
    """Share of targets met and waits by load, a line per policy."""
    figure = Figure(figsize=(10, 3.6))
    met, waits = figure.subplots(1, 2)
    policies = dict.fromkeys(run["policy"] for run in report["runs"])
    for color, policy in zip(COLORS, policies, strict=False):
        runs = [run for run in report["runs"] if run["policy"] == policy]
        loads = sorted({run["load"] for run in runs})

        def mean(key: str, load: float, runs=runs) -> float:
            values = [run[key] for run in runs if run["load"] == load]
            # None is a wait that never ended, for which there is no point.
            return sum(math.nan if value is None else value for value in values) / len(values)

        met.plot(loads, [mean("ttft_met", x) for x in loads], "o-", color=color, label=policy)
        waits.plot(loads, [mean("ttft_p95_seconds", x) for x in loads], "o-", color=color)
    met.axhline(report["wanted"], color="black", linewidth=0.8, linestyle=":")
    met.set_ylabel("share of TTFT targets met")
    met.legend(fontsize=8)
    waits.set_yscale("log")
    waits.set_ylabel("p95 of the time to the first token, s")
    for axes in (met, waits):
        axes.set_xlabel("load (1: what the machine can serve at most)")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure


def training_picture(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """Loss and acceptance by step of a draft's training: the lines of its metrics.jsonl."""
    figure = Figure(figsize=(9, 3.8))
    loss, acceptance = figure.subplots(1, 2)

    def draw(axes: Any, name: str, label: str, color: str, of: Callable[[float], float]) -> None:
        points = [(line["step"], of(line[name])) for line in lines if name in line]
        axes.plot(*zip(*points, strict=True), color=color, label=label)

    draw(loss, "loss", "training", COLORS[0], lambda value: value)
    loss.set_ylabel("loss")
    draw(acceptance, "total_variation", "training", COLORS[0], lambda value: 1 - value)
    draw(acceptance, "held_out_total_variation", "held out", COLORS[5], lambda value: 1 - value)
    acceptance.set_ylabel("acceptance, at most")
    acceptance.legend(fontsize=8)
    for axes in (loss, acceptance):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    return figure
