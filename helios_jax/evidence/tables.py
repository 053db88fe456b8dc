"""Which of our numbers stands beside which figure of the article, and in what do they differ?"""

import importlib.resources
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from helios_jax.evidence import article
from helios_jax.replay import Drafts, is_lower_bound

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One of our numbers.

    Attributes:
      row, column: in its table.
      article: the article's figure, as text.
      part: whose JSON has it.
      value: takes it out of that part's result; None where it has none.
      unit: "ms", "tok/s", "MB", "%" (of a share), "x" or "".
      differs: a word on what makes the two incomparable, or what says it of that part's result.
      is_lower_bound: whether the value may be higher, of that part's result.
    """

    row: str
    column: str
    article: str
    part: str
    value: Callable[[Any], float | None]
    unit: str
    differs: str | Callable[[Any], str]
    is_lower_bound: Callable[[Any], bool] = lambda result: False


@dataclass(frozen=True)
class Table:
    """A table of the report: its cells, the words before and after it, and its picture's name."""

    name: str
    title: str
    intro: str
    cells: tuple[Cell, ...]
    picture: str | None = None
    closing: Callable[[Results], str] | None = None


_SMALL = "135M model on this machine, not 7B on a GPU; compare the ratios"
_MODEL = "simulated: bytes, flops and the scheduler alone, no kernels, 60% of the data sheet"


def difference(a: float | None, b: float | None) -> float | None:
    """a - b; None where either is missing, such as a wait that never ended."""
    return None if a is None or b is None else a - b


def tables_of(part_names: list[str]) -> list[Table]:
    """The report's tables, without cells of parts that are not there."""
    tables = [
        _ladder(),
        _predicted(),
        _kv_precision(),
        _weights(),
        _acceptance(),
        _bytes(),
        _preemption(),
        _sweep(),
    ]
    known = {*part_names, SHIPPED}
    kept = []
    for table in tables:
        cells = tuple(cell for cell in table.cells if cell.part in known)
        if cells:
            kept.append(Table(**{**vars(table), "cells": cells}))
    return kept


def _ladder() -> Table:
    keys = (
        "median_ttft_ms", "p95_ttft_ms", "median_user_tokens_per_second", "output_throughput",
    )  # fmt: skip
    units = ("ms", "ms", "tok/s", "tok/s")
    cells = []

    def differs(result: Any) -> str:
        return f"{_SMALL}; {result['ladder'][0]['report']['weights']}"

    for number, (row, figures) in enumerate(article.LADDER.items()):
        for key, unit, column, figure in zip(
            keys, units, article.LADDER_COLUMNS, figures, strict=True
        ):

            def value(result: Any, key=key) -> float | None:
                return result["ladder"][0]["report"][key]

            part = f"ladder_{number}"
            cells.append(Cell(row, column, f"{figure:,}", part, value, unit, differs))

    def closing(results: Results) -> str:
        rows = [row for part in ladder_parts(results) for row in part["ladder"]]
        figures = {row["article"]: [row["report"][key] for key in keys] for row in rows}
        served = {row["article"]: row["report"]["weights"] for row in rows}
        return _verdicts(
            figures,
            # See `bench.ladder`.
            {
                name: f"served is {weights}"
                for name, weights in served.items()
                if name == article.LADDER_4BIT and " on cpu: " in weights
            },
        )

    return Table(
        "ladder",
        "The ladder, measured here",
        "The article's configurations, as far as they were run, on the same traffic; each adds to "
        "the one before.",
        tuple(cells),
        "ladder",
        closing,
    )


def ladder_parts(results: Results) -> list[Any]:
    """The rows that are there, in order."""
    names = [f"ladder_{number}" for number in range(len(article.LADDER))]
    return [results[name] for name in names if name in results]


def _predicted() -> Table:
    def milliseconds(key: str) -> Callable[[Any], float | None]:
        # None where so many were refused that the percentile is one of them.
        return lambda runs: None if runs[0][key] is None else 1e3 * runs[0][key]

    values: tuple[Callable[[Any], float | None], ...] = (
        milliseconds("ttft_p50_seconds"),
        milliseconds("ttft_p95_seconds"),
        lambda runs: 1 / runs[0]["tpot_p50_seconds"] if runs[0]["tpot_p50_seconds"] else None,
        lambda runs: runs[0]["capacity_tokens_per_second"],
    )
    units = ("ms", "ms", "tok/s", "tok/s")
    cells = []
    for number, (row, figures) in enumerate(article.LADDER.items()):
        for column, figure, value, unit in zip(
            article.LADDER_COLUMNS, figures, values, units, strict=True
        ):
            part = f"predicted_{number}"
            cells.append(Cell(row, column, f"{figure:,}", part, value, unit, _MODEL))

    def closing(results: Results) -> str:
        figures = {
            row: [value(results[f"predicted_{number}"]) for value in values]
            for number, row in enumerate(article.LADDER)
            if f"predicted_{number}" in results
        }
        return _verdicts(figures)

    return Table(
        "predicted",
        "The ladder, predicted for a 7B model on one H100",
        "The same five steps by the byte model; `tok/s in all` is what the machine gives when all "
        "requests are there at once. Speculation is taken to accept 75% of four draft tokens.",
        tuple(cells),
        None,
        closing,
    )


