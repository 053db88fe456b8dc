"""How is a recorded run computed again?"""

import logging
import os
from collections.abc import Iterator
from typing import Any

from helios_jax.config import ModelConfig, require
from helios_jax.engine.engine import Engine
from helios_jax.engine.identity import check_identity, settings_from_json, with_saved_costs
from helios_jax.engine.recording import read_recording
from helios_jax.engine.saving import recording_header
from helios_jax.engine.state import StepOutputs
from helios_jax.scheduler import Urgency
from helios_jax.scheduler.urgency import deadline
from helios_jax.speculative import Speculation, SpeculationParams
from helios_jax.tokenizer import Tokenizer

_logger = logging.getLogger("helios_jax.engine")


def replay(
    path: str | os.PathLike,
    form: Any,
    tokenizer: Tokenizer,
    *,
    model_config: ModelConfig,
    urgency: Urgency = deadline,
    snapshot: str | os.PathLike | None = None,
    speculation: Speculation | None = None,
    speculation_params: SpeculationParams | None = None,
) -> Iterator[StepOutputs]:
    """Yields the outputs of each step of a recorded run, as numpy arrays, bit for bit as they were.

    That holds for the same jax on the same kind of device (another is told in the log). A recording
    that was cut off ends where it was. A step that failed is tried again.

    Args:
      path: what `Engine(record=...)` wrote.
      form, tokenizer, model_config, urgency: as the recorded engine's.
      snapshot: the folder that the recorded engine was restored from, if it was.
      speculation, speculation_params: the recorded engine's; its costs are in the recording.

    Raises:
      ValueError: when called, where the recording is of another model or policy or needs another
        snapshot; while iterating, where a line is damaged. It names what differs, or the line.
    """
    recording = read_recording(path)
    header, where = recording.header, f"{recording.path}, line 1"
    needed = header.get("snapshot")
    require(
        (needed is None) == (snapshot is None),
        f"snapshot={snapshot!r}: {recording.path} was recorded by an engine that "
        + ("started empty; leave it out" if needed is None else "was restored: give its folder"),
    )
    if snapshot is None:
        settings = settings_from_json(where, header.get("settings", {}))
        engine = Engine(
            form, tokenizer, model_config=model_config, config=settings.config, urgency=urgency,
            kv_scales=settings.kv_scales, speculation=speculation,
            speculation_params=with_saved_costs(
                settings, speculation_params or SpeculationParams()
            ),
        )  # fmt: skip
        # Those it had by then, where the recording began later than the engine.
        engine._device.widen(settings.shapes)
    else:
        engine = Engine.restore(
            snapshot, form, tokenizer, model_config=model_config, urgency=urgency,
            speculation=speculation, speculation_params=speculation_params,
        )  # fmt: skip
        require(
            engine.snapshot_sha256 == needed,
            f"snapshot={os.fspath(snapshot)!r}: is {engine.snapshot_sha256}, but {where} names "
            f"{needed}; give the folder that the recorded engine was restored from",
        )
    mine = recording_header(engine)
    check_identity(where, header.get("identity"), mine["identity"])
    check_identity(where, header, {"urgency": mine["urgency"]})
    if header.get("versions") != mine["versions"]:
        _logger.warning(
            "%s was recorded with %s; here is %s: bits may differ",
            recording.path, header.get("versions"), mine["versions"],
        )  # fmt: skip
    steps = recording.steps(tokenizer, model_config.eos_token_ids)
    return (outputs for _, inputs in steps if (outputs := engine.repeat_step(inputs)) is not None)
