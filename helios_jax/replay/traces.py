"""Who asked for how much, and when? Recorded request traces."""

import csv
import dataclasses
import os
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from helios_jax.config import require


@dataclass(frozen=True)
class Trace:
    """N requests in order of arrival.

    Attributes:
      arrival_seconds: float64, from the first request on.
      num_prompt, num_output: int32 tokens, at least 1 each.
    """

    arrival_seconds: np.ndarray
    num_prompt: np.ndarray
    num_output: np.ndarray

    def __len__(self) -> int:
        return len(self.arrival_seconds)

    def at_load(self, factor: float) -> "Trace":
        """The same requests arriving `factor` times as fast."""
        require(factor > 0, f"factor={factor}: must be above 0")
        return dataclasses.replace(self, arrival_seconds=self.arrival_seconds / factor)


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


def _seconds(timestamp: str) -> float:
    # datetime takes no seventh decimal.
    whole, _, fraction = timestamp.partition(".")
    moment = datetime.fromisoformat(whole) - datetime(2000, 1, 1)
    return moment.total_seconds() + float(f"0.{fraction or 0}")
