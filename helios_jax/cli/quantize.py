"""`helios quantize`: a checkpoint and some text in, a smaller native checkpoint out."""

import dataclasses
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helios_jax.cli.options import Debug

if TYPE_CHECKING:
    from helios_jax.calibrate import Calibration, LayerReport, Recipe

_GRID, _DATA, _GPTQ = "Grid", "Calibration", "GPTQ"


def quantize(
    model: Annotated[
        str, typer.Argument(help="A known name, hf:org/name, a .gguf file or a folder.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    method: Annotated[str, typer.Option("--method", help="rtn, awq or gptq.")] = "awq",
    bits: Annotated[int, typer.Option("--bits", rich_help_panel=_GRID, help="3, 4 or 8.")] = 4,
    group_size: Annotated[
        int,
        typer.Option(
            "--group-size",
            rich_help_panel=_GRID,
            help="Inputs that share a scale: 32, 64, 128, or -1 for all of a linear.",
        ),
    ] = 64,
    asymmetric: Annotated[
        bool,
        typer.Option("--asymmetric", rich_help_panel=_GRID, help="A zero point per group."),
    ] = False,
    narrow: Annotated[
        bool,
        typer.Option(
            "--narrow", rich_help_panel=_GRID, help="Symmetric codes -7..7 instead of -8..7."
        ),
    ] = False,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            rich_help_panel=_GRID,
            help="PATTERN=skip, PATTERN=BITS or PATTERN=BITS:GROUP_SIZE for some linears, such as "
            "'*/ffn/down=8' or 'embed=8'; repeatable, the last match counts. The embedding and "
            "the head stay as they are without one.",
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            "--calibration",
            rich_help_panel=_DATA,
            help="Requests (.jsonl: `prompt` or `messages`) or text; repeatable.",
        ),
    ] = None,
    num_sequences: Annotated[
        int, typer.Option("--num-sequences", rich_help_panel=_DATA, help="Sequences to draw.")
    ] = 128,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", rich_help_panel=_DATA, help="Tokens of each.")
    ] = 512,
    held_out: Annotated[
        float,
        typer.Option(
            "--held-out", rich_help_panel=_DATA, help="Share that is kept for the final check."
        ),
    ] = 0.1,
    seed: Annotated[
        int, typer.Option("--seed", rich_help_panel=_DATA, help="Which sequences are drawn.")
    ] = 0,
    check_tokens: Annotated[
        int,
        typer.Option(
            "--check-tokens",
            rich_help_panel=_DATA,
            help="Held-out tokens to compare the result with the source on; 0: none.",
        ),
    ] = 4096,
    act_order: Annotated[
        bool,
        typer.Option(
            "--act-order/--no-act-order",
            rich_help_panel=_GPTQ,
            help="Round the most active inputs first.",
        ),
    ] = True,
    static_groups: Annotated[
        bool,
        typer.Option(
            "--static-groups/--no-static-groups",
            rich_help_panel=_GPTQ,
            help="Fix scales beforehand, so that act-order needs no permutation.",
        ),
    ] = True,
    dampening: Annotated[
        float,
        typer.Option("--dampening", rich_help_panel=_GPTQ, help="Share of the Hessian's mean."),
    ] = 0.01,
    clip: Annotated[
        bool,
        typer.Option("--clip/--no-clip", rich_help_panel=_GPTQ, help="Search smaller ranges."),
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing native checkpoint.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Quantise a model on your own text.

    The result is a native checkpoint that every verb takes. Interrupted work goes on where it was
    when the same command is given again.
    """
    from checkpoints_conv import check_target, open_checkpoint, write_checkpoint
    from helios_jax import hub
    from helios_jax.calibrate import DEFAULT_RULES, Recipe, Rule, discard, load_calibration
    from helios_jax.calibrate import quantize as quantize_checkpoint
    from helios_jax.cli.steps import steps
    from helios_jax.config import require
    from helios_jax.llm import use_compilation_cache
    from helios_jax.quant import GptqOptions, Scheme

    require(
        not (asymmetric and narrow),
        "asymmetric=True, narrow=True: a narrow range is one of the symmetric grids; give one",
    )
    require(check_tokens >= 0, f"check_tokens={check_tokens}: must be 0 or more")
    grid = "asymmetric" if asymmetric else "symmetric" if narrow else "full"
    scheme = Scheme(bits, group_size, grid)
    recipe = Recipe(
        method,
        scheme,
        (*DEFAULT_RULES, *(Rule.parse(text, scheme) for text in rule or [])),
        GptqOptions(act_order, static_groups, dampening, clip and static_groups),
    )
    check_target(out, overwrite)
    use_compilation_cache()
    checkpoint = open_checkpoint(hub.resolve(model))
    drawn = None
    if calibration:
        drawn = load_calibration(
            calibration,
            checkpoint.tokenizer,
            num_sequences=num_sequences,
            sequence_length=sequence_length,
            held_out=held_out,
            seed=seed,
        )
        _report_calibration(drawn, num_sequences)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    work = out.absolute().parent / f".{out.name}.quantizing"
    started = time.monotonic()
    errors: list[float] = []

    def note_layer(report: "LayerReport") -> None:
        errors.extend(report.errors.values())

    try:
        with steps("stages") as progress:
            leaves = quantize_checkpoint(checkpoint, recipe, drawn, work, progress, note_layer)
    except KeyboardInterrupt:
        print(f"helios: interrupted; the same command goes on from {work}", file=sys.stderr)
        raise
    made = dataclasses.replace(
        checkpoint,
        read_leaves=leaves,
        nbytes=sum(file.stat().st_size for file in work.glob("*.npz")),
        describe_source=lambda: {
            **checkpoint.describe_source(),
            "quantization": _description(recipe, drawn),
        },
    )
    write_checkpoint(made, out, overwrite=overwrite)
    discard(work)
    mean = f", mean relative output error {sum(errors) / len(errors):.5f}" if errors else ""
    seconds = time.monotonic() - started
    print(f"{out}: {seconds:.0f} s, peak memory {_peak_gib():.2f} GiB{mean}", file=sys.stderr)
    if drawn is not None and drawn.held_out and check_tokens:
        _check(checkpoint, out, drawn, check_tokens)
    print(out)


def _peak_gib() -> float:
    """Of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def _report_calibration(drawn: "Calibration", wanted: int) -> None:
    count, length = drawn.tokens_BT.shape
    fewer = f" ({wanted} were asked for: the text holds no more)" if count < wanted else ""
    print(f"calibration: {count} x {length} tokens{fewer}", file=sys.stderr)


def _description(recipe: "Recipe", drawn: "Calibration | None") -> dict[str, Any]:
    used = None if drawn is None or recipe.method == "rtn" else drawn.description
    return {**recipe.to_dict(), "calibration": used}


def _check(checkpoint: Any, out: Path, drawn: "Calibration", max_tokens: int) -> None:
    """Prints how far the result is from the source on text that calibration has not seen."""
    from checkpoints_conv import open_checkpoint, read_params
    from helios_jax.calibrate import Reference, cut_windows, score
    from helios_jax.model.forms import serving_form

    tokens = [token for unit in drawn.held_out for token in unit][:max_tokens]
    if len(tokens) < 2:
        return
    context = drawn.tokens_BT.shape[1]
    windows = cut_windows(tokens, context, context)

    def form(of):
        return serving_form(of.config, read_params(of), "float32")

    source = form(checkpoint)
    reference = Reference(source.model, source.params, windows)
    before = reference.scores
    del source
    result = form(open_checkpoint(out))
    after = score(result.model, result.params, windows, reference)
    print(
        f"held-out text, {after.num_tokens} tokens: perplexity {before.perplexity:.3f} -> "
        f"{after.perplexity:.3f}, KL {after.kl:.5f}, same likeliest token "
        f"{100 * (after.top1_agreement or 0):.1f}%",
        file=sys.stderr,
    )
