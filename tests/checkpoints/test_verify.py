"""Does --verify find what was written wrongly, and nothing else?"""

import dataclasses

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from checkpoints_conv import convert, open_checkpoint
from checkpoints_conv.tree import expected_leaves
from checkpoints_conv.verify import tolerance, verify
from checkpoints_conv.write_gguf import encode
from tests.checkpoints.tiny_checkpoints import random_weights, tiny_config, write_huggingface

DOWN = ("layers_1", "ffn", "down", "kernel")


@pytest.fixture
def source(tmp_path):
    config = tiny_config()
    return write_huggingface(tmp_path / "source", config, random_weights(config))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_tolerances_are_kept_and_not_loose(kind):
    """What the gguf package makes of any values lies within; half of it would not do."""
    rng = np.random.default_rng(0)
    spec = next(iter(expected_leaves(tiny_config()).values()))
    values = rng.standard_normal(spec.shape).astype(np.float32)
    values *= np.exp(rng.uniform(-6, 6, (spec.shape[0], 1))).astype(np.float32)
    values[0] = 0
    blocks = encode(values, dataclasses.replace(spec, kind="embedding"), Type[kind])
    if kind == "F16":
        found = blocks.astype(np.float32)
    else:
        import gguf

        found = gguf.quants.dequantize(blocks, Type[kind])
    difference = np.abs(found - values)
    allowed = tolerance(values, kind)
    assert (difference <= allowed).all()
    assert (difference > allowed / 2).any()


def damage(checkpoint, path, index, factor):
    """The checkpoint with one value of one leaf multiplied."""

    def read_leaves():
        for at, leaf in checkpoint.tensors():
            if at == path:
                leaf = leaf.copy()
                leaf[index] *= factor
            yield at, leaf

    return dataclasses.replace(checkpoint, read_leaves=read_leaves)


def test_one_wrong_value_is_named(source, tmp_path):
    checkpoint = open_checkpoint(source)
    storage = dict.fromkeys(expected_leaves(checkpoint.config), "bfloat16")
    verify(checkpoint, checkpoint, storage)
    verify(checkpoint, damage(checkpoint, DOWN, (5, 7), 1 + 2**-9), storage)
    with pytest.raises(
        ValueError, match=r"'layers_1/ffn/down/kernel' is not what was written: .* of row 7"
    ):
        verify(checkpoint, damage(checkpoint, DOWN, (5, 7), 1.02), storage)
    exact = dict.fromkeys(storage, "exact")
    with pytest.raises(ValueError, match=r"\(exact\)"):
        verify(checkpoint, damage(checkpoint, DOWN, (5, 7), 1 + 2**-9), exact)


def test_nan_and_infinity_are_values_like_others(source):
    checkpoint = open_checkpoint(source)
    storage = dict.fromkeys(expected_leaves(checkpoint.config), "bfloat16")
    for value in (np.nan, np.inf):
        damaged = damage(checkpoint, DOWN, (0, 0), value)
        verify(damaged, damaged, storage)
        with pytest.raises(ValueError, match="is not what was written"):
            verify(checkpoint, damaged, storage)


@pytest.mark.parametrize("format", ["native", "huggingface", "gguf"])
def test_a_failed_check_leaves_nothing(source, tmp_path, format, monkeypatch):
    from checkpoints_conv import converting

    opened = open_checkpoint(source)
    answers = iter([opened, damage(opened, DOWN, (3, 3), 2.0)])
    monkeypatch.setattr(converting, "open_checkpoint", lambda path: next(answers))
    with pytest.raises(ValueError, match="is not what was written"):
        convert(source, tmp_path / "out", format=format, verify=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
