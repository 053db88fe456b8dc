"""How are safetensors files written while their tensors still arrive, one in memory at a time?

A safetensors file begins with a header that lists all tensors. Room for it is left at the beginning
and filled at the end: the format allows spaces behind the header's JSON.
"""

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import numpy as np

from checkpoints_conv.json_files import write_json
from checkpoints_conv.tensor_files import DTYPES, INDEX, SINGLE

MAX_SHARD_BYTES = 5_000_000_000  # as Hugging Face
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ENTRY_BYTES = 160  # of a header entry besides its name


class SafetensorsWriter:
    """Writes tensors into a folder's shards.

    Attributes:
      described: what was written, by name: dtype, shape and sha256 of the bytes.
    """

    def __init__(self, folder: FilePath, max_names: Iterable[str]):
        """`max_names`: all names that may be written; they decide the room for the header."""
        room = sum(len(json.dumps(name)) + _ENTRY_BYTES for name in max_names) + _ENTRY_BYTES
        self.described: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._room = -(-room // 8) * 8
        self._shards: list[dict[str, Any]] = []  # the header of each
        self._file: BinaryIO | None = None
        self._written = 0

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, chunks: Iterable[np.ndarray]
    ) -> None:
        """Writes one tensor, given as runs of its rows."""
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self._file is None or (self._written and self._written + nbytes > MAX_SHARD_BYTES):
            self._end_shard()
            self._shards.append({})
            self._written = 0
            self._file = (self._folder / f"{len(self._shards)}.part").open("wb")
            self._file.seek(8 + self._room)
        start = self._written
        digest = hashlib.sha256()
        for chunk in chunks:
            assert chunk.dtype == dtype, f"{name}: {chunk.dtype} is not {dtype}"
            raw = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
            self._file.write(raw.data)
            digest.update(raw.data)
            self._written += raw.nbytes
        assert self._written - start == nbytes, f"{name}: {self._written - start} of {nbytes} bytes"
        entry = {"dtype": _NAMES[dtype], "shape": list(shape)}
        self._shards[-1][name] = entry | {"data_offsets": [start, self._written]}
        self.described[name] = entry | {"sha256": digest.hexdigest()}

    def add_array(self, name: str, array: np.ndarray) -> None:
        self.add(name, array.shape, array.dtype, [array])

    def finish(self) -> None:
        """Completes the headers, names the shards as Hugging Face does, and writes the index."""
        self._end_shard()
        count = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        names = names if count > 1 else [SINGLE]
        for i, name in enumerate(names):
            (self._folder / f"{i + 1}.part").rename(self._folder / name)
        if count > 1:
            total = sum(entry["data_offsets"][1] - entry["data_offsets"][0]
                        for shard in self._shards for entry in shard.values())  # fmt: skip
            weight_map = {
                tensor: name
                for name, shard in zip(names, self._shards, strict=True)
                for tensor in shard
            }
            write_json(
                self._folder / INDEX,
                {"metadata": {"total_size": total}, "weight_map": weight_map},
            )

    def _end_shard(self) -> None:
        if self._file is None:
            return
        header = {"__metadata__": {"format": "pt"}} | self._shards[-1]
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= self._room, "max_names has all names"
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + text.ljust(self._room))
        self._file.close()
        self._file = None
