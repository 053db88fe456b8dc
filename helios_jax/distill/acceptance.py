"""What does a proposer get from a target, prompt by prompt?

    python -m helios_jax.distill.acceptance --target smollm2-135m --draft DIR \
        --prompts FILE --json out.json       see `acceptance_command`

Speculative runs as they serve: rounds of draft and verification from every prompt on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.calibrate.data import read_objects, render
from helios_jax.distill.teacher import pad, width_of
from helios_jax.model import Transformer
from helios_jax.model.compiler import jit
from helios_jax.sampling import SamplingParams, stack_sampling
from helios_jax.speculative import Speculation, SpeculationParams, begin, speculative_round

# Widths of prompts: each is a program for each proposer.
_WIDTHS = (128, 512, 1024, 2048, 4096)


class Prompt(NamedTuple):
    """category: a name; tokens: ids."""

    category: str
    tokens: list[int]


@dataclass(frozen=True)
class Counts:
    """Of one prompt at one temperature.

    Attributes:
      num_proposed, num_accepted: draft tokens.
      num_rounds: verifications.
      tokens: the prompt's and the output's ids.
      num_prompt: of them.
    """

    category: str
    temperature: float
    num_proposed: int
    num_accepted: int
    num_rounds: int
    tokens: tuple[int, ...]
    num_prompt: int


def run_prompts(
    target: tuple[Transformer, Any],
    speculation: Speculation,
    extra: SpeculationParams,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    *,
    max_tokens: int,
    eos_token_ids: Sequence[int] = (),
    num_rows: int = 8,
    kv_dtype: str = "bfloat16",
    seed: int = 0,
) -> list[Counts]:
    """Every prompt at every temperature; the results are in no particular order."""
    work = [(prompt, t, i) for i, prompt in enumerate(prompts) for t in temperatures]
    by_width: dict[int, list] = {}
    for item in work:
        by_width.setdefault(width_of(len(item[0].tokens), _WIDTHS), []).append(item)
    results = []
    for width, items in sorted(by_width.items()):
        for first in range(0, len(items), num_rows):
            batch = items[first : first + num_rows]
            results += _run_batch(
                target, speculation, extra, batch, width, num_rows, max_tokens,
                tuple(eos_token_ids), kv_dtype, seed,
            )  # fmt: skip
    return results


def _run_batch(
    target, speculation, extra, batch, width, num_rows, max_tokens, eos, kv_dtype, seed
) -> list[Counts]:
    model, params = target
    tokens_BT, _ = pad([prompt.tokens for prompt, _, _ in batch], width, num_rows)
    lengths = [len(prompt.tokens) for prompt, _, _ in batch] + [0] * (num_rows - len(batch))
    settings = [
        SamplingParams(temperature=t, max_tokens=max_tokens, seed=seed + number)
        for _, t, number in batch
    ]
    settings += [settings[0]] * (num_rows - len(batch))
    sampling = stack_sampling(settings, vocab_size=model.config.vocab_size, eos_token_ids=eos)
    tokens_BS, known_B, proposed_B, accepted_B, rounds_B = jax.device_get(
        _rounds(
            model, params, speculation, extra, jnp.asarray(tokens_BT),
            jnp.asarray(lengths, jnp.int32), sampling, max_tokens, kv_dtype,
        )
    )  # fmt: skip
    return [
        Counts(
            prompt.category, temperature, int(proposed_B[row]), int(accepted_B[row]),
            int(rounds_B[row]), tuple(tokens_BS[row, : known_B[row]].tolist()), lengths[row],
        )
        for row, (prompt, temperature, _) in enumerate(batch)
    ]  # fmt: skip


@partial(jit, static_argnums=(0, 2, 7, 8))
def _rounds(
    model, params, speculation, extra, tokens_BT, lengths_B, sampling, max_tokens, kv_dtype
):
    target = model, params
    kv, state = begin(
        target, speculation, extra, tokens_BT, lengths_B, sampling,
        max_new_tokens=max_tokens, kv_dtype=kv_dtype,
    )  # fmt: skip

    def turn(carry):
        state, proposed_B, accepted_B, rounds_B = carry
        running_B = state.running_B
        state, record = speculative_round(target, speculation, extra, kv, sampling, state)
        return (
            state,
            proposed_B + jnp.where(running_B, record.num_draft_B, 0),
            accepted_B + jnp.where(running_B, record.num_accepted_B, 0),
            rounds_B + running_B,
        )

    zeros_B = jnp.zeros(len(lengths_B), jnp.int32)
    state, *counts = lax.while_loop(
        lambda carry: jnp.any(carry[0].running_B), turn, (state, zeros_B, zeros_B, zeros_B)
    )
    return state.tokens_BS, state.num_known_B, *counts


def read_prompts(
    path: Path, tokenizer: Any, per_category: int | None, max_length: int
) -> list[Prompt]:
    """Prompts of a JSONL file, in its order; the first `per_category` of each category.

    A line is as for `conversation_of`; it may have a `category`. Longer prompts than `max_length`
    tokens are left out.

    Raises:
      ValueError: naming the line.
    """
    found: dict[str, list[Prompt]] = {}
    for where, fields in read_objects(path):
        tokens = tokenizer.encode(render(where, fields, tokenizer))
        category = fields.get("category", "all")
        members = found.setdefault(category, [])
        if len(tokens) <= max_length and (per_category is None or len(members) < per_category):
            members.append(Prompt(category, tokens))
    return [prompt for members in found.values() for prompt in members]


if __name__ == "__main__":
    from helios_jax.distill.acceptance_command import main

    main()
