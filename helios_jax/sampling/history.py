"""What must be remembered of a row's tokens for penalties and bad words: `TokenHistory`."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.sampling.arrays import SamplingArrays


class TokenCounts(NamedTuple):
    """output_BV: int32, how often each id is in the row's output; in_prompt_BV: bool, whether it is
    in the row's prompt."""

    output_BV: Array
    in_prompt_BV: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenHistory:
    """The tokens of B rows as the filters need them; a part that no row needs is None.

    Attributes:
      counts: for the penalties.
      recent_BX: int32, the row's last X - 1 output tokens, the newest last, for bad words of up to
        X tokens; -1 before the first.
    """

    counts: TokenCounts | None
    recent_BX: Array | None


def init_history(
    tokens_BT: Array,
    prompt_lengths_B: Array,
    sampling: SamplingArrays,
    *,
    vocab_size: int,
    lengths_B: Array | None = None,
) -> TokenHistory | None:
    """The history of rows whose tokens are known; None if no filter needs one.

    Args:
      tokens_BT: int32, prompts and outputs, padded on the right with anything.
      prompt_lengths_B: int32, tokens of the prompt.
      sampling: tells which parts are needed.
      vocab_size: V.
      lengths_B: int32, tokens in all: those after the prompt are output (a resumed row). None for
        prompts alone.
    """
    if sampling.penalties is None and sampling.bad_words_BWX is None:
        return None
    lengths_B = prompt_lengths_B if lengths_B is None else lengths_B
    batch, width = tokens_BT.shape
    position_T = jnp.arange(width, dtype=jnp.int32)
    is_prompt_BT = position_T < prompt_lengths_B[:, None]
    is_output_BT = ~is_prompt_BT & (position_T < lengths_B[:, None])
    counts = recent_BX = None
    if sampling.penalties is not None:
        row_B1 = jnp.arange(batch, dtype=jnp.int32)[:, None]
        in_prompt_BV = jnp.zeros((batch, vocab_size), bool)
        prompt_ids_BT = jnp.where(is_prompt_BT, tokens_BT, vocab_size)
        in_prompt_BV = in_prompt_BV.at[row_B1, prompt_ids_BT].set(True, mode="drop")
        output_BV = jnp.zeros((batch, vocab_size), jnp.int32)
        output_ids_BT = jnp.where(is_output_BT, tokens_BT, vocab_size)
        output_BV = output_BV.at[row_B1, output_ids_BT].add(1, mode="drop")
        counts = TokenCounts(output_BV, in_prompt_BV)
    if sampling.bad_words_BWX is not None:
        num_recent = sampling.bad_words_BWX.shape[2] - 1
        back_X = jnp.arange(-num_recent, 0, dtype=jnp.int32)
        position_BX = lengths_B[:, None] + back_X
        recent_BX = jnp.take_along_axis(tokens_BT, jnp.clip(position_BX, 0, width - 1), axis=1)
        recent_BX = jnp.where(position_BX >= prompt_lengths_B[:, None], recent_BX, -1)
    return TokenHistory(counts, recent_BX)


def update_history(
    history: TokenHistory | None, tokens_B: Array, active_B: Array
) -> TokenHistory | None:
    """The history after each active row's output grew by its token.

    Args:
      history: before; None stays None.
      tokens_B: int32; a negative id is not recorded.
      active_B: bool; the other rows keep their history.
    """
    if history is None:
        return None
    active_B = active_B & (tokens_B >= 0)
    counts, recent_BX = history.counts, history.recent_BX
    if counts is not None:
        batch, vocab_size = counts.output_BV.shape
        ids_B = jnp.where(active_B, tokens_B, vocab_size)
        row_B = jnp.arange(batch, dtype=jnp.int32)
        counts = counts._replace(output_BV=counts.output_BV.at[row_B, ids_B].add(1, mode="drop"))
    if recent_BX is not None:
        shifted_BX = jnp.concatenate([recent_BX, tokens_B[:, None]], axis=1)[:, 1:]
        recent_BX = jnp.where(active_B[:, None], shifted_BX, recent_BX)
    return TokenHistory(counts, recent_BX)
