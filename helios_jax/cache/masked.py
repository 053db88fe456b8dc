"""How are arrays read and written at indices of which some count for nothing?"""

import jax.numpy as jnp
import numpy as np
from jax import Array


def masked_index(index: Array, mask: Array) -> Array:
    """`index` where `mask`, elsewhere one that mode="drop" drops."""
    return jnp.where(mask, index, np.iinfo(np.int32).max)


def masked_set(array: Array, index: Array, values: Array | int, mask: Array) -> Array:
    """`array` with array[index] = values where `mask`."""
    return array.at[masked_index(index, mask)].set(values, mode="drop")


def masked_add(array: Array, index: Array, values: Array | int, mask: Array) -> Array:
    """`array` with array[index] += values where `mask`; an index may occur repeatedly."""
    return array.at[masked_index(index, mask)].add(values, mode="drop")


def masked_max(array: Array, index: Array, values: Array, mask: Array) -> Array:
    """`array` with array[index] = max(array[index], values) where `mask`; likewise."""
    return array.at[masked_index(index, mask)].max(values, mode="drop")


def get_any(array: Array, index: Array) -> Array:
    """array[index]; some element where the index is -1, for the caller to mask."""
    return array.at[jnp.maximum(index, 0)].get(mode="clip")


def after(read: Array, value: Array | int) -> Array:
    """`value`, but computed from `read`, int32.

    An array that is read at some indices and then written is updated in place only if XLA sees
    that the writing comes after the reading; otherwise it is copied as a whole.
    """
    return jnp.where(read == np.iinfo(np.int32).min, read, value)


def ranks(mask: Array) -> Array:
    """How many entries of `mask` are set before each, int32."""
    return jnp.cumsum(mask.astype(jnp.int32)) - mask
