"""Is a machine what its data sheet and the model's sizes make of it?"""

import dataclasses

import numpy as np
import pytest

from helios_jax.profiler import Formats, weight_bytes
from helios_jax.replay import (
    MODELS,
    Trace,
    deal_targets,
    machine,
    saturation_seconds,
)

LLAMA_8B = MODELS["llama-3-8b"]


def test_the_cache_is_what_the_weights_leave():
    made = machine(LLAMA_8B, "h100", Formats(), max_model_len=8192)
    left = 0.9 * 84_942_979_072 - weight_bytes(LLAMA_8B, Formats())
    assert made.config.num_blocks == int(left / (16 * 65_536))
    assert machine(
        LLAMA_8B, "h100", Formats(kv_bits=16), kv_cache_bytes=16 * 131_072 * 77.5
    ).config.num_blocks == 77  # fmt: skip


def test_prefill_is_as_fast_as_the_flops_allow():
    """2 flops a weight and 0.6 of 989 TFLOP/s: 42,500 tokens/s, a little less with attention."""
    rate = machine(LLAMA_8B, "h100", Formats()).config.prefill_tokens_per_second
    assert 0.9 * 42_500 < rate < 42_500
    slower = machine(LLAMA_8B, "h100", Formats(), efficiency=0.3).config
    assert slower.prefill_tokens_per_second == pytest.approx(rate / 2, rel=1e-3)


def test_saturation_is_the_time_of_all_at_once():
    """Prompts alone: as long as their tokens at the rate of prefill, whenever they arrive."""
    trace = Trace(np.array([0.0, 5.0, 500.0]), *np.full((2, 3), [[2048], [1]], np.int32))
    made = machine(LLAMA_8B, "h100", Formats(), max_model_len=4096, max_num_rows=128)
    seconds = saturation_seconds(trace, made)
    assert seconds == pytest.approx(3 * 2048 / made.config.prefill_tokens_per_second, rel=0.01)


def test_a_machine_that_can_serve_nothing_has_no_saturation():
    trace = Trace(np.array([0.0, 5.0, 500.0]), *np.full((2, 3), [[5000], [1]], np.int32))
    made = machine(LLAMA_8B, "h100", Formats(), max_model_len=4096, max_num_rows=128)
    with pytest.raises(ValueError, match="max_model_len=4096: .* no request of this trace fits"):
        saturation_seconds(trace, made)


def test_shorter_targets_have_the_better_priority():
    targets = deal_targets(1000, [8.0, 1.0], 0.1, seed=3)
    assert set(zip(targets.ttft_seconds, targets.priority, strict=True)) == {(1.0, 0), (8.0, 1)}
    assert 400 < int(targets.priority.sum()) < 600
    assert np.array_equal(targets.priority, deal_targets(1000, [8.0, 1.0], 0.1, seed=3).priority)


@pytest.mark.parametrize("changes, match", [
    ({"gpu": "t4"}, "gpu='t4': must be one of a100, l4, h100, h200, b200"),
    ({"efficiency": 0.0}, "efficiency=0.0"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
    ({"gpu": "l4", "formats": Formats(weight_bits=16), "model": dataclasses.replace(
        LLAMA_8B, num_layers=80)}, "fewer bits, or take a larger GPU"),
])  # fmt: skip
def test_machines_that_cannot_be_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        machine(**{"model": LLAMA_8B, "gpu": "h100", "formats": Formats(), **changes})


@pytest.mark.parametrize("ttft, tpot, match", [
    ([], 1.0, r"ttft_seconds=\[\]"), ([0.0], 1.0, "ttft_seconds"), ([1.0], 0.0, "tpot_seconds=0.0"),
])  # fmt: skip
def test_targets_must_be_above_nought(ttft, tpot, match):
    with pytest.raises(ValueError, match=match):
        deal_targets(3, ttft, tpot)
