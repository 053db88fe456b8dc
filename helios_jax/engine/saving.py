"""What of an engine is saved beside the device's state, and how is it put together again?"""

import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from helios_jax.config import ModelConfig
from helios_jax.engine.identity import (
    Settings,
    check_identity,
    identity,
    policy_name,
    settings_from_json,
    settings_to_json,
    versions,
    with_saved_costs,
)
from helios_jax.engine.request_json import (
    Json,
    progress_to_json,
    request_from_json,
    request_to_json,
    resume_row,
)
from helios_jax.engine.snapshot import HOST, MANIFEST, read_snapshot, read_state, write_snapshot
from helios_jax.scheduler import Urgency
from helios_jax.speculative import Speculation, SpeculationParams
from helios_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from helios_jax.engine.core import EngineCore

_Core = TypeVar("_Core", bound="EngineCore")


def describe(engine: "EngineCore") -> Json:
    """What computes, what it belongs to, and how it was set up."""
    extra = engine.speculation_params
    settings = Settings(
        engine.config, engine._device.scales, engine._device.shapes, jax.tree.leaves(extra.costs)
    )
    return {
        "versions": versions(),
        "identity": identity(
            engine.form, engine.tokenizer, engine.model_config,
            engine.scheduler_config, engine.step_config, extra.proposer,
        ),
        "settings": settings_to_json(settings, engine.pool_bytes),
    }  # fmt: skip


def recording_header(engine: "EngineCore") -> Json:
    """What a recording begins with."""
    return describe(engine) | {
        "urgency": policy_name(engine._urgency),
        "snapshot": engine.snapshot_sha256,
    }


def save_engine(engine: "EngineCore", folder: str | os.PathLike) -> None:
    """Writes an engine between two steps, none of which is in flight."""
    assert not engine._in_flight and not engine._device.answers, "they were read"
    with engine._inbox:
        host = _host_to_json(engine)
    write_snapshot(folder, engine._device.state, describe(engine), host)


def restore_engine(
    cls: type[_Core],
    folder: str | os.PathLike,
    form: Any,
    tokenizer: Tokenizer,
    model_config: ModelConfig,
    urgency: Urgency,
    speculation: Speculation | None,
    extra: SpeculationParams,
) -> _Core:
    """See `Engine.restore`."""
    snapshot = read_snapshot(folder)
    where = os.fspath(snapshot.folder / MANIFEST)
    settings = settings_from_json(where, snapshot.settings)
    engine = cls(
        form, tokenizer, model_config=model_config, config=settings.config, urgency=urgency,
        kv_scales=settings.kv_scales, speculation=speculation,
        speculation_params=with_saved_costs(settings, extra),
    )  # fmt: skip
    check_identity(where, snapshot.identity, describe(engine)["identity"])
    device = engine._device
    device.widen(settings.shapes)
    engine._wanted_shapes |= settings.shapes
    device.state = read_state(snapshot, device.state)
    engine.snapshot_sha256 = snapshot.sha256
    try:
        _host_from_json(engine, snapshot.host)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{snapshot.folder / HOST}: {error!r}") from error
    return engine


def _host_to_json(engine: "EngineCore") -> Json:
    """What the host knows; call it with the inbox locked."""
    arrived = {request.request_id for request in engine._arrived}
    now = time.perf_counter()
    return {
        "clock_seconds": time.monotonic() - engine._origin,
        "next_id": engine._next_id,
        "random_state": engine._rng.bit_generator.state,
        "called_off": list(engine._called_off),
        "num_pending_tokens": engine._num_pending_tokens,
        **engine._metrics.to_json(),
        "requests": [
            {
                **request_to_json(request, engine._origin),
                "prompt": request.prompt,
                "age_seconds": now - request.submitted_seconds,
                "is_admitted": request.request_id not in arrived,
                "outputs": [progress_to_json(row, now) for row in request.rows],
            }
            for request in engine._requests.values()
        ],
    }


def _host_from_json(engine: "EngineCore", host: Json) -> None:
    now = time.perf_counter()
    engine._origin = time.monotonic() - host["clock_seconds"]
    engine._next_id = host["next_id"]
    engine._rng.bit_generator.state = host["random_state"]
    engine._called_off = host["called_off"]
    engine._num_pending_tokens = host["num_pending_tokens"]
    speculation = engine._device.state.speculation
    engine._metrics.resume(host, None if speculation is None else speculation.telemetry)
    for fields in host["requests"]:
        request = request_from_json(
            fields, engine.tokenizer, engine.model_config.eos_token_ids, engine._origin
        )
        request.prompt = fields["prompt"]
        request.submitted_seconds = now - fields["age_seconds"]
        for row, output in zip(request.rows, fields["outputs"], strict=True):
            resume_row(row, output, now)
        engine._take_back(request, fields["is_admitted"])
