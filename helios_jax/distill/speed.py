"""Does the draft make a request faster, by category? Measured here, predicted for a GPU.

    python -m helios_jax.distill.speed --draft DIR --prompts FILE --per-category 2 --json out.json

Greedy decoding of one row by the engine: with prompt lookup, with the draft at several numbers of
draft tokens, and plain in bfloat16, each in turn with plain decoding in the default form, prompt by
prompt. Tokens per second from the first token to the last; a run during which anything was compiled
is repeated.

The prediction is the byte model's (`helios_jax.profiler`): the time to move what a round moves,
with the measured tokens per round, over that of plain decoding. It leaves out what a GPU needs to
launch kernels, which for small models is most of it.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helios_jax.config import ModelConfig
from helios_jax.distill.acceptance import Prompt, read_prompts
from helios_jax.profiler import GPUS, Formats, Hardware, formats_as_stored, step_seconds
from helios_jax.sampling import SamplingParams

# By category, one a prompt.
Rates = dict[str, list[float]]
_PLAIN = "plain, int8"


def decode_speeds(
    llms: Sequence[Any], prompts: Sequence[Prompt], max_tokens: int
) -> tuple[Rates, ...]:
    """Tokens per second of every prompt, by category, for each of the models.

    Every prompt goes to all of them before the next, begun with another one each time, so that a
    machine that slows down slows all.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    found: tuple[Rates, ...] = tuple({} for _ in llms)
    for index, prompt in enumerate(prompts):
        for place in range(len(llms)):
            which = (index + place) % len(llms)
            rate = _decode_speed(llms[which], prompt, params)
            found[which].setdefault(prompt.category, []).append(rate)
    return found


def _decode_speed(llm: Any, prompt: Prompt, params: SamplingParams) -> float:
    while True:
        num_programs = llm.engine.num_programs
        [output] = llm.generate([prompt.tokens], params)
        if llm.engine.num_programs == num_programs:
            seconds = output.timings.total_seconds - output.timings.ttft_seconds
            return (output.usage.completion_tokens - 1) / seconds


def speed_ups(rates: Rates, plain: Rates) -> Rates:
    """Prompt by prompt."""
    return {
        category: [rate / base for rate, base in zip(rates[category], bases, strict=True)]
        for category, bases in plain.items()
    }


def predicted_speed_up(
    target: ModelConfig,
    draft: ModelConfig,
    hardware: Hardware,
    *,
    num_draft_tokens: int,
    tokens_per_round: float,
    context: int,
    target_formats: Formats,
    draft_formats: Formats,
) -> float:
    """Of batch 1, by bytes and arithmetic alone: see the module.

    Args:
      tokens_per_round: measured, 1 + accepted / verifications.
      context: cached tokens.
    """

    def seconds(config: ModelConfig, formats: Formats, num_tokens: int) -> float:
        return float(
            step_seconds(
                config, formats, hardware, num_tokens=num_tokens, num_sampled=num_tokens,
                kv_tokens=context, attended_tokens=context * num_tokens,
            )
        )  # fmt: skip

    plain = seconds(target, target_formats, 1)
    verify = seconds(target, target_formats, num_draft_tokens + 1)
    drafting = num_draft_tokens * seconds(draft, draft_formats, 1)
    return tokens_per_round * plain / (verify + drafting)


def _median(rates: Rates) -> float:
    return float(np.median([rate for values in rates.values() for rate in values]))


