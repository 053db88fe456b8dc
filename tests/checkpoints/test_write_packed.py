"""Do written AWQ and GPTQ folders hold the very bits that were read?"""

import json

import numpy as np
import pytest
import safetensors.numpy
from gguf import GGMLQuantizationType as Type

from checkpoints_conv import convert, open_checkpoint
from tests.checkpoints.tiny_checkpoints import (
    assert_same_bits,
    assert_same_leaves,
    random_weights,
    tiny_config,
    write_gguf,
    write_huggingface,
)
from tests.checkpoints.tiny_quantised import AWQ, GROUP, copy_fixture, stored_tensors

KEPT = ("qweight", "qzeros", "scales", "g_idx")


def settings(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("autoawq", "awq"),
        ("auto_gptq_4bit", "gptq"),
        ("auto_gptq_3bit", "gptq"),
        ("gptqmodel_v2_act_order", "gptq"),
        ("gptqmodel_8bit_sym", "gptq"),
    ],
)
def test_a_tool_s_file_comes_back_bit_for_bit(tmp_path, name, format):
    """Tool -> native -> the tool's format: packed values, zeros, scales and order."""
    source = copy_fixture(name, tmp_path / "source")
    convert(source, tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "out", format=format, verify=True)
    before, after = stored_tensors(source), stored_tensors(tmp_path / "out")
    assert before.keys() - after.keys() == set()
    assert {name.rpartition(".")[2] for name in after.keys() - before.keys()} <= {"g_idx"}
    for tensor, array in before.items():
        assert_same_bits(after[tensor], array)
    stated, written = settings(source), settings(tmp_path / "out")
    assert [written[key] for key in ("bits", "group_size")] == [4 if "4" in name else
        written["bits"], GROUP]  # fmt: skip
    assert written.get("sym", False) == stated.get("sym", False)
    assert written.get("desc_act") == stated.get("desc_act")
    assert written.get("checkpoint_format") == (
        stated.get("checkpoint_format", "gptq") if format == "gptq" else None
    )
    assert_same_leaves(
        open_checkpoint(tmp_path / "out").tensors(), open_checkpoint(source).tensors()
    )


def test_zero_points_of_zero_need_version_2(tmp_path):
    source = copy_fixture("gptqmodel_v1", tmp_path / "source")
    convert(source, tmp_path / "out", format="gptq", verify=True)
    assert settings(tmp_path / "out")["checkpoint_format"] == "gptq_v2"
    leaves = dict(open_checkpoint(source).tensors())
    assert any(leaf.zero.min() == 0 for leaf in leaves.values() if hasattr(leaf, "zero"))
    assert_same_leaves(open_checkpoint(tmp_path / "out").tensors(), leaves)


def test_awq_through_gptq_and_back(tmp_path):
    source = copy_fixture("autoawq", tmp_path / "a")
    convert(source, tmp_path / "b", format="gptq", verify=True)
    convert(tmp_path / "b", tmp_path / "c", format="awq", verify=True)
    for tensor, array in stored_tensors(source).items():
        assert_same_bits(stored_tensors(tmp_path / "c")[tensor], array)
    assert settings(tmp_path / "c") == AWQ | {
        "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    }


@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_gguf_q4_0(tmp_path, format):
    """Symmetric weights of group 32; a quantised embedding and head become float16."""
    config = tiny_config()
    source = write_gguf(tmp_path / "m.gguf", config, random_weights(config), Type.Q4_0)
    convert(source, tmp_path / "out", format=format, verify=True)
    written = settings(tmp_path / "out")
    assert (written["bits"], written["group_size"]) == (4, 32)
    assert written.get("sym", True) is True
    packed_head = format == "gptq"
    assert written.get("lm_head", False) is packed_head
    leaves = dict(open_checkpoint(source).tensors())
    for path, leaf in open_checkpoint(tmp_path / "out").tensors():
        if path[0] == "embed" or (path[0] == "lm_head" and not packed_head):
            assert leaf.dtype == np.float16
        elif hasattr(leaf, "packed"):
            np.testing.assert_array_equal(leaf.dequantize(), leaves[path].dequantize())
        else:
            assert_same_bits(leaf, leaves[path])


def test_dense_linears_are_named(tmp_path):
    source = copy_fixture("autoawq", tmp_path / "source")
    tensors, module = stored_tensors(source), "model.layers.1.mlp.down_proj"
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[f"{module}.{suffix}"]
    tensors[f"{module}.weight"] = np.ones((64, 96), np.float16)
    safetensors.numpy.save_file(tensors, source / "model.safetensors")
    for format in ("awq", "gptq"):
        convert(source, tmp_path / format, format=format, verify=True)
        assert_same_leaves(
            [item for item in open_checkpoint(tmp_path / format).tensors()],
            [item for item in open_checkpoint(source).tensors()],
        )
    assert settings(tmp_path / "awq")["modules_to_not_convert"] == [module, "lm_head"]
    assert settings(tmp_path / "gptq")["dynamic"] == {"-:model\\.layers\\.1\\.mlp\\.down_proj$": {}}


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("gptqmodel_v2_act_order", "awq", "q/kernel' has an act-order, which AWQ has no place"),
        ("auto_gptq_3bit", "awq", "q/kernel' holds 3-bit codes: AWQ has (4,) bits; requantise"),
        ("compressed_fp8", "gptq", "q/kernel' holds FP8 codes: GPTQ has (3, 4, 8) bits"),
    ],
)
def test_what_a_format_cannot_hold(tmp_path, name, format, message):
    source = copy_fixture(name, tmp_path / "source")
    with pytest.raises(ValueError) as error:
        convert(source, tmp_path / "out", format=format)
    assert str(source) in str(error.value) and message in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["awq", "gptq"])
def test_float_offsets_and_dense_models(tmp_path, format):
    config = tiny_config()
    weights = random_weights(config)
    source = write_gguf(tmp_path / "m.gguf", config, weights, Type.Q4_1)
    with pytest.raises(ValueError, match=r"has float offsets \(GGUF Q4_1\).*requantise"):
        convert(source, tmp_path / "out", format=format)
    write_huggingface(tmp_path / "dense", config, weights)
    with pytest.raises(ValueError, match=r"has no quantised linear .*quantise it first"):
        convert(tmp_path / "dense", tmp_path / "out", format=format)


def test_the_manifest_names_the_source_and_sums_the_tensors(tmp_path):
    source = copy_fixture("autoawq", tmp_path / "source")
    convert(source, tmp_path / "out", format="awq")
    manifest = json.loads((tmp_path / "out" / "helios_manifest.json").read_text())
    assert manifest["format"] == "awq" and manifest["source"]["format"] == "awq"
    assert manifest["tensors"].keys() == stored_tensors(tmp_path / "out").keys()
    assert all(len(entry["sha256"]) == 64 for entry in manifest["tensors"].values())
