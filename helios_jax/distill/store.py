"""How do sampled sequences and what the teacher found of them lie on a disk?

    store.json                  what all of it belongs to (`identity`)
    shard_00000-SUM.npz         sequences, as many as a shard has; SUM: of the file's sha256

A shard appears complete or not at all, and its name says what its bytes sum to, so that a killed
run, a full disk and a damaged disk leave nothing that could be taken for data: the shards that are
missing are written by the next run. Sums are checked when a store is opened.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from helios_jax.calibrate.folders import claim, locked
from helios_jax.config import require

_IDENTITY = "store.json"
_NAME = re.compile(r"shard_(\d{5})-([0-9a-f]{16})\.npz")


class Labels(NamedTuple):
    """What the teacher's own distribution (raw logits, temperature 1) is at N positions.

    ids_NK: int32, its K most probable tokens, descending; None where all V are kept, in order.
    logprobs_NK: float32, theirs.
    tail_N: float32, log of the mass of all others; -inf where there are none.
    hidden_ND: bfloat16, the teacher's final hidden state that it comes of; None where not kept.
    """

    ids_NK: np.ndarray | None
    logprobs_NK: np.ndarray
    tail_N: np.ndarray
    hidden_ND: np.ndarray | None = None

    def __getitem__(self, chosen: slice | np.ndarray) -> "Labels":  # pyright: ignore[reportIncompatibleMethodOverride]
        parts: Any = [None if part is None else part[chosen] for part in self]
        return Labels(*parts)


@dataclass(frozen=True)
class Sequence:
    """One prompt and what was sampled after it.

    Attributes:
      tokens: int32 [T], both.
      num_prompt: tokens of the prompt, at least 1.
      temperature: it was sampled at.
      labels: N = T - num_prompt; the i-th is of the distribution that token num_prompt + i was
        drawn from.
    """

    tokens: np.ndarray
    num_prompt: int
    temperature: float
    labels: Labels

    def __post_init__(self):
        num_sampled = len(self.tokens) - self.num_prompt
        assert self.num_prompt >= 1 and len(self.labels.tail_N) == num_sampled


class Store:
    """An open folder, see the module; `open_store` makes one.

    Attributes:
      identity: JSON-ready, what the sequences are samples of.
      damaged: shards that were there and do not match the sum in their names.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder = folder
        self.identity = identity
        self.damaged: list[Path] = []
        self._shards: dict[int, Path] = {}
        for path in sorted(folder.glob("shard_*.npz")):
            named = _NAME.fullmatch(path.name)
            if named is None or _sum(path.read_bytes()) != named[2]:
                self.damaged.append(path)
            else:
                self._shards[int(named[1])] = path

    def __contains__(self, index: int) -> bool:
        return index in self._shards

    @property
    def indices(self) -> list[int]:
        return sorted(self._shards)

    def write(self, index: int, sequences: list[Sequence]) -> None:
        """Keeps shard `index`.

        Raises:
          OSError: the disk is full or cannot be written; nothing is left of the shard then.
        """
        require(bool(sequences), f"shard {index}: holds no sequences")
        buffer = io.BytesIO()
        np.savez(buffer, **_to_arrays(sequences))  # pyright: ignore[reportArgumentType]
        content = buffer.getvalue()
        target = self.folder / f"shard_{index:05}-{_sum(content)}.npz"
        partial = self.folder / f"{target.name}.partial"
        try:
            with partial.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if error.errno == errno.ENOSPC:
                raise OSError(
                    errno.ENOSPC,
                    f"the disk is full: shard {index} of {len(content)} bytes was not kept, the "
                    "earlier ones are; free some space and give the same command again",
                    str(self.folder),
                ) from error
            raise
        self._shards[index] = target

    def read(self, index: int) -> list[Sequence]:
        """The sequences of a shard.

        Raises:
          ValueError: it is missing.
        """
        require(index in self._shards, f"{self.folder}: has no shard {index}; sample it again")
        with np.load(self._shards[index], allow_pickle=False) as arrays:
            return _from_arrays(arrays)

    def sequences(self) -> list[Sequence]:
        """Those of all shards, in order."""
        return [sequence for index in self.indices for sequence in self.read(index)]


@contextlib.contextmanager
def open_store(folder: Path, identity: dict[str, Any]) -> Iterator[Store]:
    """The store at `folder`, locked; made where there is none. Damaged shards are removed.

    Raises:
      ValueError: another process works there, or it holds samples of something else.
    """
    with locked(folder, "sampling"):
        path = folder / _IDENTITY
        if not claim(path, identity):
            raise ValueError(
                f"{folder}: holds samples that were made otherwise ({_difference(path, identity)});"
                " choose another folder, or remove it"
            )
        store = Store(folder, identity)
        for useless in (*folder.glob("shard_*.partial"), *store.damaged):
            useless.unlink()
        yield store


def read_store(folder: Path) -> Store:
    """The store at `folder`, for reading only.

    Raises:
      ValueError: there is none.
    """
    path = folder / _IDENTITY
    require(path.is_file(), f"{folder}: holds no samples; `helios distill` makes some")
    return Store(folder, json.loads(path.read_text()))


def _difference(path: Path, identity: Mapping[str, Any]) -> str:
    found = json.loads(path.read_text())
    names = [name for name in {**found, **identity} if found.get(name) != identity.get(name)]
    name = names[0] if names else "their description"
    return f"{name}={found.get(name)!r}, not {identity.get(name)!r}"


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _to_arrays(sequences: list[Sequence]) -> dict[str, np.ndarray]:
    labels = [sequence.labels for sequence in sequences]
    arrays = {
        "tokens": np.concatenate([sequence.tokens for sequence in sequences]).astype(np.int32),
        "lengths": np.array([len(sequence.tokens) for sequence in sequences], np.int32),
        "num_prompt": np.array([sequence.num_prompt for sequence in sequences], np.int32),
        "temperatures": np.array([sequence.temperature for sequence in sequences], np.float64),
        "logprobs": np.concatenate([label.logprobs_NK for label in labels]).astype(np.float32),
        "tail": np.concatenate([label.tail_N for label in labels]).astype(np.float32),
    }
    ids = [label.ids_NK for label in labels if label.ids_NK is not None]
    if ids:
        arrays["ids"] = np.concatenate(ids).astype(np.int32)
    hidden = [label.hidden_ND for label in labels if label.hidden_ND is not None]
    if hidden:
        # numpy's format has no bfloat16.
        arrays["hidden_bits"] = np.concatenate(hidden).astype(ml_dtypes.bfloat16).view(np.uint16)
    return arrays


def _from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Sequence]:
    lengths, num_prompt = arrays["lengths"], arrays["num_prompt"]
    tokens, temperatures = arrays["tokens"], arrays["temperatures"]
    ids = arrays["ids"] if "ids" in arrays else None
    hidden = None
    if "hidden_bits" in arrays:
        hidden = arrays["hidden_bits"].view(ml_dtypes.bfloat16)
    labels = Labels(ids, arrays["logprobs"], arrays["tail"], hidden)
    ends = np.cumsum(lengths)
    label_ends = np.cumsum(lengths - num_prompt)
    return [
        Sequence(
            tokens[ends[i] - lengths[i] : ends[i]],
            int(num_prompt[i]),
            float(temperatures[i]),
            labels[label_ends[i] - (lengths[i] - num_prompt[i]) : label_ends[i]],
        )
        for i in range(len(lengths))
    ]
