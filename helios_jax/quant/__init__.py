"""Quantised weights, what makes them, and what multiplies them.

`QuantTensor` is the one stored form of every INT3, INT4, INT8 and FP8 linear; `ExpandedWeight` is
what a CPU computes with; `matmul` takes either, or a plain array.

One linear is quantised with `rtn`, `gptq`, or AWQ's `search_scales` and `search_clip` followed by
`rtn`; a `Scheme` says on which grid, `InputStatistics` what the inputs were like.
`helios_jax.calibrate` does it to a whole model.
"""

from helios_jax.quant.awq import ScaleSearch, search_clip, search_scales
from helios_jax.quant.expanded import ExpandedWeight, expand
from helios_jax.quant.gptq import GptqOptions, gptq
from helios_jax.quant.matmul import (
    Weight,
    embedding_lookup,
    float32_matmul,
    matmul,
    weight_shape,
)
from helios_jax.quant.rtn import rtn
from helios_jax.quant.scheme import Scheme, scale_outputs
from helios_jax.quant.statistics import InputStatistics, output_error
from helios_jax.quant.tensor import FLOAT8, QuantTensor, join_outputs

__all__ = [
    "FLOAT8",
    "ExpandedWeight",
    "GptqOptions",
    "InputStatistics",
    "QuantTensor",
    "ScaleSearch",
    "Scheme",
    "Weight",
    "embedding_lookup",
    "expand",
    "float32_matmul",
    "gptq",
    "join_outputs",
    "matmul",
    "output_error",
    "rtn",
    "scale_outputs",
    "search_clip",
    "search_scales",
    "weight_shape",
]
