"""What do the formats of a KV cache cost a model, by the length of the context? One report.

Each format is compared with float32 keys and values of the same model, on the same texts: with
scales of 1, and with a scale per layer and KV head that fits the model's ranges.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helios_jax.calibrate.data import Calibration, load_calibration
from helios_jax.calibrate.evaluation import Report, cut_text, table
from helios_jax.calibrate.kv_precision import (
    KVRanges,
    RoundedKV,
    check_kv_dtype,
    kv_bytes_per_sequence,
    kv_ranges,
)
from helios_jax.calibrate.record import circumstances
from helios_jax.calibrate.scoring import (
    Reference,
    Scores,
    mean_scores,
    score_by_length,
)
from helios_jax.config import require
from helios_jax.llm import LLM, load
from helios_jax.tokenizer import Tokenizer
from pallas_kernels.kv_format import FORMATS

# Formats whose numbers are wide enough that nobody scales them.
_UNSCALED = ("float32", "bfloat16", "float16")
_SHORTEST_RANGE = 512
_CONTEXT = 8192


def evaluate_kv(
    model: str,
    kv_dtypes: Sequence[str],
    texts: Mapping[str, Path],
    *,
    calibration: Sequence[Path] = (),
    context: int | None = None,
    max_text_tokens: int | None = None,
    dtype: str = "float32",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Report:
    """Measures a model with its keys and values in each of `kv_dtypes`.

    Args:
      model: a name or path that `helios_jax.load` takes.
      kv_dtypes: of `helios_jax.calibrate.kv_precision.KV_DTYPES`.
      texts: file by domain.
      calibration: text that the scales are calibrated on. Without any, those of the checkpoint
        are taken (`helios calibrate-kv` writes them), and where it has none, only scales of 1.
      context: length of the windows; each begins where the one before ends, so that a token's
        place in it is its context length. None for 8,192 tokens, or what the model takes.
      max_text_tokens: of each text, from its beginning.
      dtype: form of the weights.

    Returns:
      JSON-ready: "circumstances", "settings" and "rows", one per format and scales: "kv_dtype",
      "scales" ("none", "1.0" or "calibrated"), "bytes_per_sequence" of `context` tokens, "texts":
      by domain the scores of each range of context lengths, and "mean" over the domains.

    Raises:
      ValueError: an unknown format, a file that cannot be read, a context beyond the model's.
    """
    require(bool(texts), "nothing to evaluate on: give a text")
    for kv_dtype in kv_dtypes:
        check_kv_dtype(kv_dtype)
    llm = load(model, dtype=dtype)
    if context is None:
        context = min(_CONTEXT, llm.max_model_len)
    require(
        context <= llm.max_model_len,
        f"context={context}: {model} takes at most {llm.max_model_len} tokens",
    )
    ranges, scales_from = _ranges(model, llm, calibration)
    windows = {
        domain: cut_text(path, llm, context, context, max_text_tokens)
        for domain, path in texts.items()
    }
    longest = max(int(text.positions_BT.max()) + 1 for text in windows.values())
    edges = length_edges(longest)
    references: dict[str, Reference] = {}
    rows: list[dict[str, Any]] = []
    for kv_dtype, scales in _cases(kv_dtypes, ranges is not None):
        cache = RoundedKV.create(llm.config, kv_dtype, ranges if scales == "calibrated" else None)
        by_domain = {}
        for domain, text in windows.items():

            def note(done: int, total: int, what: str = f"{kv_dtype}, {scales}, {domain}") -> None:
                progress(what, done, total)

            if kv_dtype == "float32":
                references[domain] = Reference(llm.model, llm.params, text, note, edges)
                by_domain[domain] = references[domain].by_length
            else:
                by_domain[domain] = score_by_length(
                    llm.model, llm.params, text, edges, references[domain], note, cache
                )
        rows.append(
            {
                "kv_dtype": kv_dtype,
                "scales": scales,
                "bytes_per_sequence": kv_bytes_per_sequence(llm.config, kv_dtype, context),
                "texts": {d: _ranges_of(found) for d, found in by_domain.items()},
                "mean": _ranges_of(_mean_by_length([*by_domain.values()])),
            }
        )
    return {
        "circumstances": circumstances(),
        "settings": {
            "model": model,
            "weights": llm.dtype_report,
            "context": context,
            "edges": [0, *edges, longest],
            "scales_from": scales_from,
            "max_text_tokens": max_text_tokens,
        },
        "rows": rows,
    }


def length_edges(longest: int) -> list[int]:
    """Where ranges of context lengths end: 512, 1024, … below `longest`."""
    edges = []
    edge = _SHORTEST_RANGE
    while edge < longest:
        edges.append(edge)
        edge *= 2
    return edges


def kv_markdown(report: Report) -> str:
    """A table per measure: a row per format, a column per range of context lengths."""
    edges = report["settings"]["edges"]
    columns = [f"{low} to {high}" for low, high in zip(edges, edges[1:], strict=False)]
    context = report["settings"]["context"]
    parts = []
    for title, field, form in (
        ("Perplexity", "perplexity", "{:.3f}"),
        ("KL to float32, nats", "kl", "{:.5f}"),
        ("Same likeliest token", "top1_agreement", "{:.2%}"),
    ):
        lines = []
        for row in report["rows"]:
            values = [scores and scores[field] for scores in row["mean"]]
            if any(value is not None for value in values):
                cells = ["" if value is None else form.format(value) for value in values]
                size = f"{row['bytes_per_sequence'] / 2**20:.1f}"
                lines.append([row["kv_dtype"], row["scales"], *cells, size])
        if lines:
            parts.append(table([title, "scales", *columns, f"MiB at {context}"], lines))
    domains = ", ".join(report["rows"][0]["texts"])
    parts.append(f"Means over {domains}; columns: tokens of context. {_origin(report)}")
    return "\n\n".join(parts)


def _origin(report: Report) -> str:
    scales_from = report["settings"]["scales_from"]
    return f"Calibrated scales: {scales_from}." if scales_from else "No calibrated scales."


def _cases(kv_dtypes: Sequence[str], has_ranges: bool) -> list[tuple[str, str]]:
    """(format, scales) in order, float32 first: the others are compared with it."""
    cases = [("float32", "none")]
    for kv_dtype in dict.fromkeys(kv_dtypes):
        if kv_dtype in _UNSCALED:
            cases += [(kv_dtype, "none")] if kv_dtype != "float32" else []
        else:
            cases += [(kv_dtype, "1.0")] + ([(kv_dtype, "calibrated")] if has_ranges else [])
    return cases


def _ranges(model: str, llm: LLM, calibration: Sequence[Path]) -> tuple[KVRanges | None, str]:
    """The ranges that scales are made of, and where they come from, for people."""
    if calibration:
        drawn = kv_calibration(calibration, llm.tokenizer)
        names = ", ".join(path.name for path in calibration)
        count, length = drawn.tokens_BT.shape
        return kv_ranges(llm.model, llm.params, drawn.tokens_BT), f"{names}, {count} x {length}"
    from checkpoints_conv import open_checkpoint
    from helios_jax.hub import resolve

    stored = open_checkpoint(resolve(model)).kv_scales
    if stored is None:
        return None, ""
    largest = FORMATS["fp8_e4m3"].largest
    return KVRanges(stored.k_LK * largest, stored.v_LK * largest), "the checkpoint's"


def kv_calibration(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    num_sequences: int = 16,
    sequence_length: int = 2048,
) -> Calibration:
    """Sequences to see the ranges of keys and values on; none is held out."""
    return load_calibration(
        paths,
        tokenizer,
        num_sequences=num_sequences,
        sequence_length=sequence_length,
        held_out=0,
    )


def _mean_by_length(domains: list[list[Scores]]) -> list[Scores]:
    """Per range of lengths, over the domains that reach it."""
    means = []
    for one_range in zip(*domains, strict=True):
        present = {str(i): scores for i, scores in enumerate(one_range) if scores.num_tokens}
        means.append(mean_scores(present) if present else one_range[0])
    return means


def _ranges_of(by_length: Sequence[Scores]) -> list[dict[str, Any] | None]:
    """JSON-ready; None for a range without tokens."""
    return [dataclasses.asdict(one) if one.num_tokens else None for one in by_length]
