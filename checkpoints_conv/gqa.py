"""How does a model get fewer or more KV heads?

Fewer: each new head is the mean of the heads it replaces (arXiv 2305.13245, section 2.1), a start
for further training that changes what the model computes. More: each head is repeated, which
computes the same function with a larger KV cache; it shows what grouped queries save.

Query head n reads KV head n // G, so that neighbouring heads are pooled, and a repeated head's
copies stand together.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.kv_scales import KvScales
from checkpoints_conv.tree import Leaf, Path
from helios_jax.config import ModelConfig, require
from helios_jax.quant import QuantTensor


def with_kv_heads(
    params: dict[str, Any], config: ModelConfig, num_kv_heads: int
) -> tuple[dict[str, Any], ModelConfig]:
    """The model with another number of KV heads.

    Args:
      params: {"params": tree}; arrays of numpy or jax, and QuantTensors.
      num_kv_heads: a divisor of the present number (heads are pooled), or a multiple of it that
        divides num_heads (heads are repeated; num_heads itself gives multi-head attention).

    Returns:
      Parameters and configuration. Repeated leaves keep their form, QuantTensors included; pooled
      ones are dense, those of QuantTensors in float32.

    Raises:
      ValueError: a number of heads that is neither.
    """
    changed = config_with_kv_heads(config, num_kv_heads)

    def change(keys, leaf):
        path = tuple(key.key for key in keys)
        return leaf_with_kv_heads(path, leaf, config, num_kv_heads)

    tree = jax.tree_util.tree_map_with_path(
        change, params["params"], is_leaf=lambda leaf: isinstance(leaf, QuantTensor)
    )
    return {"params": tree}, changed


def checkpoint_with_kv_heads(checkpoint: Checkpoint, num_kv_heads: int) -> Checkpoint:
    """`with_kv_heads` for a checkpoint that is still on the disk, leaf by leaf.

    `nbytes` stays the source's.
    """
    config = checkpoint.config
    changed = config_with_kv_heads(config, num_kv_heads)

    def read_leaves() -> Iterator[tuple[Path, Leaf]]:
        for path, leaf in checkpoint.tensors():
            yield path, leaf_with_kv_heads(path, leaf, config, num_kv_heads)

    def describe_source() -> dict[str, Any]:
        change = {"from": config.num_kv_heads, "to": num_kv_heads}
        return {**checkpoint.describe_source(), "kv_heads": change}

    scales = checkpoint.kv_scales
    if scales is not None:
        # The largest scale of the pooled heads has room for their mean.
        arrays = (_regroup(array, num_kv_heads, np.max) for array in (scales.k_LK, scales.v_LK))
        scales = KvScales(*arrays)
    return dataclasses.replace(
        checkpoint,
        config=changed,
        read_leaves=read_leaves,
        describe_source=describe_source,
        kv_scales=scales,
    )


def config_with_kv_heads(config: ModelConfig, num_kv_heads: int) -> ModelConfig:
    """The configuration with another number of KV heads; a ValueError for one that cannot be."""
    old = config.num_kv_heads
    require(num_kv_heads >= 1, f"num_kv_heads={num_kv_heads}: must be at least 1")
    require(
        old % num_kv_heads == 0
        or (num_kv_heads % old == 0 and config.num_heads % num_kv_heads == 0),
        f"num_kv_heads={num_kv_heads}: must divide the model's {old} KV heads (they are pooled), "
        f"or be a multiple of them that divides its {config.num_heads} query heads (repeated)",
    )
    return dataclasses.replace(config, num_kv_heads=num_kv_heads)


def leaf_with_kv_heads(path: Path, leaf: Any, config: ModelConfig, num_kv_heads: int) -> Any:
    """One leaf of the changed tree; anything but k and v kernels and biases is itself."""
    if path[1:2] != ("attention",) or path[2] not in ("k", "v"):
        return leaf
    if num_kv_heads == config.num_kv_heads:
        return leaf
    if isinstance(leaf, QuantTensor):
        if num_kv_heads > config.num_kv_heads:
            fields = {
                name: _repeat_rows(array, config, num_kv_heads)
                for name in ("packed", "scale", "zero", "offset")
                if (array := getattr(leaf, name)) is not None
            }
            return dataclasses.replace(leaf, **fields)
        leaf = np.asarray(leaf.dequantize()).T
    # Outputs are the last axis, of a kernel as of a bias.
    heads = leaf.reshape(*leaf.shape[:-1], config.num_kv_heads, config.head_dim)
    if num_kv_heads > config.num_kv_heads:
        grouped = heads.repeat(num_kv_heads // config.num_kv_heads, axis=-2)
    else:
        size = config.num_kv_heads // num_kv_heads
        groups = heads.reshape(*leaf.shape[:-1], num_kv_heads, size, config.head_dim)
        grouped = groups.astype(np.float32).mean(axis=-2).astype(leaf.dtype)
    return grouped.reshape(*leaf.shape[:-1], num_kv_heads * config.head_dim)


def _repeat_rows(array: Any, config: ModelConfig, num_kv_heads: int) -> Any:
    """Rows [N, ...] of whole heads, each head's repeated."""
    heads = array.reshape(config.num_kv_heads, config.head_dim, *array.shape[1:])
    repeated = heads.repeat(num_kv_heads // config.num_kv_heads, axis=0)
    return repeated.reshape(-1, *array.shape[1:])


def _regroup(array_LK: np.ndarray, num_kv_heads: int, pool) -> np.ndarray:
    layers, heads = array_LK.shape
    if num_kv_heads >= heads:
        return array_LK.repeat(num_kv_heads // heads, axis=1)
    return pool(array_LK.reshape(layers, num_kv_heads, -1), axis=-1)
