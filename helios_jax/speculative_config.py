"""Which proposer do options by vLLM's names mean? Loads a draft and checks that it fits."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helios_jax.config import require
from helios_jax.model import DraftHead, Transformer
from helios_jax.speculative import (
    AdaptiveLength,
    DraftModel,
    DraftVocabulary,
    FixedLength,
    HiddenStateDraft,
    PromptLookup,
    Proposer,
    ReducedParams,
    Speculation,
    SpeculationParams,
)
from helios_jax.speculative.pairing import (
    require_same_tokens,
    warn_of_other_target,
)
from helios_jax.tokenizer import Tokenizer

DEFAULTS = {
    "method": None,
    "model": None,
    "num_speculative_tokens": None,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": None,
    "controller": "adaptive",
}
# What follows one equal token is right in a quarter of all cases, and two in half of them
# (summarisation and retrieval, SmolLM2): drafting from one token costs more than it brings.
_PROMPT_LOOKUP_MIN = 2
# What is looked up costs nothing but its verification.
_NUM_DRAFT_TOKENS = {"ngram": 10, "draft_model": 4}
_CONTROLLERS = {"fixed": FixedLength, "adaptive": AdaptiveLength}


def load_speculation(
    config: Mapping[str, Any],
    target: str | Path,
    tokenizer: Tokenizer,
    dtype: str = "auto",
    progress: Callable | None = None,
) -> tuple[Speculation, SpeculationParams]:
    """What `Engine` takes, of a dict of vLLM's `speculative_config`.

    Args:
      config: "method": "ngram", with "prompt_lookup_max" and "prompt_lookup_min" (4 and 2 tokens
        that must be equal, at most and at least); or "model": as for `helios_jax.load` ("method":
        "draft_model" may be left out), or "default", the shipped draft of the embedded model. With
        either,
        "num_speculative_tokens": draft tokens of a round at most (10 of "ngram", else 4), and
        "controller": "adaptive" (the default) drafts as many as pay, by costs measured at the
        start, "fixed" always so many.
      target: the target's checkpoint, tokenizer: its tokenizer.
      dtype: of the target's form; the draft has the same where that is float32 or bfloat16.
      progress: see `helios_jax.hub.resolve`.

    Raises:
      ValueError: an unknown key or value, or a draft whose tokens are not the target's.

    Warns where the draft was distilled for another target.
    """
    for key in config:
        require(
            key in DEFAULTS,
            f"speculative_config: {key!r} is unknown; must be one of {', '.join(DEFAULTS)}",
        )
    options = DEFAULTS | dict(config)
    method = options["method"] or ("draft_model" if options["model"] else None)
    require(
        method in ("ngram", "draft_model"),
        f"speculative_config: method={method!r}: must be 'ngram' (looks the text up) or "
        "'draft_model', with model=…",
    )
    require(
        (options["model"] is not None) == (method == "draft_model"),
        f"speculative_config: method={method!r} with model={options['model']!r}: a draft model "
        "needs one, prompt lookup takes none",
    )
    require(
        options["controller"] in _CONTROLLERS,
        f"speculative_config: controller={options['controller']!r}: must be one of "
        f"{', '.join(_CONTROLLERS)}",
    )
    controller = _CONTROLLERS[options["controller"]]()
    J = options["num_speculative_tokens"]
    J = _NUM_DRAFT_TOKENS[str(method)] if J is None else J

    def speculation(proposer: Proposer) -> Speculation:
        # A CPU's pass costs what its tokens cost (`quant.expanded`): with one program for two
        # tokens and one for five a short draft does not pay for a long one's.
        chooses = options["controller"] == "adaptive" and type(J) is int
        lengths = tuple(n for n in (1, 4) if chooses and n < J)
        return Speculation(proposer, J, controller, intermediate_lengths=lengths)

    if method == "ngram":
        longest, shortest = options["prompt_lookup_max"], options["prompt_lookup_min"]
        if shortest is None:
            shortest = min(_PROMPT_LOOKUP_MIN, longest)
        return speculation(PromptLookup(longest, shortest)), SpeculationParams()

    from checkpoints_conv import open_checkpoint, read_params
    from helios_jax.hub import resolve_draft
    from helios_jax.model.forms import draft_form

    name = str(options["model"])
    path = resolve_draft(name, progress)
    draft = open_checkpoint(path)
    require_same_tokens(tokenizer, draft.tokenizer)
    manifests = [_manifest(Path(target)), _manifest(Path(path))]
    if None not in manifests:
        warn_of_other_target(*manifests)  # pyright: ignore[reportArgumentType]
    form = draft_form(
        draft.config, read_params(draft), dtype if dtype in ("float32", "bfloat16") else "auto"
    )
    return speculation(draft_proposer(form.model, draft.draft_vocabulary)), SpeculationParams(
        form.params
        if draft.draft_vocabulary is None
        else ReducedParams.of(form.params, draft.draft_vocabulary)
    )


def draft_proposer(model: Transformer | DraftHead, vocabulary: DraftVocabulary | None) -> Proposer:
    """What drafts with a model or head; its vocabulary: None where it has all of the target's."""
    num_target_tokens = None if vocabulary is None else len(vocabulary.nearest_V)
    if isinstance(model, DraftHead):
        return HiddenStateDraft(model, num_target_tokens=num_target_tokens)
    # Prompts enter the draft's cache so many tokens at a time.
    return DraftModel(model, catch_up_tokens=64, num_target_tokens=num_target_tokens)


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Of a native checkpoint; None of another."""
    path = folder / "manifest.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
