"""How fast are prompts prefilled while requests wait? Measured, since memory may be the limit.

Sums over steps that left rows waiting, forgotten with a time constant of MEMORY_SECONDS; as far as
there are none, the configured rate stands in.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

MEMORY_SECONDS = 5.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pace:
    """float32 scalars.

    Attributes:
      last_time: of the last call of `schedule`.
      last_tokens: in its chunk; -1 if it left nobody waiting.
      seconds, tokens: the sums.
    """

    last_time: Array
    last_tokens: Array
    seconds: Array
    tokens: Array


def init_pace() -> Pace:
    """Nothing measured yet. Four arrays, since a state that is donated must not hold one twice."""
    return Pace(
        last_time=jnp.float32(0),
        last_tokens=jnp.float32(-1),
        seconds=jnp.float32(0),
        tokens=jnp.float32(0),
    )


def observe(pace: Pace, now: Array) -> Pace:
    """Adds the step that ends `now`."""
    seconds = jnp.maximum(now - pace.last_time, 0.0)
    kept = jnp.exp(-seconds / MEMORY_SECONDS)
    counts = pace.last_tokens >= 0
    return dataclasses.replace(
        pace,
        seconds=kept * pace.seconds + jnp.where(counts, seconds, 0.0),
        tokens=kept * pace.tokens + jnp.where(counts, pace.last_tokens, 0.0),
    )


def begin(pace: Pace, now: Array, num_chunk_tokens: Array, num_waiting: Array) -> Pace:
    """Remembers the step that begins `now`."""
    tokens = jnp.where(num_waiting > 0, num_chunk_tokens, -1).astype(jnp.float32)
    return dataclasses.replace(pace, last_time=now, last_tokens=tokens)


def seconds_per_token(pace: Pace, tokens_per_second: Array) -> Array:
    """What a prompt token takes, float32.

    Args:
      tokens_per_second: the configured rate; infinity where it is not known.
    """
    share = jnp.minimum(pace.seconds / MEMORY_SECONDS, 1.0)
    measured = pace.seconds / jnp.maximum(pace.tokens, 1.0)
    return share * measured + (1.0 - share) / tokens_per_second
