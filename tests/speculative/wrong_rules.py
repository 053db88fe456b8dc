"""Does the test of the law see wrong rules? `python -m tests.speculative.wrong_rules` shows it.

Each is a mistake that was made somewhere. The right rule must pass the same test.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from helios_jax.sampling import SamplingParams, probs, sample, temper_logits
from helios_jax.speculative import RoundRecord, RowKey, Verdict, accept, acceptance_uniforms, verify
from helios_jax.speculative.acceptance import at_tokens, count_leading
from tests.speculative.law import emitted, exact, p_value, random_pair

ROWS, DRAFTS = 6000, 2
# A right rule falls below this once in a million tests; seeds are fixed.
REJECTED = 1e-6


def _at(values_BTV, place_B):
    return jnp.take_along_axis(values_BTV, place_B[:, None, None], axis=1)[:, 0]


def _tested(p_BTV, q_BJV, tokens_BJ, u_BJ):
    p_BJ = at_tokens(p_BTV[:, : tokens_BJ.shape[1]], tokens_BJ)
    return count_leading(u_BJ * at_tokens(q_BJV, tokens_BJ) < p_BJ)


def no_residual(p_BTV, q_BJV, tokens_BJ, key, num_draft_B) -> Verdict:
    """After a rejection the token is drawn from p, not from max(p - q, 0)."""
    u_BJ = acceptance_uniforms(key, tokens_BJ.shape[1])
    n_B = _tested(p_BTV, q_BJV, tokens_BJ, u_BJ)
    draw_B2 = jax.random.uniform(jax.random.key(5), (len(n_B), 2))
    return Verdict(n_B, sample(_at(p_BTV, n_B), draw_B2))


def reused_number(p_BTV, q_BJV, tokens_BJ, key, num_draft_B) -> Verdict:
    """The number that rejected a token also draws the one that follows."""
    J = tokens_BJ.shape[1]
    u_BJ = acceptance_uniforms(key, J)
    n_B = _tested(p_BTV, q_BJV, tokens_BJ, u_BJ)
    place_B = jnp.minimum(n_B, J - 1)
    u_B = jnp.take_along_axis(u_BJ, place_B[:, None], axis=1)[:, 0]
    residual_BV = jnp.maximum(_at(p_BTV, n_B) - _at(q_BJV, place_B), 0)
    weights_BV = jnp.where((n_B < J)[:, None], residual_BV, _at(p_BTV, n_B))
    return Verdict(n_B, sample(weights_BV, jnp.stack([u_B, u_B], axis=1)))


def accepts_all(p_BTV, q_BJV, tokens_BJ, key, num_draft_B) -> Verdict:
    """A hard-coded number that no ratio is below."""
    verdict = accept(p_BTV, q_BJV, tokens_BJ, key, num_draft_B)
    return verdict._replace(num_accepted_B=num_draft_B)


def q_unwarped(draft, logits_BJV):
    """q is the draft's own softmax, the tokens were drawn after temperature and top-p."""
    return draft._replace(q_BJV=jax.nn.softmax(logits_BJV, axis=-1))


def q_sampled_although_greedy(draft, logits_BJV):
    """The draft took its maximum, and q claims that it drew."""
    return draft._replace(q_BJV=jax.nn.softmax(logits_BJV / PARAMS.temperature, axis=-1))


def top_p_before_temperature(logits_BTV, draft, sampling, history, num_B, rule) -> RoundRecord:
    """The verifier truncates the untempered distribution."""
    B, T, V = logits_BTV.shape
    flat = logits_BTV.reshape(B * T, V)
    plain = SamplingParams(top_p=PARAMS.top_p).to_arrays(B * T, vocab_size=V)
    kept = jnp.isfinite(temper_logits(flat, plain))
    p_BTV = probs(jnp.where(kept, flat / PARAMS.temperature, -jnp.inf)).reshape(B, T, V)
    verdict = rule(
        p_BTV, draft.q_BJV, draft.tokens_BJ, RowKey(sampling.seed_B2, num_B), draft.num_draft_B
    )
    empty_BJ = jnp.zeros(draft.tokens_BJ.shape)
    return RoundRecord(
        draft.tokens_BJ, empty_BJ, empty_BJ, draft.num_draft_B, *verdict,
        is_bonus_B=verdict.num_accepted_B == draft.num_draft_B,
    )  # fmt: skip


def target_unwarped(logits_BTV, draft, sampling, history, num_B, rule) -> RoundRecord:
    """p is the softmax of the logits, whatever the parameters say."""
    plain = SamplingParams(temperature=1.0).to_arrays(len(logits_BTV), vocab_size=VOCAB)
    plain = dataclasses.replace(plain, seed_B2=sampling.seed_B2)
    return verify(logits_BTV, draft, plain, None, num_B, rule=rule)


class Mistake(NamedTuple):
    """what: parts that `law.emitted` takes; the right ones where absent."""

    name: str
    what: dict[str, Any]


VOCAB = 8
PARAMS = SamplingParams(temperature=1.7, top_p=0.93)
# A pair whose residual has several tokens, else a rule cannot draw from it wrongly.
PAIR = random_pair(VOCAB, seed=13)
RIGHT: list[Mistake] = [
    Mistake("the right rule", {}),
    Mistake("the right rule, greedy draft", {"greedy_draft": True}),
    Mistake("the right rule, looked-up draft", {"deterministic": True}),
]
WRONG: list[Mistake] = [
    Mistake("no residual", {"rule": no_residual}),
    Mistake("a number used twice", {"rule": reused_number}),
    Mistake("everything accepted", {"rule": accepts_all}),
    Mistake("q not warped", {"change_draft": q_unwarped}),
    Mistake(
        "q of a draw, the draft greedy",
        {"change_draft": q_sampled_although_greedy, "greedy_draft": True},
    ),
    Mistake("top-p before temperature", {"verify": top_p_before_temperature}),
    Mistake("p not warped", {"verify": target_unwarped}),
]


def judge(mistake: Mistake, seed: int = 0) -> float:
    """The p-value of the first token's law, over rows of random seeds drawn from `seed`."""
    tokens_BN = emitted(
        PAIR,
        PARAMS,
        num_rows=ROWS,
        num_tokens=1,
        num_draft_tokens=DRAFTS,
        seed=seed,
        **mistake.what,
    )
    return p_value(tokens_BN, exact(PAIR, PARAMS, 1))


def main() -> None:
    for mistake in RIGHT + WRONG:
        p = judge(mistake)
        print(f"{mistake.name:32} p = {p:9.2e}  {'rejected' if p < REJECTED else 'accepted'}")


if __name__ == "__main__":
    main()
