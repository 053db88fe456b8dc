"""Which shape should a draft have? What each costs here and on a GPU, and what it must accept.

    python -m helios_jax.distill.shapes --shape 0 6144 1536 --head 1 6144 1024 --json out.json

A shape is layers, tokens, MLP channels of a pruned target; a head is a number of layers, tokens,
MLP channels. Weights do not matter for the cost, so none is trained, and drafts are taken to be
stored in 4 bits. Costs are measured for one row (`measure_costs`: passes of the target in its
fastest form, and a draft step). By them, and by the byte model for a GPU, the table says which
acceptance per token a (the same at every place) pays at all, and the speed-up at a = 0.4, 0.5 and
0.6 with the number of draft tokens that is then best (arXiv 2211.17192, equation 1).
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.config import ModelConfig
from helios_jax.distill.speed import predicted_speed_up
from helios_jax.profiler import GPUS, Formats, formats_as_stored
from helios_jax.speculative.controller import expected_tokens

_ACCEPTANCES = (0.4, 0.5, 0.6)
_MAX_DRAFT_TOKENS = 4


def best_speed_up(
    acceptance: float, draft_seconds: float, verify_seconds_T: np.ndarray
) -> tuple[float, int]:
    """(speed-up over plain decoding, draft tokens of a round); (1, 0) where none pays.

    Args:
      verify_seconds_T: a pass over 1, 2, … tokens.
    """
    num_draft_T = np.arange(len(verify_seconds_T))
    seconds_T = verify_seconds_T + num_draft_T * draft_seconds
    speed_up_T = _tokens(acceptance, len(num_draft_T) - 1) * verify_seconds_T[0] / seconds_T
    number = int(np.argmax(speed_up_T))
    return float(speed_up_T[number]), number


def least_acceptance(draft_seconds: float, verify_seconds_T: np.ndarray) -> float:
    """From which acceptance on some number of draft tokens pays, in hundredths; 1 where none."""
    for percent in range(1, 100):
        if best_speed_up(percent / 100, draft_seconds, verify_seconds_T)[1] > 0:
            return percent / 100
    return 1.0


def predicted(acceptance: float, predict: Callable[[int, float], float]) -> tuple[float, int]:
    """The same by the byte model: `predict` takes draft tokens and tokens per round."""
    tokens_T = _tokens(acceptance, 2 * _MAX_DRAFT_TOKENS)
    found = [(predict(g, float(tokens_T[g])), g) for g in range(1, len(tokens_T))]
    return max([(1.0, 0), *found])


def _tokens(acceptance: float, max_num_draft_tokens: int) -> np.ndarray:
    """Expected tokens of a round by its draft tokens, 0 to the most."""
    return np.asarray(expected_tokens(jnp.asarray([acceptance]), max_num_draft_tokens))[0]


def main() -> None:
    from checkpoints_conv import open_checkpoint, read_params
    from helios_jax import hub
    from helios_jax.calibrate.evaluation import table
    from helios_jax.calibrate.record import circumstances
    from helios_jax.distill.architectures import (
        PrunedShape,
        draft_config,
        initialise,
        num_params,
        prune,
    )
    from helios_jax.llm import use_compilation_cache
    from helios_jax.model.forms import draft_form, serving_form
    from helios_jax.speculative import (
        DraftVocabulary,
        ReducedParams,
        Speculation,
        measure_costs,
    )
    from helios_jax.speculative_config import draft_proposer

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--shape", nargs=3, action="append", default=[])
    parser.add_argument("--head", nargs=3, action="append", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not given.shape and not given.head:
        parser.error("give one or more --shape or --head")
    use_compilation_cache()
    checkpoint = open_checkpoint(hub.resolve(given.target))
    params = read_params(checkpoint)
    form = serving_form(checkpoint.config, params, "auto")
    V = checkpoint.config.vocab_size
    passes = tuple(range(1, _MAX_DRAFT_TOKENS))
    rows: list[dict[str, Any]] = []
    verify: np.ndarray | None = None
    asked = [(False, each) for each in given.shape] + [(True, each) for each in given.head]
    for is_head, (layers, tokens, channels) in asked:
        ids = np.arange(int(tokens), dtype=np.int32)
        vocabulary = DraftVocabulary(ids, np.minimum(np.arange(V, dtype=np.int32), len(ids) - 1))
        if is_head:
            config = draft_config(
                checkpoint.config, vocabulary, is_draft_head=True, num_layers=int(layers),
                intermediate_size=int(channels),
            )  # fmt: skip
            pruned = initialise(config, jax.random.key(0), params, vocabulary)
        else:
            shape = PrunedShape(tuple(map(int, layers.split(","))), int(channels))
            config, pruned = prune(checkpoint.config, params, shape, vocabulary)
        draft = draft_form(config, pruned, "auto")
        proposer = draft_proposer(draft.model, vocabulary)
        speculation = Speculation(proposer, _MAX_DRAFT_TOKENS, intermediate_lengths=passes)
        costs = jax.device_get(
            measure_costs(
                (form.model, form.params), speculation, ReducedParams.of(draft.params, vocabulary),
                kv_dtype="bfloat16",
            )
        )  # fmt: skip
        # The target's passes are the same for all: the first measurement counts.
        verify = np.asarray(costs.verify_seconds_T) if verify is None else verify
        name = f"{'head ' * is_head}{layers}; {tokens}; {channels}"
        rows.append(_row(name, checkpoint.config, formats_as_stored(params), config,
                         num_params(pruned), float(costs.draft_seconds), verify))  # fmt: skip
        print(rows[-1], flush=True)
    assert verify is not None
    text = "Passes of the target over 1 to 5 tokens, ms: "
    text += ", ".join(f"{1000 * seconds:.1f}" for seconds in verify) + ".\n\n"
    text += table(
        ["layers; tokens; channels", "parameters, M", "draft step, ms", "pays from a ="]
        + [f"{where}, a = {a}" for where in ("here", "H100 predicted") for a in _ACCEPTANCES],
        [
            [row["shape"], f"{row['num_params'] / 1e6:.1f}", f"{1000 * row['draft_seconds']:.2f}",
             f"{row['pays_from']:.2f}"]
            + [f"{x:.2f} ({g})" for x, g in (*row["here"], *row["h100"])]
            for row in rows
        ],
    )  # fmt: skip
    print(text)
    if given.json is not None:
        content = {
            "circumstances": circumstances(),
            "verify_seconds": verify.tolist(),
            "rows": rows,
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n")
        given.json.with_suffix(".md").write_text(text + "\n")


def _row(
    name: str, target: ModelConfig, target_formats: Formats, draft: ModelConfig, number: int,
    draft_seconds: float, verify: np.ndarray,
) -> dict[str, Any]:  # fmt: skip
    def predict(num_draft_tokens: int, tokens_per_round: float) -> float:
        return predicted_speed_up(
            target, draft, GPUS["h100"].hardware, num_draft_tokens=num_draft_tokens,
            tokens_per_round=tokens_per_round, context=256,
            target_formats=target_formats,
            draft_formats=Formats(weight_bits=4, group_size=64, zero_bits=0, head_bits=4),
        )  # fmt: skip

    return {
        "shape": name,
        "num_params": number,
        "draft_seconds": draft_seconds,
        "pays_from": least_acceptance(draft_seconds, verify),
        "here": [best_speed_up(a, draft_seconds, verify) for a in _ACCEPTANCES],
        "h100": [predicted(a, predict) for a in _ACCEPTANCES],
    }


if __name__ == "__main__":
    main()
