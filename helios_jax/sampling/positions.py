"""Which parameters and history hold at each of several successive positions of a row?"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.sampling.arrays import SamplingArrays
from helios_jax.sampling.history import TokenHistory, update_history


class PositionRows(NamedTuple):
    """What `warp_logits` takes beside the logits, for B * (J + 1) rows: sampling, history,
    num_output_tokens_B."""

    sampling: SamplingArrays
    history: TokenHistory | None
    num_output_tokens_B: Array


def position_rows(
    sampling: SamplingArrays,
    history: TokenHistory | None,
    num_output_tokens_B: Array,
    draft_tokens_BJ: Array,
) -> PositionRows:
    """A draft's J + 1 positions as rows: row b * (J + 1) + j has seen the first j draft tokens.

    `warp_logits(logits_BTV.reshape(-1, V), *position_rows(...))` with T = J + 1 is then exactly
    what plain decoding would draw from if it had emitted those tokens. Without penalties and bad
    words no array over the vocabulary but the allowed ids is repeated.

    Args:
      draft_tokens_BJ: int32; a negative id is not recorded.
    """
    num_drafts = draft_tokens_BJ.shape[1]
    repeats = num_drafts + 1
    sampling, history, num_output_tokens_B, draft_tokens_BJ = jax.tree.map(
        lambda x: jnp.repeat(x, repeats, axis=0, total_repeat_length=x.shape[0] * repeats),
        (sampling, history, num_output_tokens_B, draft_tokens_BJ),
    )
    offset_B = jnp.arange(num_output_tokens_B.shape[0], dtype=jnp.int32) % repeats
    for j in range(num_drafts):
        history = update_history(history, draft_tokens_BJ[:, j], offset_B > j)
    return PositionRows(sampling, history, num_output_tokens_B + offset_B)
