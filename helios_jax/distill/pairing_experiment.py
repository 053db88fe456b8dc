"""Does a draft lose acceptance when its target is quantised anew, and does re-pairing give it back?

    python -m helios_jax.distill.pairing_experiment --draft DIR --prompts FILE \
        --training-prompts FILE --work DIR --json out.json

The draft was distilled on `--target` as it is: the float target here, whose weights the others are
quantised from (round to nearest, symmetric, groups of 64, 4 and 3 bits). It is measured on that
one, on each quantised target as it is, and again after a short training on that target's own
samples (`helios distill --init`). Everything is kept in `--work`; the command goes on there.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from helios_jax.distill import acceptance_command
from helios_jax.distill.acceptance import read_prompts
from helios_jax.distill.acceptance_report import Row, to_markdown


def quantise(source: Path, bits: int, out: Path) -> None:
    """A native checkpoint of `source` at `bits` in groups of 64."""
    if not out.exists():
        _helios("quantize", str(source), "--out", str(out), "--method", "rtn", "--bits", str(bits))


def repair(draft: Path, target: Path, prompts: Path, out: Path, options: list[str]) -> None:
    """The draft, trained on with the samples of `target`."""
    if not out.exists():
        _helios(
            "distill", "--target", str(target), "--prompts", str(prompts), "--init", str(draft),
            "--out", str(out), *options,
        )  # fmt: skip


def measure(target: Path, draft: Path, name: str, given: argparse.Namespace) -> list[Row]:
    """Acceptance of one draft by one target."""
    import warnings

    from checkpoints_conv import open_checkpoint, read_params
    from helios_jax.model.forms import serving_form
    from helios_jax.speculative_config import load_speculation

    checkpoint = open_checkpoint(target)
    form = serving_form(checkpoint.config, read_params(checkpoint), "bfloat16")
    with warnings.catch_warnings():
        # That the draft is of another target is what is measured.
        warnings.simplefilter("ignore", UserWarning)
        config = {"model": str(draft), "num_speculative_tokens": 4, "controller": "fixed"}
        proposer = load_speculation(config, target, checkpoint.tokenizer, "bfloat16")
    prompts = read_prompts(given.prompts, checkpoint.tokenizer, given.per_category, 512)
    eos = sorted({*checkpoint.config.eos_token_ids, *checkpoint.tokenizer.eos_token_ids})
    return acceptance_command.measure(
        name, (form.model, form.params), proposer, prompts, given.temperature or [0.0, 1.0],
        max_tokens=given.max_tokens, eos_token_ids=eos,
    )  # fmt: skip


def main() -> None:
    from helios_jax import hub
    from helios_jax.calibrate.record import circumstances
    from helios_jax.llm import use_compilation_cache

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="to measure on")
    parser.add_argument("--training-prompts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--bits", type=int, action="append")
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--num-sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    use_compilation_cache()
    given.work.mkdir(parents=True, exist_ok=True)
    target = hub.resolve(given.target)
    draft = hub.resolve_draft(given.draft)
    options = [
        "--num-sequences", str(given.num_sequences), "--max-tokens", "128", "--dtype", "bfloat16",
        "--steps", str(given.steps), "--warmup", str(given.steps // 10), "--learning-rate", "3e-4",
        "--tokens-per-batch", "2048", "--evaluate-every", str(max(1, given.steps // 4)),
        "--loss", "forward_kl=1", "--loss", "total_variation=1",
    ]  # fmt: skip
    rows = measure(target, draft, "float draft on the float target", given)
    for bits in given.bits or [4, 3]:
        quantised = given.work / f"target_{bits}"
        paired = given.work / f"draft_{bits}"
        quantise(target, bits, quantised)
        repair(draft, quantised, given.training_prompts, paired, options)
        rows += measure(quantised, draft, f"float draft on {bits} bits", given)
        rows += measure(quantised, paired, f"draft re-paired on {bits} bits", given)
        print(to_markdown(rows), flush=True)
    if given.json is not None:
        content = {
            "circumstances": circumstances(),
            "repairing": {"num_sequences": given.num_sequences, "steps": given.steps},
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n")
        given.json.with_suffix(".md").write_text(to_markdown(rows) + "\n")


def _helios(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "helios_jax.cli.main", *arguments], check=True)


if __name__ == "__main__":
    main()
