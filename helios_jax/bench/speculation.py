"""How much faster does speculation decode real prompts, by category? A report."""

import datetime
import hashlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from helios_jax import hub
from helios_jax.bench import machine
from helios_jax.bench.engines import run_worker

ALL = "all"
# Of a run: seconds from submission, to the first token and in all; sums over prompts.
_SUMS = ("num_tokens", "ttft_seconds", "total_seconds")
_DRAFTS = ("num_draft_tokens", "num_accepted_tokens", "num_verifications", "num_rounds")


@dataclass(frozen=True)
class SpeculationWorkload:
    """What is measured.

    Attributes:
      prompts: path of JSONL; an object a line with `prompt` (text), `messages`, or `turns` (the
        first is asked), and perhaps `category`.
      speculative_config: who drafts, see `helios_jax.speculative_config`.
      model, dtype, kv_cache_dtype: as for `helios_jax.load`.
      categories: only these; empty for all.
      limit: prompts of each category at most, spread over the file; None for all.
      output_tokens: of each prompt, fewer where the model ends earlier.
      temperature, seed: how tokens are drawn.
    """

    prompts: str
    speculative_config: Mapping[str, Any] = field(default_factory=lambda: {"method": "ngram"})
    model: str = "smollm2-135m"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    categories: tuple[str, ...] = ()
    limit: int | None = None
    output_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self):
        for name in ("output_tokens", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        if self.output_tokens < 2:
            raise ValueError(
                f"output_tokens={self.output_tokens}: must be at least 2, one beside the prefill's"
            )


def read_prompts(workload: SpeculationWorkload) -> list[dict[str, Any]]:
    """The requests to ask, in the file's order, each with its "category" (by default "prompt").

    Raises:
      ValueError: naming the file and line that cannot be used, or a category that is not there.
    """
    # What loads jax, which this package does not.
    from helios_jax.calibrate.data import conversation_of, read_objects

    path = Path(workload.prompts)
    by_category: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for number, (where, fields) in enumerate(read_objects(path)):
        request = {"category": str(fields.get("category", "prompt"))}
        request |= conversation_of(where, fields)
        if not all(request.values()):
            raise ValueError(f"{where}: asks nothing; leave the line out")
        if request["category"] == ALL:
            raise ValueError(
                f"{where}: category={ALL!r}: is what the sum of all is called; name it otherwise"
            )
        by_category.setdefault(request["category"], []).append((number, request))
    for name in workload.categories:
        if name not in by_category:
            raise ValueError(f"category={name!r}: {path} has {', '.join(sorted(by_category))}")
    if not by_category:
        raise ValueError(f"prompts={workload.prompts!r}: holds no prompt")
    chosen = []
    for name, requests in by_category.items():
        if not workload.categories or name in workload.categories:
            count = min(workload.limit or len(requests), len(requests))
            chosen += [requests[i * len(requests) // count] for i in range(count)]
    return [request for _, request in sorted(chosen, key=lambda numbered: numbered[0])]


def measure_speculation(
    workload: SpeculationWorkload, progress: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Runs every prompt without and with speculation, in turn, in a process of its own.

    Args:
      progress: told what runs.

    Returns:
      schema 1: {date, machine, command, workload, prompts_sha256 (of the file), versions, weights,
      speculation, costs, acceptance, categories: rows, prompts: what was measured of each}. A row
      is one category, the last one is "all" of them; see `summarise`.

    Raises:
      ValueError: a prompt, category or configuration that cannot be used.
      RuntimeError: the process failed.
    """
    job = {
        "requests": read_prompts(workload),
        "model": str(hub.resolve(workload.model)),
        "speculative_config": dict(workload.speculative_config),
        **{
            name: getattr(workload, name)
            for name in ("dtype", "kv_cache_dtype", "output_tokens", "temperature", "seed")
        },
    }
    command = [sys.executable, "-m", "helios_jax.bench.speculation_worker"]
    found = run_worker(command, job, progress)
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "command": shlex.join(
            # By its name, not where it is here.
            Path(each).name if each == workload.prompts else each
            for each in [Path(sys.argv[0]).name, *sys.argv[1:]]
        ),
        "workload": asdict(workload) | {"prompts": Path(workload.prompts).name},
        "prompts_sha256": hashlib.sha256(Path(workload.prompts).read_bytes()).hexdigest(),
        **{key: value for key, value in found.items() if key != "prompts"},
        "categories": summarise(found["prompts"]),
        "prompts": found["prompts"],
    }


def summarise(prompts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows by category, then all.

    A row: category, num_prompts, num_equal (of equal output), plain_rate and rate (tokens per
    second after the first token, all prompts' over all prompts' time), ratio (of the two),
    total_ratio (likewise of whole requests, prefill included), acceptance_rate,
    acceptance_length, num_compiled (prompts during whose timed runs a program was compiled). None
    where nothing came after any first token, or nothing was drafted.
    """
    categories = list(dict.fromkeys(prompt["category"] for prompt in prompts))
    chosen = [(name, [p for p in prompts if p["category"] == name]) for name in categories]
    if len(chosen) > 1:
        chosen.append((ALL, list(prompts)))
    return [{"category": name, **_summary(group)} for name, group in chosen]


def _summary(prompts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    plain, ours = (
        {key: sum(prompt[side][key] for prompt in prompts) for key in _SUMS}
        for side in ("plain", "speculative")
    )
    drafts = {key: sum(prompt["speculative"][key] for prompt in prompts) for key in _DRAFTS}
    plain_rate, rate = (
        _over(side["num_tokens"] - len(prompts), side["total_seconds"] - side["ttft_seconds"])
        for side in (plain, ours)
    )
    whole = [_over(side["num_tokens"], side["total_seconds"]) for side in (plain, ours)]
    length = _over(drafts["num_accepted_tokens"], drafts["num_verifications"])
    return {
        "num_prompts": len(prompts),
        "num_equal": sum(prompt["is_equal"] for prompt in prompts),
        "plain_rate": plain_rate,
        "rate": rate,
        "ratio": _over(rate, plain_rate),
        "total_ratio": _over(whole[1], whole[0]),
        "acceptance_rate": _over(drafts["num_accepted_tokens"], drafts["num_draft_tokens"]),
        "acceptance_length": None if length is None else 1 + length,
        **drafts,
        "num_compiled": sum(prompt["is_compiled"] for prompt in prompts),
    }


def _over(a: float | None, b: float | None) -> float | None:
    """a / b; None where there is nothing to divide by."""
    return None if a is None or not b else a / b
