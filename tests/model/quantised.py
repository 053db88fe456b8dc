"""How do the model tests get quantised parameters: rounding to nearest, groups of 32 inputs."""

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.quant import QuantTensor
from pallas_kernels import packing

GROUP = 32


def quantise(weight_NK: np.ndarray, dtype=np.float32) -> QuantTensor:
    """4-bit codes with a scale and a minimum per group (GGUF's Q4_1)."""
    N, K = weight_NK.shape
    assert K % GROUP == 0, f"{K} inputs: a test model needs a multiple of {GROUP}"
    grouped = np.asarray(weight_NK, np.float32).reshape(N, -1, GROUP)
    offset = grouped.min(axis=-1).astype(dtype)
    scale = ((grouped.max(axis=-1) - offset) / 15).astype(dtype)
    codes = np.clip(np.round((grouped - offset[..., None]) / scale[..., None]), 0, 15)
    packed = packing.pack_int4(codes.astype(np.uint8).reshape(N, K))
    return QuantTensor(jnp.asarray(packed), jnp.asarray(scale), None, jnp.asarray(offset))


def quantise_linears(params, embedding: bool = False, dtype=np.float32):
    """`params` with every kernel whose inputs allow it, and the table if asked, quantised."""

    def place(path, leaf):
        if path[-1].key == "kernel" and leaf.shape[0] % GROUP == 0:
            return quantise(np.asarray(leaf).T, dtype)
        if path[-1].key == "embedding" and embedding:
            return quantise(np.asarray(leaf), dtype)
        return jnp.asarray(leaf)

    return jax.tree_util.tree_map_with_path(place, params)


def dequantise(params):
    """`params` with the dense arrays that its QuantTensors stand for."""

    def is_quant(leaf):
        return isinstance(leaf, QuantTensor)

    def place(path, leaf):
        if not is_quant(leaf):
            return leaf
        return leaf.dequantize().T if path[-1].key == "kernel" else leaf.dequantize()

    return jax.tree_util.tree_map_with_path(place, params, is_leaf=is_quant)
