"""Does speculation emit the target's law? Two Markov chains over a few tokens, and a chi-square.

The models are tables: the next token's logits depend on the last token alone. Every row begins with
the same token and differs in its seed, so that thousands of rows are thousands of draws. The parts
that decide (drafting, verification, the acceptance rule) are the library's; a wrong one may be put
in their place, and then the same test must reject it (`wrong_rules`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.sampling import (
    SamplingParams,
    SamplingShapes,
    init_history,
    stack_sampling,
    update_history,
)
from helios_jax.speculative import Draft, accept, draw_drafts, verify
from tests.chi_square import chi_square_p
from tests.sampling import sampling_oracle


class Pair(NamedTuple):
    """target_VV, draft_VV: float32 logits after each token; first: the prompt's only token."""

    target_VV: np.ndarray
    draft_VV: np.ndarray
    first: int = 0


def random_pair(vocab_size: int, seed: int, nearness: float = 0.5) -> Pair:
    """Logits of standard deviation 1.5; the draft's are partly the target's."""
    rng = np.random.default_rng(seed)
    shape = (vocab_size, vocab_size)
    target_VV, noise_VV = 1.5 * rng.standard_normal((2, *shape)).astype(np.float32)
    mixed_VV = nearness * target_VV + np.sqrt(1 - nearness**2) * noise_VV
    return Pair(target_VV, mixed_VV.astype(np.float32))


def keep_draft(draft: Draft, logits_BJV) -> Draft:
    return draft


def emitted(
    pair: Pair,
    params: SamplingParams,
    *,
    num_rows: int,
    num_tokens: int,
    num_draft_tokens: int,
    seed: int = 0,
    greedy_draft: bool = False,
    deterministic: bool = False,
    rule: Callable = accept,
    verify: Callable = verify,
    change_draft: Callable[[Draft, Any], Draft] = keep_draft,
    eos: tuple[int, ...] = (),
    shapes: SamplingShapes | None = None,
) -> np.ndarray:
    """The first `num_tokens` tokens of each row, from as many rounds; int32 [rows, num_tokens].

    Args:
      greedy_draft: the draft takes its most probable token, q is None.
      deterministic: the draft is always the token (last + 1) % V, as from a lookup.
      change_draft: spoils the draft: (draft, the draft's raw logits) -> draft.
      shapes: of the parameters' arrays, so that other parameters compile nothing.
    """
    V = len(pair.target_VV)
    rng = np.random.default_rng([seed, 77])
    one = stack_sampling([params], vocab_size=V, eos_token_ids=eos, shapes=shapes)
    sampling = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_rows, *x.shape[1:])), one)
    seed_B2 = jnp.asarray(rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32))
    sampling = dataclasses.replace(sampling, seed_B2=seed_B2)
    tokens_BN = _run(
        jnp.asarray(pair.target_VV), jnp.asarray(pair.draft_VV), jnp.int32(pair.first), sampling,
        num_tokens=num_tokens, num_draft_tokens=num_draft_tokens, greedy_draft=greedy_draft,
        deterministic=deterministic, rule=rule, verify=verify, change_draft=change_draft,
    )  # fmt: skip
    return np.asarray(tokens_BN)


# Compiling is what these tests wait for: half as long without optimisation.
UNOPTIMISED: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@partial(
    jax.jit,
    static_argnames=(
        "num_tokens", "num_draft_tokens", "greedy_draft", "deterministic", "rule", "verify",
        "change_draft",
    ),
    compiler_options=UNOPTIMISED,
)  # fmt: skip
def _run(
    target_VV, draft_VV, first, sampling, *, num_tokens, num_draft_tokens, greedy_draft,
    deterministic, rule, verify, change_draft,
):  # fmt: skip
    B, V, J, N = len(sampling.seed_B2), len(target_VV), num_draft_tokens, num_tokens
    all_B = jnp.full(B, J, jnp.int32)
    row_B1 = jnp.arange(B)[:, None]

    def propose(last_B, num_output_B, history):
        if deterministic:
            return Draft((last_B[:, None] + 1 + jnp.arange(J)) % V, all_B, None)
        draft, _ = draw_drafts(
            lambda memory: (draft_VV[last_B], memory),
            lambda memory, tokens_B, place, active_B: (draft_VV[tokens_B], memory),
            (), sampling, history, num_output_B, all_B,
            max_num_draft_tokens=J, vocab_size=V, greedy=greedy_draft,
        )  # fmt: skip
        before_BJ = jnp.concatenate([last_B[:, None], draft.tokens_BJ[:, :-1]], axis=1)
        return change_draft(draft, draft_VV[before_BJ])

    def step(_, carry):
        tokens_BN, last_B, num_B, history = carry
        draft = propose(last_B, num_B, history)
        seen_BT = jnp.concatenate([last_B[:, None], draft.tokens_BJ], axis=1)
        record = verify(target_VV[seen_BT], draft, sampling, history, num_B, rule=rule)
        new_B = record.num_accepted_B + 1
        place_T = jnp.arange(J + 1)
        column_BT = jnp.where(place_T < new_B[:, None], num_B[:, None] + place_T, N)
        tokens_BN = tokens_BN.at[row_B1, column_BT].set(record.drawn_BT, mode="drop")
        for j in range(J + 1):
            history = update_history(history, record.drawn_BT[:, j], j < new_B)
        return tokens_BN, record.next_token_B, num_B + new_B, history

    prompt_B1 = jnp.full((B, 1), first, jnp.int32)
    history = init_history(prompt_B1, jnp.ones(B, jnp.int32), sampling, vocab_size=V)
    tokens_BN = jnp.full((B, N), -1, jnp.int32)
    carry = tokens_BN, prompt_B1[:, 0], jnp.zeros(B, jnp.int32), history
    return jax.lax.fori_loop(0, N, step, carry)[0]


def exact(pair: Pair, params: SamplingParams, num_tokens: int, eos=()) -> np.ndarray:
    """The law of the first `num_tokens` tokens, float64 [V] * num_tokens, by the naive filters."""
    V = len(pair.target_VV)
    law = np.zeros((V,) * num_tokens)

    def extend(output: tuple[int, ...], mass: float) -> None:
        if len(output) == num_tokens:
            law[output] = mass
            return
        last = output[-1] if output else pair.first
        next_V = sampling_oracle.distribution(
            pair.target_VV[last], params, (pair.first,), output, eos
        )
        for token in np.flatnonzero(next_V):
            extend((*output, int(token)), mass * next_V[token])

    extend((), 1.0)
    return law


def p_value(tokens_BN: np.ndarray, law: np.ndarray) -> float:
    """`chi_square_p`; 0 where a token came that the law excludes, or none."""
    if (tokens_BN < 0).any():
        return 0.0
    counts = np.bincount(np.ravel_multi_index(tuple(tokens_BN.T), law.shape), minlength=law.size)
    return chi_square_p(counts, law.reshape(-1))
