"""What does a quantised Hugging Face format say of its linears, and what do all formats share?"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from checkpoints_conv.tensor_files import TensorInfo
from helios_jax.quant import QuantTensor
from pallas_kernels import packing

SCALE_DTYPES = ("F16", "BF16", "F32")
# AutoAWQ's order: nibble i of a word holds column AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The code that stands for 0 in a symmetric weight whose codes are unsigned.
MIDDLE = {3: 4, 4: 8, 8: 128}
_SPAN = 32


@dataclass(frozen=True)
class Stored:
    """What one tensor of a quantised linear must be.

    Attributes:
      shapes: the allowed ones; the first is what the format's newest writers store.
      dtypes: the allowed names, of `tensor_files.DTYPES`.
      optional: the tensor may be absent.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True)
class StoredLinear:
    """One quantised linear as a format stores it.

    Attributes:
      tensors: by what follows the module's name and a dot ("qweight").
      build: the leaf from those tensors' arrays; a first argument names the module in errors.
      nbytes: of the leaf.
    """

    tensors: dict[str, Stored]
    build: Callable[[str, dict[str, np.ndarray]], QuantTensor]
    nbytes: int


@dataclass(frozen=True)
class QuantFormat:
    """A quantised format, opened for one checkpoint.

    Attributes:
      name: "awq", "gptq", ...
      linear: how the linear `module` of (N, K) outputs and inputs is stored, given what its tensors
        are by suffix; None where it is dense. ValueError where that contradicts the configuration.
      marker: what at least one linear must have; "" where all may be dense.
      ignored: suffixes of tensors that are not read: scales of activations, which stay in 16 bits.
      zero_biases: biases of zeros may be there for linears that have none (old AutoGPTQ).
    """

    name: str
    linear: Callable[[str, tuple[int, int], Mapping[str, TensorInfo]], StoredLinear | None]
    marker: str = ""
    ignored: tuple[str, ...] = ()
    zero_biases: bool = False


class QuantFields:
    """Typed access to quantization_config; null counts as absent."""

    def __init__(self, path: FilePath, values: Mapping[str, Any], prefix="quantization_config."):
        self.path = path
        self.prefix = prefix
        self.values = {key: value for key, value in values.items() if value is not None}

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The value of the first of `keys` (old and new names of one setting) that is there."""
        key = next((key for key in keys if key in self.values), keys[0])
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.path}: {self.prefix}{key} is missing")
        if type(value) is not int:
            raise self.refused(key, "an integer")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refused(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if type(value) is not str:
            raise self.refused(key, "text")
        return value

    def nested(self, key: str) -> "QuantFields":
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.refused(key, "a JSON object")
        return QuantFields(self.path, value, f"{self.prefix}{key}.")

    def refused(self, key: str, rule: str) -> ValueError:
        return ValueError(
            f"{self.path}: {self.prefix}{key}={str(self.get(key))[:200]!r}: must be {rule}"
        )


def check_group_size(where: str, group_size: int, num_in: int) -> int:
    """The group size as channels: `num_in` for -1; a ValueError naming `where` for no divisor."""
    size = num_in if group_size == -1 else group_size
    if size < 1 or num_in % size:
        raise ValueError(
            f"{where}: group_size={group_size} does not divide its {num_in} input channels; "
            "requantise with a group size that does, or with one group (-1)"
        )
    return size


def integer_weight(
    where: str,
    codes_NK: np.ndarray,
    scale_NG: np.ndarray,
    zero_NG: np.ndarray | None,
    bits: int,
    perm: np.ndarray | None = None,
) -> QuantTensor:
    """The QuantTensor of unsigned codes 0..2**bits - 1.

    Args:
      where: names the linear in errors.
      zero_NG: the codes that stand for 0; None for the middle of the range.
      perm: the input channel of each column; see `QuantTensor`.
    """
    num_in = codes_NK.shape[1]
    if bits != 8 and num_in % _SPAN:
        raise ValueError(
            f"{where}: has {num_in} input channels: {bits}-bit weights need a multiple of {_SPAN}"
        )
    shift = MIDDLE[8] if bits == 8 else 0  # 8-bit codes are signed here
    pack = {3: packing.pack_int3, 4: packing.pack_int4, 8: signed_bytes}[bits]
    return host_weight(
        packed=pack(np.ascontiguousarray(codes_NK)),
        scale=np.ascontiguousarray(scale_NG),
        zero=None if zero_NG is None else np.ascontiguousarray(zero_NG.astype(np.int16) - shift),
        perm=None if perm is None else perm.astype(np.int32),
        bits=bits,
        group_size=num_in // scale_NG.shape[1],
        span=_SPAN,
        implicit_zero=MIDDLE[bits] - shift,
    )


def host_weight(**fields: Any) -> QuantTensor:
    """A QuantTensor of numpy arrays; its fields are annotated for the device's."""
    return QuantTensor(**fields)


