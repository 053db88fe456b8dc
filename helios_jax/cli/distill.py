"""`helios distill`: a target and some prompts in, a draft for it out."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from helios_jax.cli import options
from helios_jax.cli.options import Debug

if TYPE_CHECKING:
    from helios_jax.distill import DraftShape

_DRAFT, _DATA, _TRAIN = "Draft", "Samples", "Training"


def _option(flag: str, panel: str | None, help: str) -> Any:
    return typer.Option(flag, rich_help_panel=panel, help=help)


def distill(
    target: Annotated[str, _option("--target", None, "The model that it will draft for.")],
    prompts: Annotated[
        list[Path],
        _option(
            "--prompts", None, "Requests (.jsonl: `prompt` or `messages`) or text; repeatable."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    init: Annotated[
        str | None,
        _option("--init", _DRAFT, "Begin with this draft: re-pair one after requantisation."),
    ] = None,
    layers: Annotated[
        str | None,
        _option("--layers", _DRAFT, "Prune the target: the layers to keep, such as 0,29."),
    ] = None,
    intermediate_size: Annotated[
        int | None, _option("--intermediate-size", _DRAFT, "Pruned: channels of the MLPs to keep.")
    ] = None,
    hidden_size: Annotated[
        int | None, _option("--hidden-size", _DRAFT, "Pruned: channels of the stream to keep.")
    ] = None,
    draft_config: Annotated[
        str | None,
        _option(
            "--draft-config",
            _DRAFT,
            'A shape of its own: JSON of what differs from the target\'s, {"num_layers": 2, …}; '
            'with {"is_draft_head": true, …} a head on the target\'s hidden states.',
        ),
    ] = None,
    vocab_tokens: Annotated[
        int | None,
        _option("--vocab-tokens", _DRAFT, "The most frequent tokens that it knows; default: all."),
    ] = None,
    bits: Annotated[
        int, _option("--bits", _DRAFT, "Its matrices are stored with: 8, 4, or 16 (bfloat16).")
    ] = 8,
    num_sequences: Annotated[
        int, _option("--num-sequences", _DATA, "Sequences to sample from the target.")
    ] = 2000,
    temperature: Annotated[
        list[float] | None,
        _option(
            "--temperature", _DATA, "To sample at, taken in turn; repeatable. Default 0 0.5 1."
        ),
    ] = None,
    max_tokens: Annotated[int, _option("--max-tokens", _DATA, "Longest answer.")] = 256,
    max_model_len: Annotated[
        int, _option("--max-model-len", _DATA, "Longest sequence; longer prompts are cut.")
    ] = 1024,
    top_k: Annotated[
        int, _option("--top-k", _DATA, "Tokens kept of the target's distribution; 0: all.")
    ] = 32,
    dtype: Annotated[
        str, _option("--dtype", _DATA, "Form of the target's weights, see `helios generate`.")
    ] = "auto",
    steps: Annotated[int, _option("--steps", _TRAIN, "Batches to train on.")] = 1000,
    tokens_per_batch: Annotated[int, _option("--tokens-per-batch", _TRAIN, "About.")] = 4096,
    accumulate: Annotated[int, _option("--accumulate", _TRAIN, "Batches per update.")] = 1,
    learning_rate: Annotated[float, _option("--learning-rate", _TRAIN, "The highest.")] = 1e-3,
    warmup: Annotated[int, _option("--warmup", _TRAIN, "Batches while it rises.")] = 50,
    loss: Annotated[
        list[str] | None,
        _option(
            "--loss",
            _TRAIN,
            "NAME=WEIGHT of forward_kl, reverse_kl, jsd, total_variation, cross_entropy; "
            "repeatable. Default forward_kl=1.",
        ),
    ] = None,
    on_policy: Annotated[
        float, _option("--on-policy", _TRAIN, "Share of batches that the draft itself samples.")
    ] = 0.0,
    train_dtype: Annotated[
        str, _option("--train-dtype", _TRAIN, "The draft computes in: bfloat16 or float32.")
    ] = "bfloat16",
    evaluate_every: Annotated[
        int, _option("--evaluate-every", _TRAIN, "Batches between evaluations and checkpoints.")
    ] = 100,
    patience: Annotated[
        int, _option("--patience", _TRAIN, "Evaluations without progress that end it; 0: never.")
    ] = 5,
    seed: Annotated[int, _option("--seed", None, "Of everything drawn.")] = 0,
    plot: options.PlotPath = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing native checkpoint.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Distil a draft for speculative decoding from a target's own samples.

    The target, as it is quantised, answers the prompts; the draft learns its distributions. The
    result is a native checkpoint for `--draft` that names the target it was made for. Interrupted
    work goes on where it was when the same command is given again.
    """
    from checkpoints_conv import check_target, open_checkpoint, read_params
    from helios_jax import hub
    from helios_jax.calibrate.record import circumstances
    from helios_jax.cli.steps import steps as show_steps
    from helios_jax.config import require
    from helios_jax.distill import (
        OptimizerPlan,
        SamplingPlan,
        Teacher,
        TrainingPlan,
        load_target,
        make_student,
        read_draft,
        read_prompts,
        sample_target,
        target_identity,
        train_student,
        write_draft,
    )
    from helios_jax.model import model_of
    from helios_jax.speculative_config import draft_proposer

    options.check_plot(plot)
    require(bits in (4, 8, 16), f"bits={bits}: must be 8, 4 or 16 (bfloat16)")
    of_shape = {
        "layers": layers, "intermediate_size": intermediate_size, "hidden_size": hidden_size,
        "draft_config": draft_config, "vocab_tokens": vocab_tokens,
    }  # fmt: skip
    named = [f"{name}={value}" for name, value in of_shape.items() if value is not None]
    require(
        init is None or not named,
        f"init={init!r} with {', '.join(named)}: an old draft has its shape already; leave the "
        "others out",
    )
    shape = None if init is not None else _shape(**of_shape, bits=bits)
    plan = TrainingPlan(
        optimizer=OptimizerPlan(
            learning_rate=learning_rate, num_steps=steps, num_warmup_steps=warmup,
            accumulate=accumulate,
        ),
        losses=_weights(loss), tokens_per_batch=tokens_per_batch, dtype=train_dtype,
        evaluate_every=evaluate_every, checkpoint_every=evaluate_every,
        patience=patience or None, on_policy=on_policy, seed=seed,
    )  # fmt: skip
    check_target(out, overwrite)
    path = hub.resolve(target)
    checkpoint = open_checkpoint(path)
    identity = target_identity(path)
    # What cannot be is refused here: sampling may take hours.
    student = None
    if init is not None:
        student = read_draft(hub.resolve_draft(init), checkpoint.tokenizer)
    if shape is not None:
        shape.check(checkpoint.config)
    is_head = shape is not None and shape.is_head
    if student is not None and student.config.is_draft_head:
        head = draft_proposer(model_of(student.config), student.vocabulary)
        head.check(model_of(checkpoint.config))
        is_head = True
    require(
        not (is_head and on_policy),
        f"on_policy={on_policy}: a draft head learns from the target's samples alone; give 0",
    )
    sampling = SamplingPlan(
        num_sequences=num_sequences, temperatures=tuple(temperature or (0.0, 0.5, 1.0)),
        max_tokens=max_tokens, top_k=top_k or None, keep_hidden=is_head, seed=seed,
    )  # fmt: skip
    work = out.absolute().parent / f".{out.name}.distilling"
    llm = load_target(path, dtype=dtype, max_model_len=max_model_len, max_num_seqs=32)
    asked = read_prompts(prompts, llm.tokenizer, llm.max_model_len - max_tokens)
    try:
        with show_steps("shards") as progress:
            samples = sample_target(
                path, llm, asked, sampling, work / "samples",
                lambda done, total: progress("sampling", done, total), _say,
            )  # fmt: skip
        sequences = samples.sequences()
        if student is None:
            assert shape is not None
            student = make_student(shape, llm.config, read_params(checkpoint), sequences, seed)
        trained = train_student(
            student, sequences, plan, work / "training", samples.identity,
            teacher=Teacher(llm.model, llm.params, sampling.top_k), sampling=sampling,
            report=lambda p: _say(
                f"step {p.step} of {p.num_steps}, {p.tokens_per_second:.0f} tokens/s, "
                f"{p.seconds_left:.0f} s left: loss {p.metrics['loss']:.4f}, acceptance "
                f"{1 - p.metrics['total_variation']:.4f}"
            ),
        )  # fmt: skip
    except KeyboardInterrupt:
        _say(f"helios: interrupted; the same command goes on from {work}")
        raise
    source = {
        **identity, "target": target, "init": init,
        "shape": None if shape is None else shape.to_dict(), "sampling": sampling.to_dict(),
        "num_sampled_tokens": sum(len(s.tokens) - s.num_prompt for s in sequences),
        "prompts": {"files": [file.name for file in prompts], "number": len(asked)},
        "training": plan.to_dict(), "best_step": trained.step,
        # At temperature 1, see `Trained`.
        "held_out_acceptance": trained.acceptance, "circumstances": circumstances(),
    }  # fmt: skip
    write_draft(student, trained.params, llm.tokenizer, out, source, None if bits == 16 else bits,
                overwrite)  # fmt: skip
    if plot is not None:
        from helios_jax import plots

        lines = trained.metrics.read_text(encoding="utf-8").splitlines()
        plots.save(plots.training_picture([json.loads(line) for line in lines]), plot)
    ended = "no progress" if trained.stopped_early else "all steps"
    _say(f"{ended}; best at step {trained.step}: held-out acceptance {trained.acceptance:.4f}")
    print(out)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _shape(
    layers, intermediate_size, hidden_size, draft_config, vocab_tokens, bits
) -> "DraftShape":
    from helios_jax.distill import DraftShape, PrunedShape

    if layers is None and (intermediate_size, hidden_size) != (None, None):
        raise ValueError(
            f"intermediate_size={intermediate_size}, hidden_size={hidden_size}: are of a pruned "
            "target; give --layers too, or put them into --draft-config"
        )
    pruned = None
    if layers is not None:
        try:
            numbers = tuple(int(layer) for layer in layers.split(","))
        except ValueError:
            raise ValueError(
                f"layers={layers!r}: must be the target's layers, such as 0,29"
            ) from None
        pruned = PrunedShape(numbers, intermediate_size, hidden_size)
    fields: Any = {}
    if draft_config is not None:
        try:
            fields = json.loads(draft_config)
        except json.JSONDecodeError as error:
            raise ValueError(f"draft_config={draft_config!r}: is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"draft_config={draft_config!r}: must be a JSON object")
    if (pruned is None) == (not fields):
        raise ValueError(
            f"layers={layers}, draft_config={draft_config}: one of them says what the draft is, or "
            "--init"
        )
    return DraftShape(
        pruned, tuple(sorted(fields.items())), vocab_tokens, None if bits == 16 else bits
    )


def _weights(given: list[str] | None) -> Any:
    from helios_jax.distill import LossWeights

    if not given:
        return LossWeights()
    weights = {"forward_kl": 0.0}
    for text in given:
        name, _, value = text.partition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            raise ValueError(f"loss {text!r}: must be NAME=WEIGHT") from None
    try:
        return LossWeights(**weights)
    except TypeError:
        raise ValueError(
            f"loss {given}: names are forward_kl, reverse_kl, jsd, total_variation, cross_entropy"
        ) from None
