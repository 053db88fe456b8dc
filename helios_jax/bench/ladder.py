"""What does each technique add? The article's five configurations on one trace, one after another.

Each row keeps what the rows before it brought. On a CPU `4-bit weights` serves the checkpoint's
4-bit codes in the form that is fast there (int8 weights for few rows, bfloat16 for more), so
that the row shows what it does to a GPU only on a GPU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from helios_jax import hub
from helios_jax.bench.replay import Serving, Traffic, Watch
from helios_jax.bench.replay import replay as replay_trace
from helios_jax.calibrate.record import circumstances
from helios_jax.replay.report import TABLE, markdown

DEFAULT_DRAFT: Mapping[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
RATIOS = (
    "median_ttft_ms", "p95_ttft_ms", "median_user_tokens_per_second", "output_throughput",
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A row of the ladder: its name, the article's, and what it changes of the row before."""

    name: str
    article: str
    changes: Mapping[str, Any]


def steps(num_heads: int, quantised: str, speculative_config: Mapping[str, Any]) -> list[Step]:
    """The five rows for a model of `num_heads` query heads.

    Args:
      quantised: the checkpoint with 4-bit weights.
      speculative_config: who drafts.
    """
    is_cpu = jax.default_backend() == "cpu"
    return [
        Step(
            "16-bit weights, multi-head attention, greedy",
            "FP16 + MHA + greedy",
            {
                "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "num_kv_heads": num_heads,
                "policy": "fcfs", "enable_prefix_caching": False,
            },
        ),
        Step(
            "+ 4-bit weights", "+ AWQ 4-bit weights",
            {"model": quantised, "dtype": "auto" if is_cpu else "int4"},
        ),
        Step(
            "+ grouped queries, FP8 KV", "+ GQA + FP8 KV",
            {"num_kv_heads": None, "kv_cache_dtype": "fp8_e4m3"},
        ),
        Step(
            "+ speculative decoding", "+ speculative decoding (gamma 4)",
            {"speculative_config": speculative_config},
        ),
        Step(
            "+ deadlines, shared prefixes", "+ priority-aware paged batching",
            {"policy": "deadline", "enable_prefix_caching": True},
        ),
    ]  # fmt: skip


def run_ladder(
    traffic: Traffic,
    serving: Serving,
    *,
    quantised: str | None = None,
    rows: tuple[int, ...] = (0, 1, 2, 3, 4),
    goodput: Mapping[str, float] | None = None,
    say: Callable[[str], Any] = lambda text: None,
    watch: Watch = lambda state: None,
) -> dict[str, Any]:
    """Replays the trace on each row's engine.

    Args:
      serving: what all rows have in common; its `speculative_config` is who drafts, prompt lookup
        if it is None.
      quantised: a checkpoint of the same model with 4-bit weights; None where `serving.model` has
        them, whose first row is then served dequantised.
      rows: which of the five; ratios are to the first of them.

    Returns:
      schema 1: {circumstances, traffic, ladder: [{name, article, ratios, report}]}.
    """
    from checkpoints_conv import open_checkpoint

    config = open_checkpoint(hub.resolve(serving.model)).config
    ladder = steps(
        config.num_heads, quantised or serving.model, serving.speculative_config or DEFAULT_DRAFT
    )
    current = replace(serving, speculative_config=None)
    found = []
    for number, step in enumerate(ladder):
        current = replace(current, **step.changes)
        if number not in rows:
            continue
        report = replay_trace(
            traffic, current, goodput=goodput,
            say=lambda text, step=step: say(f"{step.name}: {text}"), watch=watch,
        ).report  # fmt: skip
        found.append({"name": step.name, "article": step.article, "report": report})
        if report["is_interrupted"]:
            break
    first = found[0]["report"]
    for row in found:
        row["ratios"] = {
            key: row["report"][key] / first[key] if row["report"][key] and first[key] else None
            for key in RATIOS
        }
    return {
        "schema": 1,
        "circumstances": circumstances(),
        "traffic": first["traffic"],
        "ladder": found,
    }


def ladder_markdown(report: Mapping[str, Any]) -> str:
    """The rows' figures, then their ratios to the first."""
    figures = markdown({row["name"]: row["report"] for row in report["ladder"]})
    titles = [TABLE[key] for key in RATIOS]
    lines = ["| to the first row | " + " | ".join(titles) + " |", "|---" * (len(RATIOS) + 1) + "|"]
    for row in report["ladder"]:
        shown = ("–" if ratio is None else f"{ratio:.2f}x" for ratio in row["ratios"].values())
        lines.append(f"| {row['name']} | " + " | ".join(shown) + " |")
    return figures + "\n" + "\n".join(lines) + "\n"
