"""Where keys and values live between steps, and how attention reads them.

A cache is a pytree with two methods, which is all that the model asks of it:

    begin(positions_BT) -> cache
        Makes room for T new tokens per row; position -1 marks a padding token.
    attend(layer, query_BTNH, key_BTKH, value_BTKH, ...) -> (output_BTNH, cache)
        Writes the new keys and values of `layer`, then attends to everything written so far.

`DenseCache` is one contiguous buffer per layer, `NoCache` keeps nothing (training, scoring).
"""

from helios_jax.cache.attention import attention
from helios_jax.cache.dense import DenseCache, NoCache

__all__ = ["DenseCache", "NoCache", "attention"]
