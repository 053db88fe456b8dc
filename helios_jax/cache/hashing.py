"""What names the content of a full block? A chained 64-bit hash of everything up to its end.

Two uint32 lanes, since 64-bit integers are off in JAX by default. Each lane sums mixed words of the
block's tokens and positions, then mixes the sum into the previous block's hash; the mixer is
MurmurHash3's 32-bit finaliser. Equal prefixes have equal hashes; others collide with probability
2^-64 a pair, for tokens chosen without knowing the salt. (0, 0) is reserved for "no hash".
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Odd constants of xxHash32; one column a lane.
_TOKEN = np.array([0x9E3779B1, 0x85EBCA77], np.uint32)
_PLACE = np.array([0xC2B2AE3D, 0x27D4EB2F], np.uint32)
_CHAIN = np.array([0x165667B1, 0x9E3779B1], np.uint32)


def initial_hash(precision: int, salt: Sequence[int] = (0, 0)) -> Array:
    """What the hash of a row's first block chains from, uint32 [2].

    Args:
      precision: tells apart blocks of different dtypes or tokens per block.
      salt: two 32-bit words; rows share blocks only if theirs are equal (one salt a tenant).
    """
    words = jnp.asarray(np.array([word & 0xFFFFFFFF for word in salt], np.uint32))
    return _mix(_mix(words + _TOKEN) ^ (jnp.asarray(precision, jnp.uint32) * _PLACE + _CHAIN))


def chain_hash(previous_X2: Array, tokens_XT: Array, lengths_X: Array | None = None) -> Array:
    """Hash of blocks that follow those with hash `previous_X2`, uint32 [..., 2].

    Args:
      tokens_XT: int32 [..., T].
      lengths_X: tokens that count, where T is larger than the block; None means all.
    """
    return _chain(previous_X2, _digest(tokens_XT, lengths_X))


def prompt_hashes(tokens_S: Array, num_tokens: Array | int, block_tokens: int, first: Array):
    """Hashes of a prompt's full blocks, uint32 [S // block_tokens, 2]; (0, 0) past the last one.

    Args:
      tokens_S: int32, padded at will.
      num_tokens: how many of them are the prompt.
      block_tokens: tokens per block.
      first: `initial_hash`.
    """
    num_blocks = tokens_S.shape[0] // block_tokens
    digest_M2 = _digest(tokens_S[: num_blocks * block_tokens].reshape(num_blocks, block_tokens))

    def step(previous, digest):
        hash_2 = _chain(previous, digest)
        return hash_2, hash_2

    _, hashes_M2 = lax.scan(step, first, digest_M2)
    is_full = (jnp.arange(num_blocks) + 1) * block_tokens <= num_tokens
    return jnp.where(is_full[:, None], hashes_M2, jnp.uint32(0))


def _digest(tokens_XT: Array, lengths_X: Array | None = None) -> Array:
    place_T1 = jnp.arange(1, tokens_XT.shape[-1] + 1, dtype=jnp.uint32)[:, None]
    words_XT2 = _mix(_mix(tokens_XT.astype(jnp.uint32)[..., None] + _TOKEN) ^ (place_T1 * _PLACE))
    if lengths_X is not None:
        words_XT2 = jnp.where(place_T1 <= lengths_X[..., None, None], words_XT2, jnp.uint32(0))
    return jnp.sum(words_XT2, axis=-2, dtype=jnp.uint32)


def _chain(previous_X2: Array, digest_X2: Array) -> Array:
    hash_X2 = _mix((previous_X2 * _CHAIN + np.uint32(1)) ^ _mix(digest_X2))
    is_reserved = jnp.all(hash_X2 == 0, axis=-1, keepdims=True)
    return jnp.where(is_reserved, jnp.uint32(1), hash_X2)


def _mix(word: Array) -> Array:
    word = (word ^ (word >> 16)) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * np.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
