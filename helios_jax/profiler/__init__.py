"""What must a step move, and how long must that take?"""

from helios_jax.profiler.bytes import (
    Formats,
    Hardware,
    StepBytes,
    attention_flops,
    kv_bytes_per_token,
    linear_bytes,
    linear_shapes,
    num_matmul_weights,
    step_bytes,
    step_seconds,
    vector_bytes,
    weight_bytes,
)
from helios_jax.profiler.decode import (
    PARTS,
    DecodeBytes,
    Weights,
    decode_bytes,
    formats_as_stored,
    weights_as_stored,
    weights_of_formats,
    weights_of_params,
)
from helios_jax.profiler.gpus import GPUS, Gpu

__all__ = [
    "DecodeBytes",
    "Formats",
    "GPUS",
    "Gpu",
    "Hardware",
    "PARTS",
    "StepBytes",
    "Weights",
    "decode_bytes",
    "kv_bytes_per_token",
    "linear_bytes",
    "linear_shapes",
    "attention_flops",
    "num_matmul_weights",
    "step_bytes",
    "step_seconds",
    "vector_bytes",
    "weight_bytes",
    "formats_as_stored",
    "weights_as_stored",
    "weights_of_formats",
    "weights_of_params",
]
