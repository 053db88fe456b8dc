"""What does the student itself say, and what does the teacher find of that? (arXiv 2306.13649)"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from helios_jax.distill import store
from helios_jax.distill.sampling import SamplingPlan
from helios_jax.distill.teacher import Teacher, pad, width_of
from helios_jax.generation import generate
from helios_jax.model import Transformer
from helios_jax.model.params import Params
from helios_jax.sampling import stack_sampling
from helios_jax.speculative import DraftVocabulary

_ROWS = 32


def sampler(
    model: Transformer,
    teacher: Teacher,
    prompts: Sequence[Sequence[int]],
    plan: SamplingPlan,
    num_sequences: int,
    folder: Path,
    identity: dict[str, Any],
    vocabulary: DraftVocabulary | None = None,
) -> Callable[[Params, int], list[store.Sequence]]:
    """A function of the student's parameters and a round's number, see `trainer.OnPolicy`.

    The student goes on from the prompts in its own ids; the teacher reads what they mean. A round
    that `folder` holds is read from there.

    Args:
      plan: temperatures, longest answer and seed; sequences of different rounds differ.
    """

    def sample(params: Params, number: int) -> list[store.Sequence]:
        with store.open_store(folder, identity) as kept:
            if number not in kept:
                drawn = _sample(model, params, prompts, plan, num_sequences, number, vocabulary)
                labels = teacher.label([(tokens, num) for tokens, num, _ in drawn])
                kept.write(number, [
                    store.Sequence(np.asarray(tokens, np.int32), num, temperature, label)
                    for (tokens, num, temperature), label in zip(drawn, labels, strict=True)
                ])  # fmt: skip
            return kept.read(number)

    return sample


def _sample(
    model: Transformer, params: Params, prompts: Sequence[Sequence[int]], plan: SamplingPlan,
    num_sequences: int, number: int, vocabulary: DraftVocabulary | None,
) -> list[tuple[list[int], int, float]]:  # fmt: skip
    """(tokens in the teacher's ids, tokens of the prompt, temperature) of each sequence."""
    sampled = []
    for first in range(0, num_sequences, _ROWS):
        indices = [number * num_sequences + first + i for i in range(_ROWS)]
        asked = [list(prompts[index % len(prompts)]) for index in indices]
        settings = [plan.params(index, len(prompts)) for index in indices]
        tokens_BT, _ = pad(asked, width_of(max(map(len, asked))), _ROWS)
        if vocabulary is not None:
            tokens_BT = vocabulary.nearest_V[tokens_BT]
        output = generate(
            model, params, jnp.asarray(tokens_BT), jnp.asarray(list(map(len, asked)), jnp.int32),
            stack_sampling(
                settings, vocab_size=model.config.vocab_size,
                eos_token_ids=model.config.eos_token_ids,
            ),
            plan.max_tokens, num_logprobs=None,
        )  # fmt: skip
        for row, (prompt, one) in enumerate(zip(asked, settings, strict=True)):
            drawn = np.asarray(output.tokens[row, : int(output.lengths[row])])
            if vocabulary is not None:
                drawn = vocabulary.ids_U[drawn]
            sampled.append(([*prompt, *drawn.tolist()], len(prompt), one.temperature))
    return sampled[:num_sequences]
