"""HELIOS-JAX: LLM inference in JAX, on NVIDIA GPUs and on a CPU.

    import helios_jax
    llm = helios_jax.load("smollm2-135m")
    outputs = llm.chat([{"role": "user", "content": "What is gravity?"}])

For programs of your own: `Transformer`, `init_params`, `param_shardings` and the pure `generate`,
which works inside jit, vmap and a mesh.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helios_jax.config import ModelConfig, RopeConfig
    from helios_jax.generation import GenerateOutput, generate
    from helios_jax.llm import LLM, load
    from helios_jax.model import Transformer, init_params, param_shardings
    from helios_jax.outputs import CompletionOutput, RequestOutput, StreamOutput
    from helios_jax.sampling import SamplingParams

# Loaded at first use: importing the package costs neither jax nor Flax.
_HOMES = {
    "LLM": "helios_jax.llm",
    "load": "helios_jax.llm",
    "SamplingParams": "helios_jax.sampling",
    "RequestOutput": "helios_jax.outputs",
    "CompletionOutput": "helios_jax.outputs",
    "StreamOutput": "helios_jax.outputs",
    "ModelConfig": "helios_jax.config",
    "RopeConfig": "helios_jax.config",
    "Transformer": "helios_jax.model",
    "init_params": "helios_jax.model",
    "param_shardings": "helios_jax.model",
    "generate": "helios_jax.generation",
    "GenerateOutput": "helios_jax.generation",
}

__all__ = [
    "CompletionOutput",
    "GenerateOutput",
    "LLM",
    "ModelConfig",
    "RequestOutput",
    "RopeConfig",
    "SamplingParams",
    "StreamOutput",
    "Transformer",
    "generate",
    "init_params",
    "load",
    "param_shardings",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'helios_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
