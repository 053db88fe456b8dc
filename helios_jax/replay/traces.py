"""Who asked for how much, and when? Request traces as Azure and Mooncake publish them."""

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
      prompt_token_ids: the prompts themselves, where they were recorded.
    """

    arrival_seconds: np.ndarray
    num_prompt: np.ndarray
    num_output: np.ndarray
    prefix_ids_NI: np.ndarray | None = None
    prefix_tokens: int = 512
    prompt_token_ids: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.arrival_seconds)

    def cut(
        self,
        *,
        start_seconds: float = 0.0,
        window_seconds: float | None = None,
        sample: float = 1.0,
        num_requests: int | None = None,
        time_stretch: float = 1.0,
        length_scale: float = 1.0,
        max_prompt: int | None = None,
        max_output: int | None = None,
        seed: int = 0,
    ) -> "Trace":
        """What is served: of a recording a window, of that a share, of that the first requests.

        Args:
          start_seconds, window_seconds: see `window`; None is all of the rest.
          sample: see `thinned`, drawn by `seed`.
          num_requests: see `head`; None is all.
          time_stretch: what times are multiplied with; below 1 they come faster.
          length_scale, max_prompt, max_output: see `scaled`.

        Raises:
          ValueError: a value out of its range, or nothing is left.
        """
        require(time_stretch > 0, f"time_stretch={time_stretch}: must be above 0")
        kept = self
        if start_seconds != 0 or window_seconds is not None:
            kept = kept.window(start_seconds, np.inf if window_seconds is None else window_seconds)
        if sample != 1:
            kept = kept.thinned(sample, seed)
        if num_requests is not None:
            kept = kept.head(num_requests)
        return kept.scaled(length_scale, max_prompt, max_output).at_load(1 / time_stretch)

    def at_load(self, factor: float) -> "Trace":
        """The same requests arriving `factor` times as fast."""
        require(factor > 0, f"factor={factor}: must be above 0")
        return dataclasses.replace(self, arrival_seconds=self.arrival_seconds / factor)

    def head(self, num_requests: int) -> "Trace":
        """The first requests alone."""
        require(num_requests >= 1, f"num_requests={num_requests}: must be at least 1")
        return self._only(np.arange(min(num_requests, len(self))))

    def window(self, start_seconds: float, seconds: float) -> "Trace":
        """What arrives from `start_seconds` on for so long, counted from the first of it.

        Raises:
          ValueError: nothing does.
        """
        require(start_seconds >= 0, f"start_seconds={start_seconds}: must be 0 or more")
        require(seconds > 0, f"window_seconds={seconds}: must be above 0")
        times = self.arrival_seconds
        kept = np.flatnonzero((times >= start_seconds) & (times < start_seconds + seconds))
        require(
            len(kept) > 0,
            f"window of {seconds} s from {start_seconds} s: holds no requests; the trace has "
            f"{times[-1]:.0f} s",
        )
        return self._only(kept)

    def thinned(self, share: float, seed: int = 0) -> "Trace":
        """A random share of the requests, at their times; at least one."""
        require(0 < share <= 1, f"sample={share}: must be in (0, 1]")
        number = max(1, round(share * len(self)))
        kept = np.random.default_rng(seed).permutation(len(self))[:number]
        return self._only(np.sort(kept))

    def scaled(
        self, factor: float, max_prompt: int | None = None, max_output: int | None = None
    ) -> "Trace":
        """Lengths times `factor`, then cut; at least one token each. Ids stand for less alike.

        Raises:
          ValueError: a factor or cap out of range, or prompts that were recorded, which cannot be
            scaled.
        """
        require(factor > 0, f"length_scale={factor}: must be above 0")
        for name, cap in (("max_prompt", max_prompt), ("max_output", max_output)):
            require(cap is None or cap >= 1, f"{name}={cap}: must be at least 1")
        require(
            factor == 1 or self.prompt_token_ids is None,
            f"length_scale={factor}: a recording has its prompts, whose length is given; leave it "
            "out",
        )

        def scale(tokens: np.ndarray, cap: int | None) -> np.ndarray:
            return np.clip(np.round(tokens * factor), 1, cap).astype(np.int32)

        num_prompt = scale(self.num_prompt, max_prompt)
        prompts = self.prompt_token_ids
        if prompts is not None:
            prompts = tuple(
                ids[:number] for ids, number in zip(prompts, num_prompt.tolist(), strict=True)
            )
        return dataclasses.replace(
            self, num_prompt=num_prompt, num_output=scale(self.num_output, max_output),
            prefix_tokens=max(1, round(self.prefix_tokens * factor)), prompt_token_ids=prompts,
        )  # fmt: skip

    def _only(self, kept: np.ndarray) -> "Trace":
        """The requests at these places, the first of which arrives at 0."""
        times = self.arrival_seconds[kept]
        ids, prompts = self.prefix_ids_NI, self.prompt_token_ids
        return dataclasses.replace(
            self, arrival_seconds=times - times[0], num_prompt=self.num_prompt[kept],
            num_output=self.num_output[kept], prefix_ids_NI=None if ids is None else ids[kept],
            prompt_token_ids=None if prompts is None else tuple(prompts[i] for i in kept),
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
        arrival_seconds=spread(seconds, spread_seconds),
        num_prompt=np.maximum(num_prompt, 1).astype(np.int32),
        num_output=np.maximum(num_output, 1).astype(np.int32),
        prefix_ids_NI=prefix_ids_NI,
        prefix_tokens=_MOONCAKE_TOKENS,
    )


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


def spread(seconds: np.ndarray, spread_seconds: float) -> np.ndarray:
    """Ascending times; those that are equal moved evenly apart, within so long."""
    times, first, counts = np.unique(seconds, return_index=True, return_counts=True)
    room = np.minimum(np.diff(times, append=np.inf), spread_seconds)
    place = np.arange(len(seconds)) - np.repeat(first, counts)
    return seconds + np.repeat(room / counts, counts) * place


def _seconds(timestamp: str) -> float:
    # datetime takes no seventh decimal.
    whole, _, fraction = timestamp.partition(".")
    moment = datetime.fromisoformat(whole) - datetime(2000, 1, 1)
    return moment.total_seconds() + float(f"0.{fraction or 0}")
