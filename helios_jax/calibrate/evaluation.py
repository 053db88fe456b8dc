"""What do several models get on several texts and tasks? One report, and its tables."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helios_jax.calibrate import tasks as task_files
from helios_jax.calibrate.data import read_units
from helios_jax.calibrate.record import circumstances
from helios_jax.calibrate.scoring import Reference, Windows, cut_windows, mean_scores, score
from helios_jax.config import require
from helios_jax.llm import LLM, load

Report = dict[str, Any]

_CONTEXT = 1024


def evaluate(
    models: Sequence[str],
    *,
    against: str | None = None,
    texts: Mapping[str, Path] | None = None,
    tasks: Sequence[Path] = (),
    context: int | None = None,
    stride: int | None = None,
    max_text_tokens: int | None = None,
    max_tokens: int = 64,
    dtype: str = "float32",
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Report:
    """Measures each model on all texts and tasks; one model is in memory at a time.

    Args:
      models, against: names or paths that `helios_jax.load` takes; all with one tokenizer where
        there is a reference.
      texts: file by domain; the requests of a `.jsonl` file are scored end to end.
      tasks: files as `helios_jax.calibrate.tasks` describes them.
      context, stride: see `helios_jax.calibrate.scoring`; None for 1,024 tokens, or what the first
        model takes, and half a context.
      max_text_tokens: of each text, from its beginning.
      dtype: form of the weights, see `helios_jax.model.forms`.

    Returns:
      JSON-ready: "circumstances", "settings" and "models", a row each: "model", "weights" (the form
      that served), "texts" (scores by domain), "mean" and "tasks" (scores by file name). The
      reference has the first row.

    Raises:
      ValueError: a file that cannot be read, a setting out of range, tokenizers that differ.
    """
    texts = texts or {}
    names = [*([against] if against is not None else []), *models]
    references: dict[str, Reference] = {}
    windows: dict[str, Windows] = {}
    fingerprint = None
    rows = []
    for index, name in enumerate(names):
        llm = load(name, dtype=dtype)
        if context is None:
            context = min(_CONTEXT, llm.max_model_len)
        if stride is None:
            stride = max(1, context // 2)
        require(
            context <= llm.max_model_len,
            f"context={context}: {name} takes at most {llm.max_model_len} tokens",
        )
        if index == 0 or against is None:
            cut = {
                domain: cut_text(path, llm, context, stride, max_text_tokens)
                for domain, path in texts.items()
            }
            windows, fingerprint = cut, llm.tokenizer.fingerprint()
        require(
            llm.tokenizer.fingerprint() == fingerprint,
            f"{name} and the reference {against} have different tokenizers: their distributions "
            "cannot be compared; leave out --against",
        )
        is_reference = against is not None and index == 0
        scores = {}
        for domain, text in windows.items():

            def note(done: int, total: int, what: str = f"{name}, {domain}") -> None:
                progress(what, done, total)

            if is_reference:
                references[domain] = Reference(llm.model, llm.params, text, note)
                scores[domain] = references[domain].scores
            else:
                scores[domain] = score(llm.model, llm.params, text, references.get(domain), note)
        rows.append(
            {
                "model": name,
                "weights": llm.dtype_report,
                "texts": {domain: dataclasses.asdict(one) for domain, one in scores.items()},
                "mean": dataclasses.asdict(mean_scores(scores)) if scores else None,
                "tasks": {path.stem: _task(path, llm, max_tokens) for path in tasks},
            }
        )
    return {
        "circumstances": circumstances(),
        "settings": {
            "against": against,
            "context": context,
            "stride": stride,
            "max_text_tokens": max_text_tokens,
            "dtype": dtype,
        },
        "models": rows,
    }


def to_markdown(report: Report) -> str:
    """Tables of a report: one per measure with a column per domain, and one of tasks."""
    rows = report["models"]
    parts = []
    domains = list(rows[0]["texts"])
    if domains:
        for title, field, form in (
            ("Perplexity", "perplexity", "{:.3f}"),
            ("KL to the reference, nats", "kl", "{:.5f}"),
            ("Same likeliest token as the reference", "top1_agreement", "{:.2%}"),
        ):
            lines = [
                [row["model"], *(form.format(value) for value in values)]
                for row in rows
                if None
                not in (values := [row["texts"][d][field] for d in domains] + [row["mean"][field]])
            ]
            if lines:
                parts.append(table([title, *domains, "mean"], lines))
        counts = ", ".join(f"{d} {rows[0]['texts'][d]['num_tokens']}" for d in domains)
        parts.append(f"Scored tokens: {counts}.")
    names = list(rows[0]["tasks"])
    if names:
        lines = [
            [row["model"], name, measure, f"{value:.4g}"]
            for row in rows
            for name in names
            for measure, value in row["tasks"][name].items()
        ]
        parts.append(table(["Model", "task", "measure", "value"], lines))
    return "\n\n".join(parts)


def cut_text(path: Path, llm: LLM, context: int, stride: int, max_tokens: int | None) -> Windows:
    """The windows of a text file, or of the requests of a `.jsonl` file end to end.

    Raises:
      ValueError: naming the file.
    """
    units = read_units(path, llm.tokenizer, window=context)
    tokens = [token for unit in units for token in unit][:max_tokens]
    try:
        return cut_windows(tokens, context, stride)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _task(path: Path, llm: LLM, max_tokens: int) -> dict[str, float]:
    return task_files.run_task(task_files.read_task(path, llm), llm, max_tokens)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
