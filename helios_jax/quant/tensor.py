"""QuantTensor: a weight matrix stored as small integers with a scale per group.

    w[n, k] = scale[n, g] * (q[n, k] - zero[n, g])    integer zero points, g = k // group_size
    w[n, k] = scale[n, g] * q[n, k] + offset[n, g]    float offsets (GGUF Q4_1)

n runs over output channels, k over input channels. The codes stay as the source stored them, so a
checkpoint can be written back bit for bit. `pallas_kernels.packing` says how codes lie in bytes.

FP8 weights are the 8-bit form whose codes q are float8_e4m3fn numbers instead of integers.

GPTQ with act-order spreads a group's channels over the whole axis. Such a weight is stored with its
input channels sorted by group, and `perm` says where each came from; whoever multiplies gathers the
inputs alike (`in_stored_order`).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing

BITS = (3, 4, 8)
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
_CODE_DTYPES = {
    3: (jnp.dtype(jnp.uint8),),
    4: (jnp.dtype(jnp.uint8),),
    8: (jnp.dtype(jnp.int8), FLOAT8),
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantTensor:
    """A quantised linear of `in_features` (K) inputs and `out_features` (N) outputs.

    Leading axes (a stack of layers) are allowed on every array alike.

    Attributes:
      packed: the codes. 4 bits: uint8 [..., N, K // 2], 3 bits: uint8 [..., N, K * 3 / 8], see
        `pallas_kernels.packing`; 8 bits: int8 or float8_e4m3fn [..., N, K].
      scale: [..., N, K // group_size], in the dtype of the source (float16 for GGUF and AWQ).
      zero: int16 [..., N, K // group_size], the code that stands for 0, or None. Signed and wide:
        GPTQ's stored `zero - 1` may be -1.
      offset: float [..., N, K // group_size], the value that code 0 stands for, or None.
      perm: int32 [..., K], the input channel that each stored column belongs to, or None where they
        are in order. Column k is in group k // group_size.
      bits: 3, 4 or 8.
      group_size: input channels that share a scale; K itself for one group per output channel.
      span: codes per packing span, 32 or 64 (4 bits only; 32 otherwise).
      implicit_zero: the zero point of every group where `zero` and `offset` are None: 8 for
        symmetric 4-bit codes, 4 for 3-bit ones, 0 for signed and float 8-bit ones.

    At most one of `zero` and `offset` is present.
    """

    packed: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None
    offset: jax.Array | None = None
    perm: jax.Array | None = None
    bits: int = dataclasses.field(default=4, metadata=dict(static=True))
    group_size: int = dataclasses.field(default=32, metadata=dict(static=True))
    span: int = dataclasses.field(default=32, metadata=dict(static=True))
    implicit_zero: int = dataclasses.field(default=8, metadata=dict(static=True))

    @property
    def out_features(self) -> int:
        return self.packed.shape[-2]

    @property
    def in_features(self) -> int:
        return self.packed.shape[-1] * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: what a decode step reads of this weight."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def codes(self) -> jax.Array:
        """The codes [..., N, K], columns as stored: uint8 (3, 4 bits), int8 or float8 (8 bits)."""
        if self.bits == 3:
            return packing.unpack_int3(self.packed)
        return packing.unpack_int4(self.packed, self.span) if self.bits == 4 else self.packed

    def in_stored_order(self) -> "QuantTensor":
        """The weight without its `perm`: it multiplies inputs that were gathered by `perm`."""
        return dataclasses.replace(self, perm=None)

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """The weights [..., N, K] in `dtype`, computed in float32 and rounded once."""
        if self.perm is not None:
            stored = self.in_stored_order().dequantize(dtype)
            columns = jnp.argsort(self.perm, axis=-1)[..., None, :]
            return jnp.take_along_axis(stored, columns, axis=-1)
        codes = self.codes().astype(jnp.float32)
        grouped = codes.reshape(*codes.shape[:-1], -1, self.group_size)
        scale = self.scale.astype(jnp.float32)[..., None]
        if self.offset is not None:
            weights = scale * grouped + self.offset.astype(jnp.float32)[..., None]
        else:
            zero = self.implicit_zero if self.zero is None else self.zero[..., None]
            weights = scale * (grouped - jnp.asarray(zero, jnp.float32))
        return weights.reshape(codes.shape).astype(dtype)

    def validate(self, name: str) -> None:
        """Raises ValueError, naming the tensor `name`, where fields contradict each other.

        Not run on construction: under `vmap` and `eval_shape` the fields are placeholders.
        """
        if self.bits not in BITS:
            raise ValueError(f"{name}: bits={self.bits}: must be one of {BITS}")
        if self.packed.dtype not in _CODE_DTYPES[self.bits]:
            names = " or ".join(dtype.name for dtype in _CODE_DTYPES[self.bits])
            raise ValueError(
                f"{name}: packed has dtype {self.packed.dtype}: {self.bits}-bit codes are stored "
                f"as {names}"
            )
        if self.bits == 3 and self.packed.shape[-1] % 12:
            raise ValueError(
                f"{name}: packed has {self.packed.shape[-1]} bytes a row: 3-bit codes come in spans "
                "of 12 bytes"
            )
        if self.bits == 4 and (self.span not in packing.SPANS or self.in_features % self.span):
            raise ValueError(
                f"{name}: span={self.span}: must be one of {packing.SPANS} and divide the "
                f"{self.in_features} input channels"
            )
        if self.group_size < 1 or self.in_features % self.group_size:
            raise ValueError(
                f"{name}: group_size={self.group_size} does not divide the {self.in_features} "
                "input channels; requantise with a group size that does, or with one group (-1)"
            )
        if self.zero is not None and self.offset is not None:
            raise ValueError(f"{name}: has zero points and offsets; keep one of them")
        if self.perm is not None:
            columns = (*self.packed.shape[:-2], self.in_features)
            if self.perm.shape != columns or self.perm.dtype != jnp.int32:
                raise ValueError(
                    f"{name}: perm has shape {self.perm.shape} and dtype {self.perm.dtype}: must "
                    f"be {columns} and int32, one input channel per column"
                )
        expected = (*self.packed.shape[:-1], self.in_features // self.group_size)
        for field in ("scale", "zero", "offset"):
            array = getattr(self, field)
            if array is not None and array.shape != expected:
                raise ValueError(
                    f"{name}: {field} has shape {array.shape}: one per group needs {expected}"
                )


def join_outputs(parts: Sequence[QuantTensor]) -> QuantTensor | None:
    """One weight with the output channels of all `parts`; None where they differ in form.

    Codes, scales, zeros and offsets are joined, not changed. Parts without zero points get theirs
    written out beside parts that have them. Different `perm`s are a difference in form: one gather
    of the inputs could not serve them all. Needs concrete arrays where there are `perm`s.
    """
    first = parts[0]
    if any(_form(part) != _form(first) for part in parts):
        return None
    if any(not np.array_equal(part.perm, first.perm) for part in parts if first.perm is not None):
        return None
    if any(part.zero is not None for part in parts):
        parts = [_with_zero(part) for part in parts]
    fields = {
        name: jnp.concatenate([getattr(part, name) for part in parts], axis=-2)
        for name in ("packed", "scale", "zero", "offset")
        if getattr(parts[0], name) is not None
    }
    return dataclasses.replace(first, **fields)


def _form(weight: QuantTensor) -> tuple:
    """What must be equal for two weights to be joined; perm's values aside."""
    statics = (weight.bits, weight.group_size, weight.span, weight.implicit_zero)
    dtypes = (weight.packed.dtype, weight.scale.dtype)
    return *statics, *dtypes, weight.offset is None, weight.perm is None


def _with_zero(weight: QuantTensor) -> QuantTensor:
    if weight.zero is not None:
        return weight
    zero = jnp.full(weight.scale.shape, weight.implicit_zero, jnp.int16)
    return dataclasses.replace(weight, zero=zero)