def _verdicts(
    figures: Mapping[str, list[float | None]], without: Mapping[str, str] | None = None
) -> str:
    """Step by step: does our ratio to the row before point where the article's does?

    Args:
      without: why a row says nothing about the article's.
    """
    names = [name for name in article.LADDER if name in figures]
    lines = []
    for before, name in zip(names, names[1:], strict=False):
        words = []
        reason = (without or {}).get(name)
        for place, column in enumerate(article.LADDER_COLUMNS):
            theirs = article.LADDER[name][place] / article.LADDER[before][place]
            old, new = figures[before][place], figures[name][place]
            if not old or not new:
                continue
            ours = new / old
            if reason is not None:
                words.append(f"{column} x{theirs:.2f} there, x{ours:.2f} here")
                continue
            if abs(ours - 1) < 0.02:
                judged = "not seen"
            elif (ours > 1) != (theirs > 1):
                judged = "contradicted"
            elif abs(ours - 1) >= 0.5 * abs(theirs - 1):
                judged = "supported"
            else:
                judged = "supported in direction only"
            words.append(f"{column} x{theirs:.2f} there, x{ours:.2f} here: {judged}")
        verdict = "" if reason is None else f"no verdict, {reason}; "
        lines.append(f"- **{name}**: {verdict}" + "; ".join(words) + ".")
    return "Step by step, to the row before:\n\n" + "\n".join(lines)


def _kv_precision() -> Table:
    formats = {
        "FP16": ("bfloat16", "none"),
        "FP8 E4M3": ("fp8_e4m3", "1.0"),
        "INT8 symmetric": ("int8", "calibrated"),
        "FP8 E5M2": ("fp8_e5m2", "1.0"),
    }
    size_parts = {"FP16": "bytes_gqa16"}
    cells = []
    for row, (megabytes, perplexity) in article.KV_PRECISION.items():

        def value(result: Any, wanted=formats[row]) -> float | None:
            for each in result["rows"]:
                if (each["kv_dtype"], each["scales"]) == wanted:
                    return each["mean"][-1]["perplexity"]
            return None

        cells.append(
            Cell(
                row, "MB of 2048 tokens", f"{megabytes}", size_parts.get(row, "bytes_gqa8"),
                lambda result: result["bytes"]["kv_read"] / 1e6, "MB",
                "their 256 and 128 are MiB",
            )
        )  # fmt: skip
        cells.append(
            Cell(
                row, "perplexity", f"{perplexity}", "kv_precision", value, "",
                "another model and text; bfloat16 for FP16; INT8 with scales fitted per head, "
                "which it needs",
            )
        )  # fmt: skip
    return Table(
        "kv_precision",
        "Precision of keys and values",
        "Perplexities compare within the column.",
        tuple(cells),
    )


SHIPPED = "shipped"


def shipped_results() -> dict[str, Any]:
    """What `helios_jax.calibrate` measured and ships, by the name of its file."""
    folder = importlib.resources.files("helios_jax.calibrate") / "results"
    names = ("weights_4bit.json", "weights_3bit.json")
    return {name: json.loads((folder / name).read_text()) for name in names}


def _weights() -> Table:
    def more(file: str, method: str, than: str = "") -> Callable[[Any], float | None]:
        """A method's mean perplexity less another's, or the model's own, which comes first."""

        def mean(models: Any, name: str) -> float | None:
            found = [each for each in models if each["model"].startswith(name)]
            return _mean_perplexity(found[0]) if found else None

        def value(results: Any) -> float | None:
            models = results[file]["models"]
            return difference(mean(models, method), mean(models, than))

        return value

    differs = (
        "mean over five texts of a 135M model; groups of 64; measured "
        "once and shipped (helios_jax/calibrate/results), since quantising takes minutes"
    )
    least, most = article.AWQ_GAIN_OVER_RTN
    cells = (
        Cell("AWQ, 4 bits", "perplexity more than unquantised", f"under {article.AWQ_LOSS}",
             SHIPPED, more("weights_4bit.json", "awq"), "", differs),
        Cell("rounding, 4 bits", "perplexity more than AWQ", f"{least} to {most}", SHIPPED,
             more("weights_4bit.json", "rtn", "awq"), "", differs),
        Cell("AWQ, 3 bits", "perplexity more than unquantised", "worse than GPTQ", SHIPPED,
             more("weights_3bit.json", "awq"), "", differs),
        Cell("GPTQ, 3 bits", "perplexity more than unquantised", "better than AWQ", SHIPPED,
             more("weights_3bit.json", "gptq"), "", differs),
    )  # fmt: skip
    return Table("weights", "Quantised weights", "", cells)


def _mean_perplexity(model: Mapping[str, Any]) -> float:
    texts = model["texts"].values()
    return sum(text["perplexity"] for text in texts) / len(texts)


