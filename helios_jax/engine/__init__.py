"""The serving engine: many requests at once over a paged KV cache, one pure step after another.

`engine_step` is the pure function (`engine.step`); `Engine` the host around it. A caller who wants
the batch loop in a program of their own takes the first:

    state = init_state(model_config, scheduler_config, step_config, shapes=SamplingShapes())
    state, outputs = engine_step(params, state, arrivals, now, max_rounds, model=..., ...)

`Engine(speculation=..., speculation_params=...)` drafts and verifies in the step's rounds
(`engine.drafts`; the parts are `helios_jax.speculative`'s); without, a round is one pass.

A run is a fold over what arrives and when. So an engine can be saved in the middle of its requests
and restored (`Engine.save`, `Engine.restore`: `engine.snapshot`), and a run that was recorded
(`Engine(record=...)`: `engine.recording`) is computed again by `replay`, bit for bit.

`python -m helios_jax.engine.aot` compiles it for GPUs that are not there, and judges the result.
Llama 3 8B, INT4 and FP8, 64 rows, all 32 layers: 18 launches a layer and round, 10 of them of our
kernels; temporaries of 125 MiB; nothing that grows with the KV pool is copied (aot/results/).
"""

from helios_jax.engine.config import EngineConfig, StepConfig, resolve_config
from helios_jax.engine.engine import Engine
from helios_jax.engine.recording import Recording, StepInputs, read_recording
from helios_jax.engine.replaying import replay
from helios_jax.engine.requests import (
    DeadlineExceeded,
    EngineError,
    EngineFull,
    NeverFits,
    RequestUpdate,
)
from helios_jax.engine.state import (
    Arrivals,
    DraftCounts,
    EngineState,
    RowOutputs,
    StepOutputs,
    Telemetry,
    init_arrivals,
    init_state,
)
from helios_jax.engine.step import admit, engine_step
from helios_jax.engine.work import Variant

__all__ = [
    "Arrivals",
    "DeadlineExceeded",
    "DraftCounts",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineFull",
    "EngineState",
    "NeverFits",
    "Recording",
    "RequestUpdate",
    "RowOutputs",
    "StepConfig",
    "StepInputs",
    "StepOutputs",
    "Telemetry",
    "Variant",
    "admit",
    "engine_step",
    "init_arrivals",
    "init_state",
    "read_recording",
    "replay",
    "resolve_config",
]
