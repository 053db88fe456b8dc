"""Which acceptance did a proposer show, over all prompts and by kind, and how sure is that?

Counted per prompt, so that intervals are over prompts: bootstrap of the ratio accepted / proposed,
95%.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from helios_jax.calibrate.evaluation import table
from helios_jax.distill.acceptance import Counts
from helios_jax.distill.overlap import Overlap


class Interval(NamedTuple):
    """value, and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def rate(counts: Sequence[Counts], seed: int = 0) -> Interval:
    """accepted / proposed, with its interval over prompts."""
    pairs = np.array([(c.num_accepted, c.num_proposed) for c in counts], np.float64)
    return ratio(pairs[:, 0], pairs[:, 1], seed)


def ratio(above: np.ndarray, below: np.ndarray, seed: int = 0) -> Interval:
    """sum(above) / sum(below) and its 95% bootstrap interval; 0 where nothing is below."""
    draws = np.random.default_rng(seed).integers(len(above), size=(2000, len(above)))
    sums = above[draws].sum(1), np.maximum(below[draws].sum(1), 1e-12)
    low, high = np.quantile(sums[0] / sums[1], [0.025, 0.975])
    return Interval(float(above.sum() / max(below.sum(), 1e-12)), float(low), float(high))


def length(counts: Sequence[Counts], seed: int = 0) -> Interval:
    """Tokens per verification, 1 + accepted / rounds, with its interval over prompts.

    The measure for proposers that do not propose in every round, which `rate` favours.
    """
    pairs = np.array([(c.num_accepted, c.num_rounds) for c in counts], np.float64)
    return Interval(*(1 + end for end in ratio(pairs[:, 0], pairs[:, 1], seed)))


@dataclass(frozen=True)
class Row:
    """What one proposer got at a temperature; by category, prompt tokens and context within it."""

    proposer: str
    temperature: float
    rate: Interval
    acceptance_length: Interval
    num_prompts: int
    by_category: Mapping[str, Interval]
    by_prompt_length: Mapping[str, Interval]
    teacher_forced: Interval | None = None
    teacher_forced_by_context: Mapping[str, Interval] = field(default_factory=dict)


def summarise(name: str, counts: Sequence[Counts], overlaps: Sequence[Overlap] | None) -> list[Row]:
    """One row per temperature."""
    rows = []
    for temperature in sorted({c.temperature for c in counts}):
        chosen = [i for i, c in enumerate(counts) if c.temperature == temperature]
        mine = [counts[i] for i in chosen]
        forced, by_context = None, {}
        if overlaps is not None:
            texts = [overlaps[i] for i in chosen]
            forced = _mean([o.overlap_N for o in texts])
            for name_of, low, high in _ranges():
                inside = [o.overlap_N[(o.context_N >= low) & (o.context_N < high)] for o in texts]
                if any(map(len, inside)):
                    by_context[name_of] = _mean(inside)
        by_category = {
            category: rate([c for c in mine if c.category == category])
            for category in sorted({c.category for c in mine})
        }
        by_length = {
            name_of: rate(found)
            for name_of, low, high in _ranges()
            if (found := [c for c in mine if low <= c.num_prompt < high])
        }
        rows.append(
            Row(
                name, temperature, rate(mine), length(mine), len(mine), by_category, by_length,
                forced, by_context,
            )
        )  # fmt: skip
    return rows


def to_markdown(rows: Sequence[Row]) -> str:
    """Tables: rates by proposer and temperature, and by each kind of which there are several."""
    parts = [
        table(
            ["Proposer", "temperature", "accepted / proposed", "tokens per verification",
             "teacher-forced", "prompts"],
            [
                [row.proposer, f"{row.temperature:g}", _cell(row.rate),
                 _cell(row.acceptance_length, 2), _cell(row.teacher_forced), str(row.num_prompts)]
                for row in rows
            ],
        )
    ]  # fmt: skip
    for title, by_kind in (
        ("Category", [row.by_category for row in rows]),
        ("Tokens of the prompt", [row.by_prompt_length for row in rows]),
        ("Context, teacher-forced", [row.teacher_forced_by_context for row in rows]),
    ):
        kinds = dict.fromkeys(kind for found in by_kind for kind in found)
        columns = [(row, found) for row, found in zip(rows, by_kind, strict=True) if found]
        if len(kinds) > 1:
            names = [f"{row.proposer}, {row.temperature:g}" for row, _ in columns]
            lines = [[kind, *(_cell(found.get(kind)) for _, found in columns)] for kind in kinds]
            parts.append(table([title, *names], lines))
    return "\n\n".join(parts)


def _mean(values: Sequence[np.ndarray]) -> Interval:
    """Over all positions of all prompts; values: those of each prompt."""
    return ratio(np.array([v.sum() for v in values]), np.array([float(len(v)) for v in values]))


def _ranges() -> list[tuple[str, int, int]]:
    """(name, first, end) of ranges of tokens."""
    edges = (0, 128, 256, 512, 1024, 2048)
    ranges = [(f"{low} to {high - 1}", low, high) for low, high in pairwise(edges)]
    return [*ranges, (f"from {edges[-1]}", edges[-1], 10**9)]


def _cell(interval: Interval | None, digits: int = 3) -> str:
    if interval is None:
        return "-"
    value, low, high = (f"{end:.{digits}f}" for end in interval)
    return f"{value} ({low} to {high})"
