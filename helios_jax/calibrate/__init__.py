"""Drivers that walk a whole model: quantise it on given text, evaluate it.

    calibration = load_calibration([Path("traffic.jsonl")], checkpoint.tokenizer)
    leaves = quantize(checkpoint, Recipe("awq", Scheme(4, 64)), calibration, work_folder)

`helios quantize`, `helios evaluate` and `helios calibrate-kv` are these functions on the command
line. A single layer is `quantize_layer`; a single linear is `helios_jax.quant`'s. `results/` holds
what was measured.
"""

from helios_jax.calibrate.data import Calibration, load_calibration
from helios_jax.calibrate.evaluation import evaluate, to_markdown
from helios_jax.calibrate.kv_evaluation import evaluate_kv, kv_markdown
from helios_jax.calibrate.kv_precision import KV_DTYPES, KVRanges, RoundedKV, kv_ranges, scales_of
from helios_jax.calibrate.layerwise import LayerResult, advance, quantize_layer
from helios_jax.calibrate.quantizing import LayerReport, quantize
from helios_jax.calibrate.recipe import DEFAULT_RULES, METHODS, Recipe, Rule
from helios_jax.calibrate.scoring import (
    Reference,
    Scores,
    Windows,
    cut_windows,
    mean_scores,
    score,
)
from helios_jax.calibrate.workspace import discard

__all__ = [
    "DEFAULT_RULES",
    "KV_DTYPES",
    "METHODS",
    "Calibration",
    "KVRanges",
    "LayerReport",
    "LayerResult",
    "Recipe",
    "Reference",
    "RoundedKV",
    "Rule",
    "Scores",
    "Windows",
    "advance",
    "cut_windows",
    "discard",
    "evaluate",
    "evaluate_kv",
    "kv_markdown",
    "kv_ranges",
    "load_calibration",
    "mean_scores",
    "quantize",
    "quantize_layer",
    "scales_of",
    "score",
    "to_markdown",
]
