"""How do the reports read? As tables for a terminal."""

import statistics
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from helios_jax.bench.cold_start import CACHES, MEMORY, STAGES
from helios_jax.bench.comparison import HELIOS
from helios_jax.profiler import PARTS


def describe_machine(machine: Mapping[str, Any]) -> str:
    """One line: processor, threads, memory, system, Python, commit."""
    family = f" (family {machine['cpu_family']})" if machine["cpu_family"] else ""
    parts = [
        f"{machine['cpu']}{family}",
        " ".join(machine["vector_extensions"]),
        f"{machine['num_threads']} threads",
        f"{machine['memory_gib']} GiB" if machine["memory_gib"] else "",
        machine["system"],
        f"Python {machine['python']}",
        f"helios-jax {machine['helios_jax'] or '?'} at commit {machine['commit'] or '?'}",
    ]
    return ", ".join(part for part in parts if part)


def describe_engines(report: Mapping[str, Any]) -> list[str]:
    """One line for each engine: versions and form of the weights."""
    return [
        f"{name}: {_versions(engine['versions'])}; {engine['weights']}"
        for name, engine in report["engines"].items()
    ]


def comparison_table(report: Mapping[str, Any]) -> Table:
    """Rates by engine, and Helios' rate over each peer's."""
    workload = report["workload"]
    table = Table(
        title=f"{workload['model']}, tokens/s: medians of {workload['repeats']} processes each, "
        f"{workload['output_tokens']} steps after {workload['context_tokens']} tokens"
    )
    metrics = [*report["engines"][HELIOS]["medians"]]
    table.add_column("engine")
    for metric in metrics:
        table.add_column(_title(metric, workload["prompt_tokens"]), justify="right")
    for name, engine in report["engines"].items():
        table.add_row(name, *(f"{engine['medians'][metric]:.4g}" for metric in metrics))
    for name, ratios in report["ratios"].items():
        table.add_row(f"{HELIOS} / {name}", *(f"{ratios[metric]:.2f}x" for metric in metrics))
    return table


def cold_start_table(report: Mapping[str, Any]) -> Table:
    """Seconds from a process's start, by the compilation cache it found, and memory."""
    measured = report["cold_start"]
    table = Table(
        title=f"{measured['model']}, seconds from a process's start: medians of "
        f"{len(measured['runs'][CACHES[0]])} processes each"
    )
    table.add_column("compilation cache")
    for title in (
        "imported",
        "loaded",
        f"first token of {measured['prompt_tokens']}",
        f"{measured['output_tokens']} tokens",
        "peak memory",
    ):
        table.add_column(title, justify="right")
    for cache in CACHES:
        median = measured["medians"][cache]
        seconds = (f"{median[stage]:.2f}" for stage in STAGES)
        table.add_row(cache, *seconds, f"{median[MEMORY] / 1e9:.2f} GB")
    return table


def serving_table(report: Mapping[str, Any]) -> Table:
    """A row per measurement: ours, what it is beside, the ratio and its bar."""
    workload = report["workload"]
    table = Table(
        title=f"{workload['model']}, from submission to the last token: medians of "
        f"{workload['pairs'] * workload['repeats']} pairs"
    )
    table.add_column("what is served")
    table.add_column("engine", justify="right")
    table.add_column("beside")
    for title in ("", "ratio", "ratio of processor time", "bar"):
        table.add_column(title, justify="right")
    for row in report["serving"]:
        unit = row["unit"]
        cpu_ratio, other = row["cpu_ratio"], row["other_median"]
        table.add_row(
            row["name"] + (" (COMPILED WHILE TIMED)" if row["num_new_programs"] else ""),
            _quantity(row["median"], unit),
            row["against"],
            "" if other is None else _quantity(other, unit),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}x",
            "" if cpu_ratio is None else f"{cpu_ratio:.2f}x",
            row["bar"] + ("" if row["is_met"] else ", MISSED"),
        )
    return table


def describe_serving(report: Mapping[str, Any]) -> list[str]:
    """Versions, and whether anything was compiled while it was timed."""
    versions = [f"{name}: {_versions(found)}" for name, found in report["versions"].items()]
    num_new = sum(row["num_new_programs"] for row in report["serving"])
    return [*versions, report["weights"], f"programs compiled while timed: {num_new}"]


