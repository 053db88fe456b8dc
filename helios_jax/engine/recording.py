"""How is a run of the engine written down, so that it can be computed again bit for bit?

JSON lines. The first is the header: {"format", "format_version", "started_at", "versions",
"identity", "settings", "urgency", "snapshot"}, of which `snapshot` names the saved engine that the
run went on from, if it did not start empty. Each other line holds what one step was computed from,
as far as there is something to say:

    now               seconds on the device's clock
    rebase_seconds    before all else the clock's origin moves so much later
    sampling_shapes   then the state gets room for these sampling parameters
    aborts, requests  then these rows leave and these requests enter (`engine.request_json`)
    chunk, rounds     the variants, without fields that are defaults; no rounds, no step
    decodes           false where the rounds are those of the next step
    max_rounds
    starts_over       the step before failed: the engine is empty, with `sampling_shapes`
    ended             [row id, tokens] of outputs whose end was read since the line before

Every line ends with its number ("line") and "crc32", the checksum of all before it on the line.
Times of requests are relative to the same clock as `now`, so that the requests of a recording,
`rebase_seconds` added up, are a trace of who asked for what and when.

Measured: a decode step costs 7 microseconds and 130 bytes; `Recorder` says when they reach the
file.
"""

import dataclasses
import json
import logging
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, TextIO

import numpy as np

from helios_jax.config import require
from helios_jax.engine.request_json import Json, request_from_json, request_to_json
from helios_jax.engine.requests import EngineRequest
from helios_jax.engine.variants import StepVariants
from helios_jax.engine.work import Variant
from helios_jax.sampling import SamplingShapes
from helios_jax.tokenizer import Tokenizer

_logger = logging.getLogger("helios_jax.engine")

FORMAT, FORMAT_VERSION = "helios-jax-recording", 1
FLUSH_SECONDS = 0.1

_BUFFER_BYTES = 1 << 20
_CHECKSUM = ',"crc32":'
_VARIANT = {
    field.name: field.default
    for field in dataclasses.fields(Variant)
    if field.default is not dataclasses.MISSING
}


class StepInputs(NamedTuple):
    """What one step is computed from, beside the state.

    now: seconds on the device's clock, after `rebase_seconds`, by which its origin moves later.
    shapes: of sampling parameters, where they grow.
    arrived: requests that enter; called_off: row ids that leave before.
    variants: None runs neither chunk nor rounds.
    max_rounds: decode rounds at most.
    starts_over: the state is replaced with an empty one of `shapes`, and nothing else happens.
    """

    now: float = 0.0
    rebase_seconds: float | None = None
    shapes: SamplingShapes | None = None
    arrived: Sequence[EngineRequest] = ()
    called_off: Sequence[int] = ()
    variants: StepVariants | None = None
    max_rounds: int = 0
    starts_over: bool = False

    @property
    def changes_state(self) -> bool:
        """Whether it does anything."""
        grows = self.rebase_seconds is not None or self.shapes is not None
        runs = self.variants is not None or self.starts_over
        return bool(grows or runs or self.arrived or self.called_off)


