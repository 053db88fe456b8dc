"""When does a row end, and with which of the tokens drawn for it?"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.sampling.arrays import SamplingArrays, is_stop_token

RUNNING, STOP, LENGTH, NON_FINITE = 0, 1, 2, 3
FINISH_REASONS = {RUNNING: None, STOP: "stop", LENGTH: "length", NON_FINITE: "error"}


class EndedRows(NamedTuple):
    """tokens_BT: int32, the tokens that count, -1 beyond them; num_tokens_B: int32, how many;
    finish_reason_B: int32, `RUNNING`, `STOP`, `LENGTH` or `NON_FINITE`."""

    tokens_BT: Array
    num_tokens_B: Array
    finish_reason_B: Array


def end_rows(
    tokens_BT: Array, num_drawn_B: Array, sampling: SamplingArrays, room_B: Array
) -> EndedRows:
    """Cuts several tokens drawn at once where drawing them one by one would have ended.

    A row ends with the first token that stops it, a stop token included; before a token of -1 (no
    token could be drawn); or when it has no room left, whichever comes first.

    Args:
      tokens_BT: int32, in order; the first `num_drawn_B` of a row count.
      sampling: names the stop tokens.
      room_B: int32 >= 0, tokens that the row may still get.
    """
    place_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    within_BT = place_T < jnp.minimum(num_drawn_B, room_B)[:, None]
    stops_BT = jax.vmap(lambda t_B: is_stop_token(sampling, t_B), in_axes=1, out_axes=1)(tokens_BT)
    stops_BT &= within_BT
    fails_BT = within_BT & (tokens_BT < 0)
    ends_BT = stops_BT | fails_BT
    ended_before_BT = jnp.cumsum(ends_BT, axis=1) - ends_BT > 0
    kept_BT = within_BT & ~ended_before_BT & ~fails_BT
    num_B = jnp.sum(kept_BT, axis=1, dtype=jnp.int32)
    reason_B = jnp.where(num_B >= room_B, LENGTH, RUNNING)
    reason_B = jnp.where(jnp.any(fails_BT & ~ended_before_BT, axis=1), NON_FINITE, reason_B)
    reason_B = jnp.where(jnp.any(stops_BT & ~ended_before_BT, axis=1), STOP, reason_B)
    return EndedRows(jnp.where(kept_BT, tokens_BT, -1), num_B, reason_B.astype(jnp.int32))
