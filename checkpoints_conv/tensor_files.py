"""Which tensors do the weight files of a Hugging Face folder hold, and how is one read?"""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from checkpoints_conv.json_files import read_json

# By safetensors' names, which stand for torch's types too.
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
_COMPARE_BYTES = 1 << 20


class TensorInfo(NamedTuple):
    """What a file says of one tensor.

    dtype: one of `DTYPES`.
    file: which of the folder's files holds it.
    """

    shape: tuple[int, ...]
    dtype: str
    file: FilePath

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


class TensorFiles(Protocol):
    """The weight files of one folder; nothing but headers is in memory."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """A copy of one tensor."""
        ...

    def same_bytes(self, first: str, second: str) -> bool:
        """Whether two tensors of equal shape and dtype hold the same bits."""
        ...


def open_tensor_files(folder: FilePath) -> TensorFiles:
    """Opens what holds the weights in `folder`: safetensors, or else torch's files.

    Raises:
      ValueError: naming the file that is missing, damaged, or contradicts the index.
    """
    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        return SafetensorsFiles(shards(folder, SINGLE, INDEX, _names))
    if (folder / TORCH_SINGLE).exists() or (folder / TORCH_INDEX).exists():
        from checkpoints_conv.torch_files import TorchFiles

        return TorchFiles(folder)
    pickled = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")
    )
    if pickled:
        raise ValueError(
            f"{folder}: the weights are in {pickled[0]!r}, a pickle, which can run code when it is "
            "read; write them as safetensors with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX} is there; download the model's weights")


class SafetensorsFiles:
    """Tensors in safetensors files. The library checks a file, numpy reads its tensors.

    The library's own numpy reader knows no 8-bit floats.
    """

    def __init__(self, shards: dict[str, FilePath]):
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        for path in sorted(set(shards.values())):
            with opened_safetensors(path):  # raises where the header is damaged
                pass
            with path.open("rb") as file:
                header_bytes = struct.unpack("<Q", file.read(8))[0]
                header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if entry["dtype"] not in DTYPES:
                    raise ValueError(
                        f"{path}: tensor {name!r} has dtype {entry['dtype']}: must be one of "
                        f"{tuple(DTYPES)}"
                    )
                self.tensors[name] = TensorInfo(tuple(entry["shape"]), entry["dtype"], path)
                self._offsets[name] = 8 + header_bytes + entry["data_offsets"][0]

    def read(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        with info.file.open("rb") as file:
            file.seek(self._offsets[name])
            raw = np.fromfile(file, np.uint8, info.nbytes)
        if raw.size != info.nbytes:
            raise ValueError(f"{info.file}: the file was cut short while {name!r} was read")
        return raw.view(DTYPES[info.dtype]).reshape(info.shape)

    def same_bytes(self, first: str, second: str) -> bool:
        infos = self.tensors[first], self.tensors[second]
        with infos[0].file.open("rb") as file, infos[1].file.open("rb") as other:
            for start in range(0, infos[0].nbytes, _COMPARE_BYTES):
                count = min(_COMPARE_BYTES, infos[0].nbytes - start)
                file.seek(self._offsets[first] + start)
                other.seek(self._offsets[second] + start)
                if file.read(count) != other.read(count):
                    return False
        return True


def shards(folder: FilePath, single_name: str, index_name: str, names_of) -> dict[str, FilePath]:
    """The file that holds each tensor, as the files themselves and the index agree.

    Args:
      names_of: the tensor names in a file.
    """
    single, index = folder / single_name, folder / index_name
    if single.exists():
        return dict.fromkeys(names_of(single), single)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map={weight_map!r}: must map tensor names to files")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or FilePath(file_name).name != file_name:
            raise ValueError(
                f"{index}: tensor {name!r} is mapped to {file_name!r}: must be a file name within "
                "the folder"
            )
    found: dict[str, FilePath] = {}
    for file_name in sorted(set(weight_map.values())):
        shard = folder / file_name
        if not shard.exists():
            raise ValueError(
                f"{index}: names the file {file_name!r}, which is missing; download it"
            )
        indexed = {name for name, mapped in weight_map.items() if mapped == file_name}
        for name in indexed.symmetric_difference(names_of(shard)):
            states = "is missing from" if name in indexed else "is not mapped by the index to"
            raise ValueError(f"{index}: tensor {name!r} {states} {file_name!r}")
        found |= dict.fromkeys(indexed, shard)
    return found


def _names(path: FilePath) -> list[str]:
    with opened_safetensors(path) as file:
        return list(file.keys())


@contextmanager
def opened_safetensors(path: FilePath) -> Iterator[Any]:
    """The opened safetensors file; its errors become ValueErrors that name it."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or damaged safetensors file: {error}") from None