def profile_table(report: Mapping[str, Any]) -> Table:
    """Bytes of a decode round by part, and their shares."""
    drafts = report["num_draft_tokens"]
    table = Table(
        title=f"{report['model']}: a decode round of {report['num_rows']} rows after "
        f"{report['context_tokens']} tokens each, {report['kv_cache_dtype']} KV"
        + (f", {drafts} draft tokens" if drafts else "")
    )
    table.add_column("part")
    table.add_column("MB", justify="right")
    table.add_column("share", justify="right")
    for part, title in PARTS.items():
        moved = report["bytes"][part]
        table.add_row(title, f"{moved / 1e6:,.3f}", f"{moved / report['total_bytes']:.1%}")
    table.add_row("all", f"{report['total_bytes'] / 1e6:,.3f}", "", style="bold")
    return table


def gpu_table(report: Mapping[str, Any]) -> Table:
    """What the same round is predicted to take on GPUs."""
    table = Table(title="Predicted from data sheets, weights as stored, 8-bit KV by default")
    table.add_column("GPU")
    for title in ("ms a round", "tokens/s", "limit", "fits"):
        table.add_column(title, justify="right")
    table.add_column("source")
    for gpu in report["gpus"].values():
        table.add_row(
            gpu["name"], f"{gpu['seconds'] * 1e3:.3f}", f"{gpu['tokens_per_second']:,.0f}",
            gpu["limit"], "yes" if gpu["fits"] else "no", gpu["source"],
        )  # fmt: skip
    return table


def describe_profile(report: Mapping[str, Any]) -> list[str]:
    """What was measured, in words; nothing where only a configuration was counted."""
    lines = [f"{report['weights']}; keys and values are {report['kv_share']:.1%} of the bytes"]
    if "measured" not in report:
        return lines
    measured, xla, bandwidth = report["measured"], report["xla"], report["bandwidth"]
    lines.append(
        f"measured {measured['round_seconds'] * 1e3:.2f} ms a round (median of "
        f"{measured['repeats']}); at the {bandwidth['bytes_per_second'] / 1e9:.1f} GB/s that "
        f"{bandwidth['method']} reads here it would take {measured['floor_seconds'] * 1e3:.2f} ms: "
        f"{measured['roofline_share']:.0%} of the roofline"
    )
    if xla["bytes_accessed"] is not None:
        lines.append(
            f"XLA counts {xla['bytes_accessed'] / 1e6:,.1f} MB accessed by the instructions, "
            f"{(xla['temporary_bytes'] or 0) / 1e6:,.1f} MB of temporaries, "
            f"{(xla['argument_bytes'] or 0) / 1e6:,.1f} MB of arguments"
        )
    return lines


def speculation_table(report: Mapping[str, Any]) -> Table:
    """A row per category of prompts: both rates, their ratio, what was accepted."""
    workload = report["workload"]
    config = ", ".join(f"{key}={value}" for key, value in workload["speculative_config"].items())
    table = Table(
        title=f"{workload['model']}, one request at a time, up to {workload['output_tokens']} "
        f"tokens at temperature {workload['temperature']:g}; {config}"
    )
    table.add_column("category")
    for title in (
        "prompts", "plain tokens/s", "tokens/s", "ratio", "with prefill", "accepted",
        "tokens a verification", "equal outputs",
    ):  # fmt: skip
        table.add_column(title, justify="right")

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    for row in report["categories"]:
        table.add_row(
            row["category"] + (" (COMPILED WHILE TIMED)" if row["num_compiled"] else ""),
            str(row["num_prompts"]),
            shown(row["plain_rate"], "{:.4g}"),
            shown(row["rate"], "{:.4g}"),
            shown(row["ratio"], "{:.2f}x"),
            shown(row["total_ratio"], "{:.2f}x"),
            shown(row["acceptance_rate"], "{:.0%}"),
            shown(row["acceptance_length"], "{:.2f}"),
            str(row["num_equal"]),
        )
    return table


def describe_speculation(report: Mapping[str, Any]) -> list[str]:
    """Acceptance by place in the draft, versions, weights; how near unequal answers were."""
    rates = [
        f"{place['num_accepted'] / place['num_proposed']:.0%}"
        for place in report["acceptance"]
        if place["num_proposed"]
    ]
    by_place = f"accepted by place in the draft: {', '.join(rates) or 'nothing was drafted'}"
    lines = [by_place, f"helios: {_versions(report['versions'])}; {report['weights']}"]
    found = [prompt["difference"] for prompt in report["prompts"]]
    margins = sorted(each["margin"] for each in found if each is not None)
    if margins:
        lines.append(
            f"{len(margins)} greedy outputs differ; where each first does, the target's best two "
            f"logits lie {statistics.median(margins):.3g} apart in the median, "
            f"{margins[-1]:.3g} at most"
        )
    return lines


def _quantity(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "share" else f"{value:.4g} {unit}"


def _title(metric: str, prompt_tokens: int) -> str:
    phase, size = metric.split("_b")
    return f"prefill {prompt_tokens}" if phase == "prefill" else f"decode, batch {size}"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
