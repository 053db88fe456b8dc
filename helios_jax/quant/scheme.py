"""On which grid do the values of a quantised weight lie?

A group of weights shares a scale s, and codes c stand for s * (c - zero):

    grid           4-bit values (c - zero)    scale of a group
    "symmetric"    -7..7                      max |w| / 7
    "full"         -8..7                      max(max w / 7, max -w / 8)
    "asymmetric"   -zero..15 - zero           (max w - min w) / 15, the range widened to hold 0

3 and 8 bits likewise. "full" uses the code that "symmetric" leaves out and is never coarser; it is
the grid of symmetric GPTQ and AWQ checkpoints. Everything here works on whole arrays under jit.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from helios_jax.config import require
from helios_jax.quant.tensor import BITS, QuantTensor
from pallas_kernels import packing

GRIDS = ("symmetric", "full", "asymmetric")
GROUP_SIZES = (32, 64, 128, -1)
# What scales are stored in: the dtype of AWQ and GPTQ checkpoints.
_SCALE_DTYPE = jnp.float16
_LARGEST_SCALE = float(jnp.finfo(_SCALE_DTYPE).max)
_SMALLEST_SCALE = float(jnp.finfo(_SCALE_DTYPE).smallest_subnormal)


@dataclass(frozen=True)
class Scheme:
    """How a linear is quantised: hashable, so that it can be a static argument of `jit`.

    Attributes:
      bits: 3, 4 or 8.
      group_size: input channels that share a scale: 32, 64, 128, or -1 for all of them.
      grid: one of `GRIDS`.
    """

    bits: int = 4
    group_size: int = 64
    grid: str = "full"

    def __post_init__(self):
        require(self.bits in BITS, f"bits={self.bits}: must be one of {BITS}")
        require(
            self.group_size in GROUP_SIZES,
            f"group_size={self.group_size}: must be one of {GROUP_SIZES} (-1: one group per output "
            "channel)",
        )
        require(self.grid in GRIDS, f"grid={self.grid!r}: must be one of {GRIDS}")

    def check(self, name: str, in_features: int) -> None:
        """Raises ValueError, naming the linear, where its inputs cannot be grouped or packed."""
        require(
            self.group_size == -1 or in_features % self.group_size == 0,
            f"{name}: group_size={self.group_size} does not divide its {in_features} input "
            "channels; choose a smaller group size, or one group (-1)",
        )
        require(
            self.bits == 8 or in_features % 32 == 0,
            f"{name}: has {in_features} input channels: {self.bits}-bit codes are packed in spans "
            "of 32; quantise it to 8 bits, or skip it",
        )

    def channels_per_group(self, in_features: int) -> int:
        return in_features if self.group_size == -1 else self.group_size

    @property
    def implicit_zero(self) -> int:
        """The stored code of value 0 on the symmetric grids."""
        return 0 if self.bits == 8 else 2 ** (self.bits - 1)

    @property
    def code_range(self) -> tuple[int, int]:
        """The lowest and highest stored code: 8-bit codes are signed, shorter ones are not."""
        half = 2 ** (self.bits - 1)
        lowest = -half + (self.grid == "symmetric")
        return lowest + self.implicit_zero, half - 1 + self.implicit_zero


def fit_grid(groups: jax.Array, scheme: Scheme, clip=1.0) -> tuple[jax.Array, jax.Array]:
    """The scale and zero of every group: float32 [...], of values [..., g].

    Args:
      clip: multiplies the range first, [...] or one number; below 1 the outermost weights saturate.

    Returns:
      scale, already rounded to what is stored, so that codes are chosen for the stored value, and
      never 0: an all-zero group gets scale 1 and codes of value 0. zero, an integer code.
    """
    groups = groups.astype(jnp.float32)
    high = jnp.maximum(jnp.max(groups, axis=-1), 0.0) * clip
    low = jnp.minimum(jnp.min(groups, axis=-1), 0.0) * clip
    first, last = scheme.code_range
    zero = jnp.full_like(high, scheme.implicit_zero)
    if scheme.grid == "asymmetric":
        scale = (high - low) / (last - first)
    else:
        scale = jnp.maximum(high / (last - zero), low / (first - zero))
    empty = scale == 0
    # Weights whose scale would round to 0 are as good as 0, but 0 must not divide anything.
    scale = jnp.clip(scale, _SMALLEST_SCALE, _LARGEST_SCALE)
    scale = jnp.where(empty, 1.0, scale).astype(_SCALE_DTYPE).astype(jnp.float32)
    if scheme.grid == "asymmetric":
        zero = jnp.clip(jnp.round(first - low / scale), first, last)
    return scale, zero


def encode(weights: jax.Array, scale: jax.Array, zero: jax.Array, scheme: Scheme) -> jax.Array:
    """The nearest stored codes, as float32; all arguments broadcast."""
    return jnp.clip(jnp.round(weights / scale) + zero, *scheme.code_range)


def decode(codes: jax.Array, scale: jax.Array, zero: jax.Array) -> jax.Array:
    """The values that `codes` stand for."""
    return scale * (codes - zero)


def grouped(weight_NK: jax.Array, scheme: Scheme) -> jax.Array:
    """[..., K] -> [..., groups, channels per group]."""
    size = scheme.channels_per_group(weight_NK.shape[-1])
    return weight_NK.reshape(*weight_NK.shape[:-1], -1, size)


def assemble(
    codes_NK: jax.Array, scale_NG: jax.Array, zero_NG: jax.Array, scheme: Scheme
) -> QuantTensor:
    """The stored form of codes (any dtype that holds them), scales and zeros."""
    if scheme.bits == 8:
        packed = codes_NK.astype(jnp.int8)
    else:
        pack = packing.pack_int3 if scheme.bits == 3 else packing.pack_int4
        packed = jnp.asarray(pack(codes_NK.astype(jnp.uint8)))
    return QuantTensor(
        packed=packed,
        scale=scale_NG.astype(_SCALE_DTYPE),
        zero=zero_NG.astype(jnp.int16) if scheme.grid == "asymmetric" else None,
        bits=scheme.bits,
        group_size=scheme.channels_per_group(codes_NK.shape[-1]),
        implicit_zero=scheme.implicit_zero,
    )


def scale_outputs(weight: QuantTensor, factor_N: jax.Array) -> QuantTensor:
    """The weight with output channel n multiplied by `factor_N[n]`: only scales change.

    Codes stay, so nothing is rounded but the scales. They become float32 where the product leaves
    the range in which their dtype has its full precision.
    """

    def scaled(array):
        product = array.astype(jnp.float32) * factor_N[:, None]
        limits = jnp.finfo(array.dtype)
        size = jnp.abs(product)
        fits = jnp.all((size == 0) | ((size >= limits.tiny) & (size <= limits.max)))
        return product.astype(array.dtype) if fits else product

    offset = None if weight.offset is None else scaled(weight.offset)
    return dataclasses.replace(weight, scale=scaled(weight.scale), offset=offset)
