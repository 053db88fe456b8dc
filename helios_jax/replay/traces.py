"""Who asked for how much, and when? Recorded request traces."""

import csv
import dataclasses
import json
import os
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from helios_jax.config import require

# Prompt tokens per hash id.
_MOONCAKE_TOKENS = 512


@dataclass(frozen=True)
class Trace:
    """N requests in order of arrival.

    Attributes:
      arrival_seconds: float64, from the first request on.
      num_prompt, num_output: int32 tokens, at least 1 each.
      prefix_ids_NI: int32, what names the content of each `prefix_tokens` tokens of a prompt and
        all before them: equal ids share a prefix. -1 padded; no columns where nothing is known.
      prefix_tokens: prompt tokens that an id stands for; the last one may stand for fewer.
    """

    arrival_seconds: np.ndarray
    num_prompt: np.ndarray
    num_output: np.ndarray
    prefix_ids_NI: np.ndarray | None = None
    prefix_tokens: int = 512

    def __len__(self) -> int:
        return len(self.arrival_seconds)

    def at_load(self, factor: float) -> "Trace":
        """The same requests arriving `factor` times as fast."""
        require(factor > 0, f"factor={factor}: must be above 0")
        return dataclasses.replace(self, arrival_seconds=self.arrival_seconds / factor)

    def head(self, num_requests: int) -> "Trace":
        """The first requests alone."""
        require(num_requests >= 1, f"num_requests={num_requests}: must be at least 1")
        kept = slice(num_requests)
        ids = None if self.prefix_ids_NI is None else self.prefix_ids_NI[kept]
        return dataclasses.replace(
            self, arrival_seconds=self.arrival_seconds[kept], num_prompt=self.num_prompt[kept],
            num_output=self.num_output[kept], prefix_ids_NI=ids,
        )  # fmt: skip


def read_azure_csv(path: str | os.PathLike) -> Trace:
    """Reads a trace of github.com/Azure/AzurePublicDataset, LLM inference 2023.

    The columns are TIMESTAMP (with up to 7 decimals of a second), ContextTokens, GeneratedTokens.

    Raises:
      ValueError: a column is missing, a value is malformed, or there is no request.
    """
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    rows = []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        require(
            set(columns) <= set(reader.fieldnames or ()),
            f"{path}: has columns {reader.fieldnames}, needs {', '.join(columns)}; is it an Azure "
            "LLM inference trace?",
        )
        for number, row in enumerate(reader, start=2):
            try:
                seconds = _seconds(row["TIMESTAMP"])
                rows.append((seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    require(len(rows) > 0, f"{path}: holds no requests")
    rows.sort(key=lambda row: row[0])
    seconds, num_prompt, num_output = (np.array(column) for column in zip(*rows, strict=True))
    return Trace(
        arrival_seconds=seconds - seconds[0],
        num_prompt=np.maximum(num_prompt, 1).astype(np.int32),
        num_output=np.maximum(num_output, 1).astype(np.int32),
    )


def read_mooncake_jsonl(path: str | os.PathLike, spread_seconds: float = 3.0) -> Trace:
    """Reads a trace of github.com/kvcache-ai/Mooncake (arXiv 2407.00079), with its shared prefixes.

    A line is an object of timestamp (milliseconds), input_length, output_length, and hash_ids, one
    per 512 tokens of the prompt.

    Args:
      spread_seconds: requests with equal timestamps arrive evenly over this long, or until the next
        timestamp if that is sooner, since some traces record only every third second; 0 lets them
        arrive together.

    Raises:
      ValueError: a field is missing or malformed, or there is no request.
    """
    require(spread_seconds >= 0, f"spread_seconds={spread_seconds}: must be 0 or more")
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                rows.append(_mooncake_row(json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {number}: {error}; is it a Mooncake trace?"
                ) from error
    require(len(rows) > 0, f"{path}: holds no requests")
    rows.sort(key=lambda row: row[0])
    seconds, num_prompt, num_output, ids = zip(*rows, strict=True)
    prefix_ids_NI = np.full((len(rows), max(map(len, ids))), -1, np.int32)
    for row_I, row_ids in zip(prefix_ids_NI, ids, strict=True):
        row_I[: len(row_ids)] = row_ids
    seconds = np.array(seconds) - seconds[0]
    return Trace(
        arrival_seconds=_spread(seconds, spread_seconds),
        num_prompt=np.maximum(num_prompt, 1).astype(np.int32),
        num_output=np.maximum(num_output, 1).astype(np.int32),
        prefix_ids_NI=prefix_ids_NI,
        prefix_tokens=_MOONCAKE_TOKENS,
    )


def read_trace(path: str | os.PathLike) -> Trace:
    """Reads a trace of any known format: `.csv` is Azure's, `.jsonl` is Mooncake's.

    Raises:
      ValueError: another ending, or as the readers do.
    """
    readers = {".csv": read_azure_csv, ".jsonl": read_mooncake_jsonl}
    ending = os.path.splitext(path)[1]
    require(
        ending in readers,
        f"trace={os.fspath(path)!r}: must end in .csv (Azure LLM inference) or .jsonl (Mooncake)",
    )
    return readers[ending](path)


def _mooncake_row(record: object) -> tuple[float, int, int, list[int]]:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    if not isinstance(record, dict) or not set(names) <= set(record):
        raise ValueError(f"must be an object of {', '.join(names)}")
    timestamp, num_prompt, num_output, ids = (record[name] for name in names)
    for name, values in zip(names, ([timestamp], [num_prompt], [num_output], ids), strict=True):
        for value in values:
            if type(value) is not int or not 0 <= value < 2**31:
                raise ValueError(f"{name}: {value!r} must be a count below 2^31")
    needed = -(-num_prompt // _MOONCAKE_TOKENS)
    if len(ids) != needed:
        raise ValueError(f"hash_ids: {len(ids)} of them, a prompt of {num_prompt} has {needed}")
    return timestamp / 1000, num_prompt, num_output, ids


def _spread(seconds: np.ndarray, spread_seconds: float) -> np.ndarray:
    """Ascending times; those that are equal moved evenly apart."""
    times, first, counts = np.unique(seconds, return_index=True, return_counts=True)
    room = np.minimum(np.diff(times, append=np.inf), spread_seconds)
    place = np.arange(len(seconds)) - np.repeat(first, counts)
    return seconds + np.repeat(room / counts, counts) * place


def _seconds(timestamp: str) -> float:
    # datetime takes no seventh decimal.
    whole, _, fraction = timestamp.partition(".")
    moment = datetime.fromisoformat(whole) - datetime(2000, 1, 1)
    return moment.total_seconds() + float(f"0.{fraction or 0}")
