"""How much do a target's and a draft's distributions share along a given text?

The teacher-forced acceptance: sum min(p, q) at every position (arXiv 2211.17192, corollary 3.6), 1
or 0 for greedy decoding; what a round of one draft token would accept.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.distill.acceptance import Counts
from helios_jax.distill.teacher import chunks, hidden_states, pad, width_of
from helios_jax.model import DraftHead, Transformer
from helios_jax.model.compiler import jit
from helios_jax.speculative.draft_vocabulary import model_params, to_draft, to_target


class Overlap(NamedTuple):
    """Of one text: overlap_N and context_N, teacher-forced acceptance and tokens before it, at
    every output token."""

    overlap_N: np.ndarray
    context_N: np.ndarray


def teacher_forced(
    target: tuple[Transformer, Any],
    draft: tuple[Transformer | DraftHead, Any],
    texts: Sequence[Counts],
    num_rows: int = 4,
) -> list[Overlap]:
    """Sum min(p, q) at the temperature of each text; see the module.

    Args:
      draft: (model or head, params); the params may be `ReducedParams`. Of a head: its first draft
        token, from the target's state before.
    """
    model, params = draft
    found = []
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    for first in range(0, len(order), num_rows):
        batch = [texts[i] for i in order[first : first + num_rows]]
        longest = max(len(text.tokens) for text in batch)
        tokens_BT, positions_BT = pad([text.tokens for text in batch], width_of(longest), num_rows)
        mine_BT = to_draft(params, jnp.asarray(tokens_BT))
        p_BTD = np.asarray(hidden_states(*target, tokens_BT, positions_BT))
        if isinstance(model, DraftHead):
            before_BTD = np.pad(p_BTD, ((0, 0), (1, 0), (0, 0)))[:, :-1]
            q_BTD = np.asarray(_head_states(model, model_params(params), before_BTD, mine_BT))
        else:
            q_BTD = np.asarray(hidden_states(model, model_params(params), mine_BT, positions_BT))
        for row, text in enumerate(batch):
            place = slice(text.num_prompt - 1, len(text.tokens) - 1)
            temperature = jnp.float32(text.temperature)
            overlap = [
                np.asarray(_overlap(*target, *draft, p_CD, q_CD, temperature))[:number]
                for number, p_CD, q_CD in chunks(p_BTD[row, place], q_BTD[row, place])
            ]
            context_N = np.arange(text.num_prompt, len(text.tokens))
            found.append((order[first + row], Overlap(np.concatenate(overlap), context_N)))
    return [overlap for _, overlap in sorted(found, key=lambda item: item[0])]


@partial(jit, static_argnums=0)
def _head_states(head: DraftHead, params: Any, before_BTD, tokens_BT):
    """What the head's logits are taken of, at every token."""
    return head.apply(params, before_BTD, tokens_BT, method="hidden")


@partial(jit, static_argnums=(0, 2))
def _overlap(model, params, draft, draft_params, p_CD, q_CD, temperature):
    p_CV: Any = model.apply(params, p_CD, method="logits")
    q_CU: Any = draft.apply(model_params(draft_params), q_CD, method="logits")
    q_CV = to_target(draft_params, q_CU)
    shared = min(p_CV.shape[1], q_CV.shape[1])
    same_C = jnp.argmax(p_CV, axis=1) == jnp.argmax(q_CV, axis=1)
    heat = jnp.where(temperature > 0, temperature, 1)
    p_CV, q_CV = jax.nn.softmax(p_CV / heat), jax.nn.softmax(q_CV / heat)
    both_C = jnp.sum(jnp.minimum(p_CV[:, :shared], q_CV[:, :shared]), axis=1)
    return jnp.where(temperature > 0, both_C, same_C)
