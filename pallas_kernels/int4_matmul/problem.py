"""What is multiplied by what: the checked, hashable description of one int4_matmul call."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels import packing

GROUP_SIZES = (32, 64, 128)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
X_DTYPES = ("bfloat16", "float16", "float32")
SCALE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Problem:
    """One call, without its values.

    Attributes:
      rows: activation rows (M), leading axes of x flattened.
      in_features: K as stored, padding included.
      out_features: rows of the stored weight (N; gate and up together where gated).
      bits: 4 or 8.
      group_size: input channels a scale covers; in_features for one group per output channel.
      span: codes per packing span (4 bits).
      implicit_zero: the zero point where neither zeros nor offsets are given.
      has_zero, has_offset, has_bias: which arrays came.
      activation: gate activation, or None for a plain product.
      num_layers: length of the weight stack; 0 where the weight is a plain matrix.
      x_dtype, scale_dtype, out_dtype: names.
    """

    rows: int
    in_features: int
    out_features: int
    bits: int
    group_size: int
    span: int
    implicit_zero: int
    has_zero: bool
    has_offset: bool
    has_bias: bool
    activation: str | None
    num_layers: int
    x_dtype: str
    scale_dtype: str
    out_dtype: str

    @property
    def num_groups(self) -> int:
        return self.in_features // self.group_size

    @property
    def out_columns(self) -> int:
        """Columns of the result: out_features, halved by a gate."""
        return self.out_features // 2 if self.activation else self.out_features

    @property
    def packed_columns(self) -> int:
        return self.in_features * self.bits // 8


def describe(
    x, packed, scale, *, zero, offset, bias, layer, bits, group_size, span, implicit_zero,
    gate_activation, out_dtype,
) -> Problem:  # fmt: skip
    """The problem that `int4_matmul`'s arguments state; ValueError where they contradict."""
    if bits not in (4, 8):
        raise ValueError(f"bits={bits}: must be 4 or 8")
    stacked = layer is not None
    ndim = 3 if stacked else 2
    if packed.ndim != ndim:
        raise ValueError(
            f"packed has shape {packed.shape}: {'with' if stacked else 'without'} a layer it must "
            f"have {ndim} axes, {'[L, N, K]' if stacked else '[N, K]'} codes"
        )
    expected = jnp.dtype(jnp.uint8 if bits == 4 else jnp.int8)
    if packed.dtype != expected:
        raise ValueError(
            f"packed has dtype {packed.dtype}: {bits}-bit codes are stored as {expected.name}"
        )
    in_features = packed.shape[-1] * 8 // bits
    if bits == 4 and (span not in packing.SPANS or in_features % span):
        raise ValueError(
            f"span={span}: must be one of {packing.SPANS} and divide the {in_features} packed "
            "input channels; pad K when packing"
        )
    group_size = in_features if group_size == -1 else group_size
    if group_size not in GROUP_SIZES and group_size != in_features:
        raise ValueError(
            f"group_size={group_size}: must be one of {GROUP_SIZES}, or -1 for one group per output"
        )
    if in_features % group_size:
        raise ValueError(
            f"group_size={group_size}: does not divide the {in_features} input channels; "
            "requantise with a group size that does, or with one group (-1)"
        )
    padded = -(-x.shape[-1] // span) * span if bits == 4 else x.shape[-1]
    if padded != in_features:
        raise ValueError(
            f"x.shape[-1]={x.shape[-1]}: the weight has {in_features} input channels; they must "
            f"be equal, or equal once x is padded to a multiple of span={span}"
        )
    _check_dtype("x", x.dtype, X_DTYPES)
    _check_dtype("scale", scale.dtype, SCALE_DTYPES)
    if zero is not None and offset is not None:
        raise ValueError("zero and offset are both given: a weight has one of them")
    if zero is not None and not jnp.issubdtype(zero.dtype, jnp.signedinteger):
        raise ValueError(f"zero has dtype {zero.dtype}: zero points are signed integers (int16)")
    per_group = (*packed.shape[:-1], in_features // group_size)
    for name, array in (("scale", scale), ("zero", zero), ("offset", offset)):
        if array is not None and array.shape != per_group:
            raise ValueError(f"{name} has shape {array.shape}: one per group needs {per_group}")
    if bias is not None and bias.shape != packed.shape[:-1]:
        raise ValueError(f"bias has shape {bias.shape}: must be {packed.shape[:-1]}")
    if gate_activation is not None:
        if gate_activation not in ACTIVATIONS:
            raise ValueError(f"gate_activation={gate_activation!r}: must be one of {ACTIVATIONS}")
        if packed.shape[-2] % 2:
            raise ValueError(
                f"packed has {packed.shape[-2]} rows: a gated weight has as many gate rows as up "
                "rows"
            )
    rows = 1
    for size in x.shape[:-1]:
        rows *= size
    return Problem(
        rows=rows,
        in_features=in_features,
        out_features=packed.shape[-2],
        bits=bits,
        group_size=group_size,
        span=span,
        implicit_zero=implicit_zero,
        has_zero=zero is not None,
        has_offset=offset is not None,
        has_bias=bias is not None,
        activation=gate_activation,
        num_layers=packed.shape[0] if stacked else 0,
        x_dtype=jnp.dtype(x.dtype).name,
        scale_dtype=jnp.dtype(scale.dtype).name,
        out_dtype=jnp.dtype(out_dtype or x.dtype).name,
    )


def _check_dtype(name: str, dtype, allowed: tuple[str, ...]) -> None:
    if jnp.dtype(dtype).name not in allowed:
        raise ValueError(f"{name} has dtype {jnp.dtype(dtype).name}: must be one of {allowed}")