def main() -> None:
    from checkpoints_conv import open_checkpoint, read_params
    from helios_jax import hub, load
    from helios_jax.calibrate.evaluation import table
    from helios_jax.calibrate.record import circumstances
    from helios_jax.engine.programs import forget

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--num-draft-tokens", type=int, action="append")
    parser.add_argument("--lookup-tokens", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    gammas = given.num_draft_tokens or [2, 4]
    ways: dict[str, tuple[str, dict | None]] = {
        "plain, bfloat16": ("bfloat16", None),
        "prompt lookup": (
            "auto", {"method": "ngram", "num_speculative_tokens": given.lookup_tokens}
        ),
    }  # fmt: skip
    for gamma in gammas:
        config = {"model": given.draft, "num_speculative_tokens": gamma, "controller": "fixed"}
        ways[f"draft, {gamma} tokens"] = ("auto", config)
    adaptive = {"model": given.draft, "num_speculative_tokens": max(gammas)}
    ways[f"draft, up to {max(gammas)} tokens"] = ("auto", adaptive)
    checkpoints = [
        open_checkpoint(path)
        for path in (hub.resolve(given.target), hub.resolve_draft(given.draft))
    ]
    target, draft = (checkpoint.config for checkpoint in checkpoints)
    formats = [formats_as_stored(read_params(checkpoint)) for checkpoint in checkpoints]

    def loaded(dtype: str, config: dict | None) -> Any:
        return load(
            given.target, dtype=dtype, max_num_seqs=1, seed=0, speculative_config=config,
            max_model_len=min(2048, target.max_model_len), enable_prefix_caching=False,
        )  # fmt: skip

    results: dict[str, Rates] = {}
    ratios: dict[str, Rates] = {}
    tokens_per_round: dict[str, float] = {}
    for name, (dtype, config) in ways.items():
        # Two at a time: the programs of all would be more than a process may map.
        llms = loaded("auto", None), loaded(dtype, config)
        prompts = read_prompts(
            given.prompts, llms[0].tokenizer, given.per_category, given.max_prompt
        )
        plain, results[name] = decode_speeds(llms, prompts, given.max_tokens)
        results[f"{_PLAIN}, beside {name}"] = plain
        ratios[name] = speed_ups(results[name], plain)
        report = llms[1].engine.acceptance()
        if report is not None and report.acceptance_length is not None:
            tokens_per_round[name] = report.acceptance_length
        del llms
        forget()
        print(f"{name}: {_median(ratios[name]):.2f} of {_PLAIN}", flush=True)
    predictions = {
        f"{name}, {device}": predicted_speed_up(
            target, draft, GPUS[device.lower()].hardware, num_draft_tokens=gamma,
            tokens_per_round=tokens_per_round[f"draft, {gamma} tokens"], context=256,
            target_formats=formats[0], draft_formats=formats[1],
        )
        for gamma in gammas
        if (name := f"draft, {gamma} tokens") in tokens_per_round
        for device in ("H100", "H200")
    }  # fmt: skip
    categories = list(next(iter(results.values())))
    lines = [
        [name, *(f"{np.median(found[category]):.1f}" for category in categories),
         f"{_median(found):.1f}",
         f"{tokens_per_round[name]:.2f}" if name in tokens_per_round else "-"]
        for name, found in results.items()
    ]  # fmt: skip
    text = table(["tokens/s, one row", *categories, "all", "tokens per round"], lines)
    lines = [
        [name, *(f"{np.median(found[category]):.2f}" for category in categories),
         f"{_median(found):.2f}"]
        for name, found in ratios.items()
    ]  # fmt: skip
    text += "\n\n" + table([f"to {_PLAIN} beside it, by prompt", *categories, "all"], lines)
    text += "\n\n" + table(
        ["Predicted by the byte model, not measured", "speed-up"],
        [[name, f"{value:.2f}"] for name, value in predictions.items()],
    )
    print(text)
    if given.json is not None:
        content = {
            "circumstances": circumstances(), "tokens_per_second": results,
            "speed_up": ratios,
            "tokens_per_round": tokens_per_round, "predicted_speed_up": predictions,
            "formats": [dataclasses.asdict(form) for form in formats],
        }  # fmt: skip
        given.json.write_text(json.dumps(content, indent=1) + "\n")
        given.json.with_suffix(".md").write_text(text + "\n")


if __name__ == "__main__":
    main()