def unsigned_codes(weight: QuantTensor) -> np.ndarray:
    """The codes uint8 [N, K], columns as stored: what `integer_weight` was given."""
    codes = np.asarray(weight.codes())
    return (codes.view(np.uint8) ^ np.uint8(MIDDLE[8])) if weight.bits == 8 else codes


def unsigned_zeros(weight: QuantTensor) -> np.ndarray:
    """The zero points as unsigned codes, int16 [N, G]; those of a symmetric weight written out."""
    shift = MIDDLE[8] if weight.bits == 8 else 0
    if weight.zero is None:
        return np.full(weight.scale.shape, weight.implicit_zero + shift, np.int16)
    return np.asarray(weight.zero) + np.int16(shift)


def signed_bytes(codes: np.ndarray) -> np.ndarray:
    """Codes 0..255 as int8 codes - 128."""
    return (codes ^ np.uint8(MIDDLE[8])).view(np.int8)


def integer_nbytes(
    shape: tuple[int, int],
    bits: int,
    groups: int,
    scale: TensorInfo | None,
    zeros: bool,
    perm=False,
) -> int:
    """Bytes of the QuantTensor that `integer_weight` makes."""
    num_out, num_in = shape
    scale_bytes = 4 if scale is not None and scale.dtype == "F32" else 2
    per_group = scale_bytes + (2 if zeros else 0)
    return num_out * num_in * bits // 8 + num_out * groups * per_group + (4 * num_in if perm else 0)


def unpack_words(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes uint8 [..., count] from int32 words [..., W]: a bit stream, lowest bits first.

    This is GPTQ's and compressed-tensors' order for every width, 3 bits included.
    """
    stream = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        codes = stream
    elif bits == 4:
        codes = np.stack([stream & 15, stream >> 4], axis=-1).reshape(*stream.shape[:-1], -1)
    else:
        usable = stream.shape[-1] * 8 // bits * bits
        flags = np.unpackbits(stream, axis=-1, bitorder="little")[..., :usable]
        flags = flags.reshape(*stream.shape[:-1], -1, bits)
        codes = np.packbits(flags, axis=-1, bitorder="little")[..., 0]
    return codes[..., :count]


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `unpack_words`: int32 [..., ceil(count * bits / 32)], unused bits 0.

    Takes any integers; what lies beyond `bits` bits is cut off, so that -1 becomes 2**bits - 1.
    """
    count = codes.shape[-1]
    words = math.ceil(count * bits / 32)
    unused = [(0, 0)] * (codes.ndim - 1) + [(0, words * 32 // bits - count)]
    codes = np.pad(codes.astype(np.uint8) & ((1 << bits) - 1), unused)
    if bits == 8:
        stream = codes
    elif bits == 4:
        stream = codes[..., 0::2] | (codes[..., 1::2] << 4)
    else:
        flags = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
        flags = flags.reshape(*codes.shape[:-1], -1)
        missing = words * 32 - flags.shape[-1]
        flags = np.pad(flags, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
        stream = np.packbits(flags, axis=-1, bitorder="little")
    return np.ascontiguousarray(stream).view("<i4")
