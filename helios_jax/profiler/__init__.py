"""What must a step move, and how long must that take?"""

from helios_jax.profiler.bytes import (
    H100_SXM,
    Formats,
    Hardware,
    StepBytes,
    kv_bytes_per_token,
    num_matmul_weights,
    step_bytes,
    step_seconds,
    weight_bytes,
)

__all__ = [
    "Formats",
    "H100_SXM",
    "Hardware",
    "StepBytes",
    "kv_bytes_per_token",
    "num_matmul_weights",
    "step_bytes",
    "step_seconds",
    "weight_bytes",
]
