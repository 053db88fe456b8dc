"""What is a proposer: the interface between a round and whatever guesses its tokens.

A proposer is a small frozen, hashable object (static under jit) with four pure methods. What it
remembers is one explicit pytree, `ProposerState`; its weights are an argument, `params`. Exactness
never depends on it: a bad guess costs time only. To write one, subclass `Proposer` as a frozen
dataclass and override `propose`, and the others where it has a memory:

    @dataclass(frozen=True)
    class Repeat(Proposer):
        def propose(self, params, state, rows, num_draft_B, max_num_draft_tokens):
            last_B1 = jnp.take_along_axis(rows.tokens_BS, rows.num_known_B[:, None] - 1, axis=1)
            tokens_BJ = jnp.repeat(last_B1, max_num_draft_tokens, axis=1)
            return Draft(tokens_BJ, num_draft_B, None), state

Two rules. `Draft.q_BJV` must be the law that the tokens were really drawn from. And how many tokens
are drafted may depend on anything known before a token is drawn, never on the drawn token itself: a
token that is drawn and then withheld for what it is makes q a wrong law.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.sampling import SamplingArrays, TokenHistory
from helios_jax.speculative.acceptance import RowKey
from helios_jax.speculative.passes import PagedRows


class Draft(NamedTuple):
    """Guesses for the tokens after a row's last known one.

    tokens_BJ: int32; num_draft_B: int32 in 0..J, how many of them count.
    q_BJV: float32, what each was drawn from, over the target's vocabulary; None where they were
      chosen, not drawn (q is one-hot). In a batch of greedy rows it is not read.
    """

    tokens_BJ: Array
    num_draft_B: Array
    q_BJV: Array | None


class ProposerState(NamedTuple):
    """shared: any pytree, such as KV pools; rows: any pytree of arrays whose first axis is B, which
    an engine gathers and scatters as rows come and go. Zeros in `rows` are a row just begun."""

    shared: Any = ()
    rows: Any = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundRows:
    """What a proposer may look at: B rows at the beginning of a round.

    Attributes:
      tokens_BS: int32, prompt and output, anything beyond them.
      num_known_B: int32, tokens known; the last one's KV entry is not in the target's cache yet.
      num_output_B: int32, those of them that are output.
      sampling, history: as for `sample_tokens`.
      hidden_BD: the target's final hidden state at position num_known - 2, the one that the last
        known token was drawn from; zeros where no pass came before.
      kv: where the rows' keys and values lie; a draft model's pools use the same blocks.
      vocab_size: the target's (V); static.
    """

    tokens_BS: Array
    num_known_B: Array
    num_output_B: Array
    sampling: SamplingArrays
    history: TokenHistory | None
    hidden_BD: Array
    kv: PagedRows
    vocab_size: int = field(metadata={"static": True})

    @property
    def key(self) -> RowKey:
        return RowKey(self.sampling.seed_B2, self.num_output_B)


class Verified(NamedTuple):
    """What a proposer is told after a round.

    hidden_BTD: the target's final hidden states at positions num_known - 1 (before the round) and
      after; the first `num_emitted_B` belong to tokens that were kept.
    num_emitted_B, num_known_B: int32, tokens added, and tokens known now.
    """

    hidden_BTD: Array
    num_emitted_B: Array
    num_known_B: Array


@dataclass(frozen=True)
class Proposer:
    """Proposes nothing: plain decoding. The base of all others."""

    def check(self, model: Any) -> None:
        """Raises ValueError where this cannot draft for the target `model`."""

    def init_state(self, num_rows: int, num_blocks: int) -> ProposerState:
        """The state of rows just begun, with KV pools of `num_blocks` blocks a layer."""
        return ProposerState()

    def prefill(
        self, params: Any, state: ProposerState, kv: PagedRows, tokens_BT: Array, starts_B: Array,
        counts_B: Array,
    ) -> ProposerState:  # fmt: skip
        """May take in `counts_B` known tokens at positions `starts_B`.. of each row, beforehand.

        Whatever it leaves, `propose` makes up for.
        """
        return state

    def propose(
        self, params: Any, state: ProposerState, rows: RoundRows, num_draft_B: Array,
        max_num_draft_tokens: int,
    ) -> tuple[Draft, ProposerState]:  # fmt: skip
        """Up to `num_draft_B` tokens for each row, of J = `max_num_draft_tokens` (static, >= 1).

        A row's draft must depend on that row alone, and on nothing but its tokens and state.
        """
        return no_draft(len(rows.num_known_B), max_num_draft_tokens), state

    def observe(self, params: Any, state: ProposerState, verified: Verified) -> ProposerState:
        """The state after a round: forgets what was rejected."""
        return state


def no_draft(num_rows: int, max_num_draft_tokens: int) -> Draft:
    """Nothing, with room for J tokens."""
    tokens_BJ = jnp.full((num_rows, max_num_draft_tokens), -1, jnp.int32)
    return Draft(tokens_BJ, jnp.zeros(num_rows, jnp.int32), None)


def only_tokens(draft: Draft, num_draft_B: Array, vocab_size: int) -> Draft:
    """The draft as far as it is made of tokens of the target, and no longer than it may be."""
    is_token_BJ = (draft.tokens_BJ >= 0) & (draft.tokens_BJ < vocab_size)
    leading_B = jnp.sum(jnp.cumprod(is_token_BJ, axis=1), axis=1, dtype=jnp.int32)
    length_B = jnp.minimum(jnp.minimum(draft.num_draft_B, num_draft_B), leading_B)
    return draft._replace(num_draft_B=length_B.astype(jnp.int32))
