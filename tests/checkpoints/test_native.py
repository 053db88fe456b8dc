"""Does a native checkpoint give back every bit, and is every damage to it named?"""

import dataclasses
import hashlib
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from checkpoints_conv import convert, open_checkpoint
from checkpoints_conv.native import (
    _leaf_sum,
    _restore_group,
    _save_group,
    open_native,
    write_native,
)
from helios_jax.config import RopeConfig
from helios_jax.quant import QuantTensor
from tests.checkpoints.tiny_checkpoints import (
    assert_same_leaves,
    random_weights,
    tiny_config,
    write_gguf,
    write_huggingface,
)

Q = "layers_1/attention/q/kernel"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A native checkpoint of a Q4_1 model with a dense embedding."""
    folder = tmp_path_factory.mktemp("native")
    config = tiny_config()
    write_gguf(folder / "m.gguf", config, random_weights(config), Type.Q4_1)
    convert(folder / "m.gguf", folder / "model")
    return folder / "model"


@pytest.fixture
def folder(good, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(good, tmp_path / "model")


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flip(path, offset=-20):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def refusal(folder):
    """What reading all of it says."""
    with pytest.raises(ValueError) as error:
        checkpoint = open_checkpoint(folder)
        list(checkpoint.tensors())
    assert str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q4_0, Type.Q8_0, Type.F16, Type.F32])
def test_gguf_round_trip(tmp_path, kind):
    config = tiny_config(rope=RopeConfig(theta=1e5), qkv_bias=True)
    source = write_gguf(
        tmp_path / "m.gguf",
        config,
        random_weights(config),
        kind,
        metadata={"general.sampling.temp": 0.5, "tokenizer.chat_template": "{{ messages }}"},
    )
    convert(source, tmp_path / "model")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "model")
    assert after.format == "native"
    assert (after.config, after.generation) == (before.config, {"temperature": 0.5})
    assert (after.num_tensors, after.nbytes) == (before.num_tensors, before.nbytes)
    assert list(dict(after.tensors())) == list(dict(before.tensors()))
    assert_same_leaves(after.tensors(), before.tensors())
    assert after.tokenizer.fingerprint() == before.tokenizer.fingerprint()
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    described = after.describe_source()
    assert described["format"] == "gguf" and described["files"][0]["name"] == "m.gguf"
    assert len(described["files"][0]["sha256"]) == 64


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_huggingface_round_trip(tmp_path, dtype):
    config = tiny_config("qwen3", qk_norm=True, tie_word_embeddings=True, head_dim=32)
    source = write_huggingface(tmp_path / "hf", config, random_weights(config), dtype, num_shards=2)
    convert(source, tmp_path / "model")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "model")
    assert after.config == before.config == config
    assert_same_leaves(after.tensors(), before.tensors())
    names = [file["name"] for file in after.describe_source()["files"]]
    assert names == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def test_native_to_native_keeps_everything(good, tmp_path):
    convert(good, tmp_path / "copy")
    before, after = open_checkpoint(good), open_checkpoint(tmp_path / "copy")
    assert_same_leaves(after.tensors(), before.tensors())
    assert after.describe_source() == before.describe_source()
    assert {leaf["kind"] for leaf in manifest(good)["leaves"].values()} == {"quant", "array"}


def test_zero_points_and_odd_statics_survive(good, tmp_path):
    """What GPTQ and AWQ will bring: zero points, another span, group and implicit zero."""
    source = open_checkpoint(good)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (64, 32), np.uint8)
    scale = rng.standard_normal((64, 1)).astype(ml_dtypes.bfloat16)
    zero = rng.integers(-1, 16, (64, 1)).astype(np.int16)
    leaves = dict(source.tensors())
    leaves["layers_0", "attention", "q", "kernel"] = QuantTensor(
        codes, scale, zero, group_size=64, span=64
    )
    leaves["layers_1", "attention", "q", "kernel"] = QuantTensor(
        codes, scale, group_size=64, span=32, implicit_zero=7
    )
    changed = dataclasses.replace(source, read_leaves=lambda: iter(leaves.items()))
    (tmp_path / "model").mkdir()
    write_native(tmp_path / "model", changed)
    assert_same_leaves(open_native(tmp_path / "model").tensors(), leaves)


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_manifest_describes_a_leaf(good):
    entry = manifest(good)["leaves"][Q]
    assert entry["kind"] == "quant"
    assert entry["statics"] == {"bits": 4, "group_size": 32, "span": 32, "implicit_zero": 8}
    assert entry["arrays"] == {
        "packed": {"dtype": "uint8", "shape": [64, 32]},
        "scale": {"dtype": "float16", "shape": [64, 2]},
        "offset": {"dtype": "float16", "shape": [64, 2]},
    }


def test_no_pickle_and_no_stray_files(good):
    names = {path.name for path in good.iterdir()}
    assert names == {"config.json", "generation.json", "manifest.json", "params", "tokenizer"}
    groups = {path.name for path in (good / "params").iterdir()}
    assert groups == {"embed", "layers_0", "layers_1", "final_norm", "lm_head"}


@pytest.mark.parametrize(
    ("static", "value", "message"),
    [
        ("bits", 8, "packed has dtype uint8: 8-bit codes are stored as int8"),
        ("bits", 5, "bits=5: must be one of (3, 4, 8)"),
        ("bits", 3, "packed has 32 bytes a row: 3-bit codes come in spans of 12 bytes"),
        ("group_size", 64, "scale has shape (64, 2): one per group needs (64, 1)"),
        ("group_size", 0, "group_size=0 does not divide"),
        ("group_size", "32", "group_size='32': must be an integer"),
        ("span", 16, "span=16: must be one of (32, 64)"),
        # These two fit the arrays: only the sum can tell.
        ("span", 64, "does not match its sum"),
        ("implicit_zero", 7, "does not match its sum"),
    ],
)
def test_wrong_static(folder, static, value, message):
    edit(folder / "manifest.json", lambda m: m["leaves"][Q]["statics"].update({static: value}))
    found = refusal(folder)
    assert Q in found and message in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format_version=2), "format_version=2: this version reads 1"),
        (lambda m: m.update(format="other"), "format='other': this version reads 'helios-jax'"),
        (lambda m: m.update(leaves=[]), "leaves=[]: must be an object"),
        (lambda m: m.pop("files"), "files=None: must be an object"),
        (lambda m: m["files"].pop("config.json"), "has no sum for the file 'config.json'"),
        (lambda m: m["leaves"].pop(Q), f"parameter '{Q}' is missing"),
        (lambda m: m["leaves"].update(x={}), "parameter 'x' is not part of the configured model"),
        (lambda m: m["leaves"].update({Q: 3}), "kind=None: must be 'array' or 'quant'"),
        (lambda m: m["leaves"][Q].update(kind="array"), "must be some of ('value',)"),
        (lambda m: m["leaves"][Q].pop("statics"), "statics=None: must be"),
        (lambda m: m["leaves"][Q]["arrays"].pop("scale"), "must be some of ('packed', 'scale'"),
        (lambda m: m["leaves"][Q]["arrays"].pop("offset"), "is stored as"),
        (lambda m: m["leaves"][Q]["arrays"]["scale"].update(dtype="object"), "dtype 'object'"),
        (
            lambda m: m["leaves"][Q]["arrays"]["scale"].update(dtype="int16"),
            "scale has dtype int16",
        ),
        (lambda m: m["leaves"][Q]["arrays"]["scale"].update(dtype="float32"), "is stored as"),
        (lambda m: m["leaves"][Q]["arrays"]["packed"].update(shape=[32, 32]), "needs (32, 2)"),
        (lambda m: m["leaves"][Q]["arrays"]["packed"].update(shape=[2**62] * 2), "has shape ["),
        (lambda m: m["leaves"][Q]["arrays"]["packed"].update(shape=[64]), "needs arrays of two"),
        (lambda m: m["leaves"][Q].update(sha256="0" * 64), "does not match its sum"),
    ],
)
def test_damaged_manifest(folder, change, message):
    edit(folder / "manifest.json", change)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "config.json",
        "generation.json",
        "tokenizer/tokenizer.json",
        "params/layers_1",
    ],
)
def test_missing_parts(folder, name):
    part = folder / name
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    found = refusal(folder)
    assert str(part) in found and ("is missing" in found or "are missing" in found)


@pytest.mark.parametrize("name", ["config.json", "generation.json", "tokenizer/tokenizer.json"])
def test_one_changed_byte_in_a_small_file(folder, name):
    flip(folder / name, -2)
    found = refusal(folder)
    assert str(folder / name) in found and "does not match its sum in manifest.json" in found


def test_one_changed_byte_in_the_parameters(folder):
    files = [path for path in (folder / "params" / "layers_1" / "d").iterdir()]
    flip(max(files, key=lambda path: path.stat().st_size))
    assert str(folder / "params" / "layers_1") in refusal(folder)


def test_exchanged_layers(folder):
    """Each folder alone is sound: only the sums can tell."""
    params = folder / "params"
    (params / "layers_0").rename(params / "aside")
    (params / "layers_1").rename(params / "layers_0")
    (params / "aside").rename(params / "layers_1")
    assert "parameter 'layers_0/attention_norm/scale': does not match its sum" in refusal(folder)


def test_incomplete_and_foreign_parameters(folder):
    """Orbax folders of fewer arrays, and of more, than the manifest lists."""
    group = folder / "params" / "layers_1"
    tree = _restore_group(group)
    kernel = tree["attention"]["q"].pop("kernel")
    _save_group(folder / "params" / "fewer", tree)
    tree["attention"]["q"]["kernel"] = kernel
    tree["attention"]["q"]["extra"] = np.zeros(3, np.float32)
    _save_group(folder / "params" / "more", tree)
    group.rename(folder / "params" / "aside")
    (folder / "params" / "fewer").rename(group)
    assert f"parameter '{Q}' is stored as {{}}" in refusal(folder)
    group.rename(folder / "params" / "fewer")
    (folder / "params" / "more").rename(group)
    assert "holds parameters that manifest.json does not list: ['attention']" in refusal(folder)


def test_configuration_that_does_not_fit_the_parameters(folder):
    def change(content):
        content["model"]["num_kv_heads"] = 4

    edit(folder / "config.json", change)
    digest = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    edit(folder / "manifest.json", lambda m: m["files"].update({"config.json": digest}))
    assert "parameter 'layers_0/attention/k/kernel' has (out, in) shape (32, 64)" in refusal(folder)


def test_sums_cover_the_description(good):
    """The same bytes under another dtype, shape or static have another sum."""
    entry = manifest(good)["leaves"][Q]
    leaf = dict(open_checkpoint(good).tensors())[tuple(Q.split("/"))]
    arrays = {name: getattr(leaf, name) for name in ("packed", "scale", "offset")}
    assert _leaf_sum(entry, arrays) == entry["sha256"]
    other = json.loads(json.dumps(entry))
    other["arrays"]["packed"]["shape"] = [32, 64]
    assert _leaf_sum(other, arrays) != entry["sha256"]


def test_embedded_model_round_trip(smollm2_gguf_path, tmp_path):
    convert(smollm2_gguf_path, tmp_path / "model")
    before, after = open_checkpoint(smollm2_gguf_path), open_checkpoint(tmp_path / "model")
    assert after.config == before.config
    assert after.tokenizer.fingerprint() == before.tokenizer.fingerprint()
    for (path, found), (expected_path, expected) in zip(
        after.tensors(), before.tensors(), strict=True
    ):
        assert_same_leaves([(path, found)], [(expected_path, expected)])
    source = after.describe_source()["files"][0]
    expected = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert source["sha256"] == expected
