"""Which format does a trace file have? Reads any known one, BurstGPT's and recordings included."""

import csv
import math
import os

import numpy as np

from helios_jax.config import require
from helios_jax.engine.recording import FORMAT, read_recording
from helios_jax.replay.traces import Trace, read_azure_csv, read_mooncake_jsonl, spread

# Of a row; others (Model, Total tokens, Log Type, …) are not looked at.
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


def read_trace(path: str | os.PathLike) -> Trace:
    """Reads a trace of any known format.

    A `.csv` with a column TIMESTAMP is Azure's, one with Timestamp is BurstGPT's; a `.jsonl` that
    begins with a recording's header is an engine's, another one Mooncake's.

    Raises:
      ValueError: another ending, or as the readers do.
    """
    ending = os.path.splitext(path)[1]
    require(
        ending in (".csv", ".jsonl"),
        f"trace={os.fspath(path)!r}: must end in .csv (Azure LLM inference, BurstGPT) or .jsonl "
        "(Mooncake, an engine's recording)",
    )
    with open(path, encoding="utf-8", errors="replace") as file:
        first = file.readline(1 << 16)
    if ending == ".csv":
        columns = [name.strip() for name in first.split(",")]
        return read_burstgpt_csv(path) if "Timestamp" in columns else read_azure_csv(path)
    return read_recorded(path) if f'"{FORMAT}"' in first else read_mooncake_jsonl(path)


def read_burstgpt_csv(path: str | os.PathLike, spread_seconds: float = 1.0) -> Trace:
    """Reads a trace of github.com/HPMLL/BurstGPT (arXiv 2401.17644).

    Requests without response tokens failed there and are left out.

    Args:
      spread_seconds: as for `read_mooncake_jsonl`; timestamps are whole seconds.

    Raises:
      ValueError: a column is missing, a value is malformed, or there is no request.
    """
    rows = []
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        require(
            set(_BURSTGPT) <= set(reader.fieldnames or ()),
            f"{path}: has columns {reader.fieldnames}, needs {', '.join(_BURSTGPT)}; is it a "
            "BurstGPT trace?",
        )
        for number, row in enumerate(reader, start=2):
            try:
                seconds, prompt, output = (float(row[name]) for name in _BURSTGPT)
                require(
                    all(map(math.isfinite, (seconds, prompt, output))),
                    "a number that is not finite",
                )
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if output >= 1:
                rows.append((seconds, int(prompt), int(output)))
    require(len(rows) > 0, f"{path}: holds no requests that were answered")
    rows.sort(key=lambda row: row[0])
    seconds, num_prompt, num_output = (np.array(column) for column in zip(*rows, strict=True))
    return Trace(
        arrival_seconds=spread(seconds - seconds[0], spread_seconds),
        num_prompt=np.maximum(num_prompt, 1).astype(np.int32),
        num_output=num_output.astype(np.int32),
    )


def read_recorded(path: str | os.PathLike) -> Trace:
    """Reads the requests of an engine's recording, with their prompts.

    An output counts with the tokens that it came to; one that had not ended, with its limit. Each
    of a request's n outputs is a request here.

    Raises:
      ValueError: the recording is damaged, or holds no request.
    """
    recording = read_recording(path)
    rebased, rows = 0.0, []
    lengths: dict[int, int] = {}
    for number, fields in recording.lines:
        try:
            rebased += fields.get("rebase_seconds") or 0.0
            lengths |= {int(row): int(tokens) for row, tokens in fields.get("ended", ())}
            for request in fields.get("requests", ()):
                arrival = request["arrival_seconds"] + rebased
                prompt = tuple(map(int, request["prompt_token_ids"]))
                limit = int(request["sampling"].get("max_tokens", 16))
                rows += [(arrival, prompt, int(row), limit) for row in request["row_ids"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}") from error
    require(len(rows) > 0, f"{path}: holds no requests")
    rows.sort(key=lambda row: row[0])
    seconds = np.array([row[0] for row in rows])
    outputs = np.array([lengths.get(row_id, limit) for _, _, row_id, limit in rows])
    return Trace(
        arrival_seconds=seconds - seconds[0],
        num_prompt=np.array([len(prompt) for _, prompt, _, _ in rows], np.int32),
        num_output=np.maximum(outputs, 1).astype(np.int32),
        prompt_token_ids=tuple(prompt for _, prompt, _, _ in rows),
    )