def _acceptance() -> Table:
    differs = "whoever drafts is named under the inputs; their drafts are 60M models distilled"
    cells = [
        Cell(
            "greedy (the ladder's fourth row)", "acceptance",
            f"{article.ACCEPTANCE['draft of the AWQ target, AWQ target']:.0%}", "ladder_3",
            lambda result: result["ladder"][0]["report"]["acceptance_rate"], "%", differs,
        )
    ]  # fmt: skip
    for temperature, rate in article.ACCEPTANCE_AT_TEMPERATURE.items():
        part = f"acceptance_{str(temperature).replace('.', '')}"
        cells.append(
            Cell(
                f"temperature {temperature}", "acceptance", f"{rate:.0%}", part,
                lambda result: result["acceptance_rate"], "%", differs,
            )
        )  # fmt: skip
    gain = Drafts(0.78, 4).tokens_per_round

    def closing(results: Results) -> str:
        return (
            "Their speed-up of "
            f"{article.SPEED_UP}x at 78% and four drafts: {gain:.2f} tokens a verification by "
            "(1 - a^(gamma+1)) / (1 - a), which a draft step of "
            f"{(gain / article.SPEED_UP - 1) / 4:.0%} of the target's time turns into "
            f"{article.SPEED_UP}x. The formula that they print gives 0.57x."
        )

    return Table(
        "acceptance", "Speculation", "Share of draft tokens that are accepted, gamma 4.",
        tuple(cells), None, closing,
    )  # fmt: skip


def _bytes() -> Table:
    def kv_share(result: Any) -> float:
        return result["kv_share"]

    cells = (
        Cell("KV's share of a decode step's bytes, 2048 tokens", "7B, 16-bit KV, 4-bit weights",
             f"{article.KV_SHARE:.0%}", "bytes_gqa16", kv_share, "%",
             "they do not say at which batch; one row here, and it grows with rows"),
        Cell("KV's share of a decode step's bytes, 2048 tokens", "7B, 8-bit KV, 4-bit weights",
             f"{article.KV_SHARE:.0%}", "bytes_gqa8", kv_share, "%", "likewise"),
        Cell("KV's share of a decode step's bytes, 2048 tokens", "this model, here",
             f"{article.KV_SHARE:.0%}", "profile", kv_share, "%", "135M model, 16-bit KV"),
        Cell("time that memory accounts for", "this model, here, one row",
             f"{article.STALL_SHARE:.0%} stalls", "profile",
             lambda result: result["measured"]["roofline_share"], "%",
             "the floor at full read bandwidth over the time; not a profiler's count of stalls"),
        Cell("time that memory accounts for", "this model, here, eight rows",
             f"{article.STALL_SHARE:.0%} stalls", "profile_batch",
             lambda result: result["measured"]["roofline_share"], "%", "likewise"),
        Cell("KV of a sequence of 2048 tokens, multi-head, 16 bits", "7B", "0.5 GB",
             "bytes_mha16", lambda result: result["bytes"]["kv_read"] / 1e6, "MB",
             "32 layers x 32 heads x 128 x 2048 x 2 x 2 bytes; theirs is off by two"),
        Cell("… with 8 KV heads", "7B", "4x less", "bytes_gqa16",
             lambda result: result["bytes"]["kv_read"] / 1e6, "MB", ""),
    )  # fmt: skip
    return Table("bytes", "Bytes", "", cells, "profile")


def _preemption() -> Table:
    first, more = article.PREEMPTED
    differs = "a pool of 1.5 GB, so that there is pressure at all; " + _MODEL

    def more_wait(runs: Any) -> float | None:
        seconds = difference(runs[1]["ttft_p95_seconds"], runs[0]["ttft_p95_seconds"])
        return None if seconds is None else 1e3 * seconds

    cells = (
        Cell("at a load of 0.8", "requests preempted", f"{first:.1%}", "pressure",
             lambda runs: runs[0]["preemption_rate"], "%", differs),
        Cell("at 0.96, a fifth more", "requests preempted", f"{more:.0%}", "pressure",
             lambda runs: runs[1]["preemption_rate"], "%", differs),
        Cell("at 0.96, a fifth more", "p95 TTFT more", f"{article.PREEMPTION_TTFT_MS:.0f} ms",
             "pressure", more_wait, "ms", differs),
    )  # fmt: skip
    return Table("preemption", "Preemption", "", cells)


def _sweep() -> Table:
    def highest(policy: str) -> Callable[[Any], float | None]:
        return lambda result: result["highest_load"][policy]

    def at_the_end(policy: str) -> Callable[[Any], bool]:
        return lambda result: is_lower_bound(
            result["highest_load"][policy], [run["load"] for run in result["runs"]]
        )

    cells = tuple(
        Cell(policy, "highest load with 95% of TTFT targets met", "–", "sweep", highest(policy),
             "", _MODEL, at_the_end(policy))
        for policy in ("deadline", "fcfs", "priority")
    )  # fmt: skip
    return Table("sweep", "Scheduling policies", "Llama 3 8B on one H100.", cells, "sweep")