class Recorder:
    """Writes the lines of one run.

    They gather in memory; they reach the file at least every `FLUSH_SECONDS` while there are steps,
    when the engine has nothing to do, and at the end, however the process ends short of a kill. A
    file that cannot be written (a full disk) ends the recording, not the run: the log says so.
    """

    def __init__(self, path: str | os.PathLike, header: Json):
        """
        Args:
          header: beside the format and the time.

        Raises:
          ValueError: something lies at `path` already.
          OSError: it cannot be written.
        """
        try:
            # No line is written on its own.
            self._file = open(path, "x", buffering=_BUFFER_BYTES, encoding="utf-8")
        except FileExistsError:
            raise ValueError(
                f"record={os.fspath(path)!r}: exists already; give a new name, or remove it first"
            ) from None
        self._close = weakref.finalize(self, _close, self._file)
        self._num_lines = 0
        self._ended: list[tuple[int, int]] = []
        self._flushed_at = time.monotonic()
        about = {"format": FORMAT, "format_version": FORMAT_VERSION, "started_at": time.time()}
        self._file.write(self._line(about | header))
        self._file.flush()

    def step(self, inputs: StepInputs, origin: float) -> None:
        """Writes one step down.

        Args:
          origin: of the device's clock, on `time.monotonic`'s.
        """
        if inputs.changes_state:
            self._write(_step_to_json(inputs, origin))
            if time.monotonic() - self._flushed_at > FLUSH_SECONDS:
                self.flush()

    def ended(self, row_id: int, num_tokens: int) -> None:
        """An output has ended with so many tokens; goes into the next line."""
        self._ended.append((row_id, num_tokens))

    def flush(self) -> None:
        """Brings all to the file."""
        if self._ended:
            self._write({})
        self._guarded(self._file.flush)
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Ends the recording."""
        self.flush()
        self._close()

    def _write(self, fields: Json) -> None:
        if self._ended:
            fields["ended"], self._ended = self._ended, []
        self._guarded(self._file.write, self._line(fields))

    def _line(self, fields: Json) -> str:
        fields["line"] = self._num_lines + 1
        # Callers may have given numpy's numbers.
        body = json.dumps(fields, separators=(",", ":"), default=np.generic.item)[:-1]
        self._num_lines += 1
        return f"{body}{_CHECKSUM}{zlib.crc32(body.encode())}}}\n"

    def _guarded(self, write: Callable, *arguments: str) -> None:
        if not self._close.alive:
            return
        try:
            write(*arguments)
        except OSError:
            _logger.exception("%s: the recording ends at line %d", self._file.name, self._num_lines)
            self._close()


def _close(file: TextIO) -> None:
    # What could not be written before cannot be written now.
    with suppress(OSError):
        file.close()


class Recording(NamedTuple):
    """A recording that is being read.

    header: unchecked but for the format.
    lines: (number, fields) of what follows it, read as it is asked for.
    """

    path: str
    header: Json
    lines: Iterator[tuple[int, Json]]

    def steps(
        self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]
    ) -> Iterator[tuple[int, StepInputs]]:
        """(line number, inputs) of each step, on a clock with the origin 0.

        Raises:
          ValueError: naming the line that is damaged or does not hold a step.
        """
        for number, fields in self.lines:
            try:
                yield number, _step_from_json(fields, tokenizer, eos_token_ids)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{self.path}, line {number}: {error!r}") from error


def read_recording(path: str | os.PathLike) -> Recording:
    """Opens a recording.

    A last line that was cut off, since the process was killed, is passed over. The file is closed
    when all lines were read, or the result is let go.

    Raises:
      ValueError: there is no recording of this version, or its header is damaged; while reading,
        a line is damaged.
    """
    path = os.fspath(path)
    lines = _read_lines(path)
    header = next(lines, (0, {}))[1]
    for key, expected in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
        require(
            header.get(key) == expected,
            f"{path}, line 1: {key}={header.get(key)!r}: this version reads {expected!r}; is it a "
            "recording of an engine?",
        )
    return Recording(path, header, lines)


def _read_lines(path: str) -> Iterator[tuple[int, Json]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = _parse(line)
                require(
                    fields.get("line") == number,
                    f"it says that it is line {fields.get('line')}: lines before it are missing",
                )
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise ValueError(
                    f"{path}, line {number}: {error}; it was changed or damaged, and what follows "
                    "cannot be computed without it"
                ) from None
            yield number, fields


def _parse(line: bytes) -> Json:
    body, mark, checksum = line.rpartition(_CHECKSUM.encode())
    found = zlib.crc32(body)
    require(bool(mark) and checksum.rstrip() == b"%d}" % found, f"its checksum is not {found}")
    return json.loads(body + b"}")


def _step_to_json(inputs: StepInputs, origin: float) -> Json:
    fields: Json = {}
    if inputs.variants is not None:
        fields["now"] = inputs.now
    if inputs.rebase_seconds is not None:
        fields["rebase_seconds"] = inputs.rebase_seconds
    if inputs.shapes is not None:
        fields["sampling_shapes"] = dataclasses.asdict(inputs.shapes)
    if inputs.called_off:
        fields["aborts"] = list(inputs.called_off)
    if inputs.arrived:
        fields["requests"] = [request_to_json(request, origin) for request in inputs.arrived]
    if inputs.variants is not None:
        chunk, rounds, decodes = inputs.variants
        if chunk is not None:
            fields["chunk"] = _variant_to_json(chunk)
        fields["rounds"] = _variant_to_json(rounds)
        if not decodes:
            fields["decodes"] = False
        fields["max_rounds"] = inputs.max_rounds
    if inputs.starts_over:
        fields["starts_over"] = True
    return fields


def _step_from_json(
    fields: Json, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]
) -> StepInputs:
    shapes, variants = fields.get("sampling_shapes"), None
    if "rounds" in fields:
        chunk = fields.get("chunk")
        variants = StepVariants(
            None if chunk is None else Variant(**chunk),
            Variant(**fields["rounds"]),
            fields.get("decodes", True),
        )
    return StepInputs(
        now=fields.get("now", 0.0),
        rebase_seconds=fields.get("rebase_seconds"),
        shapes=None if shapes is None else SamplingShapes(**shapes),
        arrived=[
            request_from_json(request, tokenizer, eos_token_ids, 0.0)
            for request in fields.get("requests", ())
        ],
        called_off=fields.get("aborts", ()),
        variants=variants,
        max_rounds=fields.get("max_rounds", 0),
        starts_over=fields.get("starts_over", False),
    )


def _variant_to_json(variant: Variant) -> Json:
    fields = dataclasses.asdict(variant)
    return {
        name: value
        for name, value in fields.items()
        if name not in _VARIANT or value != _VARIANT[name]
    }
