"""QuantTensor: a weight matrix stored as small integers with a scale per group.

    w[n, k] = scale[n, g] * (q[n, k] - zero[n, g])    integer zero points, g = k // group_size
    w[n, k] = scale[n, g] * q[n, k] + offset[n, g]    float offsets (GGUF Q4_1)

n runs over output channels, k over input channels. The codes stay as the source stored them, so a
checkpoint can be written back bit for bit. `pallas_kernels.packing` says how codes lie in bytes.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import packing

BITS = (4, 8)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantTensor:
    """A quantised linear of `in_features` (K) inputs and `out_features` (N) outputs.

    Leading axes (a stack of layers) are allowed on every array alike.

    Attributes:
      packed: the codes. 4 bits: uint8 [..., N, K // 2], see `pallas_kernels.packing`; 8 bits: int8
        [..., N, K], signed.
      scale: [..., N, K // group_size], in the dtype of the source (float16 for GGUF and AWQ).
      zero: int16 [..., N, K // group_size], the code that stands for 0, or None. Signed and wide:
        GPTQ's stored `zero - 1` may be -1.
      offset: float [..., N, K // group_size], the value that code 0 stands for, or None.
      bits: 4 or 8.
      group_size: input channels that share a scale; K itself for one group per output channel.
      span: codes per packing span, 32 or 64 (4 bits only).
      implicit_zero: the zero point of every group where `zero` and `offset` are None: 8 for
        symmetric 4-bit codes, 0 for signed 8-bit ones.

    At most one of `zero` and `offset` is present.
    """

    packed: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None
    offset: jax.Array | None = None
    bits: int = dataclasses.field(default=4, metadata=dict(static=True))
    group_size: int = dataclasses.field(default=32, metadata=dict(static=True))
    span: int = dataclasses.field(default=32, metadata=dict(static=True))
    implicit_zero: int = dataclasses.field(default=8, metadata=dict(static=True))

    @property
    def out_features(self) -> int:
        return self.packed.shape[-2]

    @property
    def in_features(self) -> int:
        return self.packed.shape[-1] * (8 // self.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: what a decode step reads of this weight."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def codes(self) -> jax.Array:
        """The integer codes [..., N, K]: uint8 0..15 for 4 bits, int8 for 8 bits."""
        return packing.unpack_int4(self.packed, self.span) if self.bits == 4 else self.packed

    def dequantize(self, dtype=jnp.float32) -> jax.Array:
        """The weights [..., N, K] in `dtype`, computed in float32 and rounded once."""
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
        expected_dtype = jnp.uint8 if self.bits == 4 else jnp.int8
        if self.packed.dtype != expected_dtype:
            raise ValueError(
                f"{name}: packed has dtype {self.packed.dtype}: {self.bits}-bit codes are stored "
                f"as {jnp.dtype(expected_dtype).name}"
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
        expected = (*self.packed.shape[:-1], self.in_features // self.group_size)
        for field in ("scale", "zero", "offset"):
            array = getattr(self, field)
            if array is not None and array.shape != expected:
                raise ValueError(
                    f"{name}: {field} has shape {array.shape}: one per group needs {expected}"
                )
