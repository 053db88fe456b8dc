"""What a GGUF file contains: its metadata and where its tensors lie, without reading them.

The enumerations, block sizes and dequantisers are the gguf package's. Its GGUFReader is not used:
it makes a numpy view of every string (2.0 s for SmolLM2's 49,152 tokens, three times that for
Qwen's; this file takes 0.03 s), and on a damaged length it loops without end. Here every length is
held against the size of the file before anything is allocated.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3).
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGUF_VERSION,
    GGMLQuantizationType,
    GGUFValueType,
)

_VERSIONS = (2, GGUF_VERSION)
_MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
      shape: numpy order, rows first: a linear is (out, in). GGUF itself lists the fastest first.
      offset, nbytes: its bytes within the file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file. `metadata` values are int, float, bool, str, or lists of these."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read(self, name: str) -> np.ndarray:
        """The bytes of tensor `name`: uint8 [rows..., bytes per row]."""
        tensor = self.tensors[name]
        raw = np.fromfile(self.path, np.uint8, count=tensor.nbytes, offset=tensor.offset)
        if raw.size != tensor.nbytes:
            raise ValueError(f"{self.path}: the file was cut short while tensor {name!r} was read")
        return raw.reshape(*tensor.shape[:-1], -1)


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file.

    Raises:
      ValueError: naming the file and what is wrong, where it is not a complete, little-endian GGUF
        file of version 2 or 3.
    """
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"{path}: the file is empty, not a GGUF model")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data, size)
        if cursor.scalar("<u4", "the magic number") != GGUF_MAGIC:
            raise ValueError(f"{path}: does not start with 'GGUF': not a GGUF file")
        version = cursor.scalar("<u4", "the version")
        if version not in _VERSIONS:
            big_endian = "; it is a big-endian file" if version & 0xFFFF == 0 else ""
            raise ValueError(f"{path}: GGUF version {version}: must be in {_VERSIONS}{big_endian}")
        num_tensors = cursor.count("the number of tensors", 24)
        num_values = cursor.count("the number of metadata values", 13)
        metadata: dict[str, Any] = {}
        for i in range(num_values):
            key = cursor.string(f"the name of metadata value {i}")
            if key in metadata:
                raise ValueError(f"{path}: metadata {key!r} is there twice")
            metadata[key] = cursor.value(f"metadata {key!r}")
        infos = [cursor.tensor_info(i) for i in range(num_tensors)]
        end_of_header = cursor.position
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path}: general.alignment={alignment!r}: must be a power of two")
    start = -(-end_of_header // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, type_number, offset in infos:
        if name in tensors:
            raise ValueError(f"{path}: tensor {name!r} is there twice")
        if offset % alignment:
            raise ValueError(
                f"{path}: tensor {name!r} lies at offset {offset}: must be a multiple of "
                f"general.alignment={alignment}; the header is damaged"
            )
        tensors[name] = _place(path, name, shape, type_number, start + offset, size)
    return GgufFile(path, metadata, tensors)


def _place(
    path: Path, name: str, shape: tuple[int, ...], type_number: int, offset: int, size: int
) -> GgufTensor:
    try:
        tensor_type = GGMLQuantizationType(type_number)
    except ValueError:
        raise ValueError(
            f"{path}: tensor {name!r} has type number {type_number}, which the gguf package does "
            "not know"
        ) from None
    block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
    if shape[-1] % block_size:
        raise ValueError(
            f"{path}: tensor {name!r} has shape {shape}: rows of type {tensor_type.name} must be "
            f"a multiple of {block_size} long"
        )
    nbytes = math.prod(shape) // block_size * block_bytes
    if offset + nbytes > size:
        raise ValueError(
            f"{path}: truncated: tensor {name!r} ends at byte {offset + nbytes}, but the file has "
            f"{size}; download it again"
        )
    return GgufTensor(name, tensor_type, shape, offset, nbytes)


class _Cursor:
    """Reads forward through the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self.path = path
        self.data = data
        self.size = size
        self.position = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        end = self.position + num_bytes
        if end > self.size:
            raise ValueError(
                f"{self.path}: truncated or damaged: {what} ends at byte {end}, but the file has "
                f"{self.size}"
            )
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def scalar(self, dtype: str, what: str) -> Any:
        taken = self.take(np.dtype(dtype).itemsize, what)
        return np.frombuffer(taken, dtype)[0].item()

    def count(self, what: str, min_bytes_each: int) -> int:
        """A count of things that take at least `min_bytes_each` bytes each."""
        number = self.scalar("<u8", what)
        if number * min_bytes_each > self.size - self.position:
            raise ValueError(
                f"{self.path}: truncated or damaged: {what} is {number}, more than the rest of the "
                f"file's {self.size} bytes can hold"
            )
        return number

    def string(self, what: str) -> str:
        return self._decode(self.take(self.count(f"the length of {what}", 1), what), what)

    def value(self, what: str) -> Any:
        value_type = self.value_type(what)
        if value_type == GGUFValueType.STRING:
            return self.string(what)
        if value_type != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[value_type], what)
        item_type = self.value_type(what)
        if item_type == GGUFValueType.ARRAY:
            raise ValueError(f"{self.path}: {what} is an array of arrays: not part of any model")
        if item_type == GGUFValueType.STRING:
            return self.strings(what)
        dtype = np.dtype(_SCALARS[item_type])
        length = self.count(f"the length of {what}", dtype.itemsize)
        return np.frombuffer(self.take(length * dtype.itemsize, what), dtype).tolist()

    def strings(self, what: str) -> list[str]:
        """An array of strings; the one long loop of the header, hence without method calls."""
        length = self.count(f"the length of {what}", 8)
        data, size, position = self.data, self.size, self.position
        unpack = struct.Struct("<Q").unpack_from
        items = []
        for i in range(length):
            start = position + 8
            position = start + unpack(data, position)[0] if start <= size else start
            if position > size:
                raise ValueError(
                    f"{self.path}: truncated or damaged: item {i} of {what} ends at byte "
                    f"{position}, but the file has {size}"
                )
            items.append(data[start:position])
        self.position = position
        return [self._decode(item, what) for item in items]

    def value_type(self, what: str) -> GGUFValueType:
        number = self.scalar("<u4", f"the type of {what}")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise ValueError(
                f"{self.path}: {what} has the unknown type number {number}; the header is damaged"
            ) from None

    def tensor_info(self, i: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (numpy order), type number and offset of tensor `i`."""
        name = self.string(f"the name of tensor {i}")
        what = f"the description of tensor {name!r}"
        num_dimensions = self.scalar("<u4", what)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(
                f"{self.path}: tensor {name!r} has {num_dimensions} dimensions: must be 1 to "
                f"{_MAX_DIMENSIONS}; the header is damaged"
            )
        shape = tuple(self.scalar("<u8", what) for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            raise ValueError(f"{self.path}: tensor {name!r} has shape {shape}: an axis is empty")
        return name, shape, self.scalar("<u4", what), self.scalar("<u8", what)

    def _decode(self, text: bytes, what: str) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: {what} is not UTF-8: {error}") from None
