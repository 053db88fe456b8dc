"""Do checkpoints that other tools wrote give those tools' weights and transformers' logits?

`tests/data/quantised/write.py` says how the files were made. Written by AutoAWQ 0.2.9, AutoGPTQ
0.7.1, GPTQModel 7.7.0 and compressed-tensors 0.20.1; logits by transformers, torch 2.13.0.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from checkpoints_conv import convert, open_checkpoint, read_params
from checkpoints_conv.tree import leaf_nbytes
from helios_jax.model import Transformer
from helios_jax.model.forms import serving_form
from helios_jax.quant import FLOAT8, QuantTensor
from tests.checkpoints.tiny_checkpoints import assert_same_leaves
from tests.checkpoints.tiny_quantised import FIXTURES, copy_fixture

K_PROJ = ("layers_0", "attention", "k", "kernel")
DOWN = ("layers_1", "ffn", "down", "kernel")
# bits, group size of K_PROJ (64 inputs), explicit zero points, act-order
FORMS = {
    "autoawq": (4, 32, True, False),
    "auto_gptq_4bit": (4, 32, True, False),
    "auto_gptq_3bit": (3, 32, True, False),
    "gptqmodel_v1": (4, 32, True, False),
    "gptqmodel_v2_act_order": (4, 32, True, True),
    "gptqmodel_8bit_sym": (8, 32, False, False),
    "compressed_w4a16": (4, 32, False, False),
    "compressed_w4a16_asym": (4, 32, True, False),
    "compressed_int8": (8, 64, False, False),
    "compressed_fp8": (8, 64, False, False),
}


def reference(name):
    return safetensors.numpy.load_file(FIXTURES / name / "reference.safetensors")


@pytest.fixture
def folder(tmp_path, name):
    """The fixture without the reference, and with a tokenizer, as `convert` wants one."""
    return copy_fixture(name, tmp_path / "source")


@pytest.mark.parametrize("name", FORMS)
def test_the_tool_is_recorded(name):
    with safetensors.safe_open(FIXTURES / name / "model.safetensors", "numpy") as file:
        tool, version = file.metadata()["written_by"].split()
    assert (tool, version) in {
        ("autoawq", "0.2.9"),
        ("auto-gptq", "0.7.1"),
        ("gptqmodel", "7.7.0"),
        ("compressed-tensors", "0.20.1"),
    }


@pytest.mark.parametrize("name", FORMS)
def test_forms_and_weights(name):
    checkpoint = open_checkpoint(FIXTURES / name)
    leaves = dict(checkpoint.tensors())
    quantised = [leaf for leaf in leaves.values() if isinstance(leaf, QuantTensor)]
    assert len(quantised) == 14
    bits, group_size, has_zeros, act_order = FORMS[name]
    k_proj = leaves[K_PROJ]
    assert (k_proj.bits, k_proj.group_size) == (bits, group_size)
    assert (k_proj.zero is not None) is has_zeros and k_proj.offset is None
    assert (k_proj.perm is not None) is act_order
    assert (k_proj.packed.dtype == FLOAT8) is (name == "compressed_fp8")
    expected = reference(name)
    # The tools multiply in float16 in part: one rounding of a product.
    for path, key in ((K_PROJ, "layers.0.self_attn.k_proj"), (DOWN, "layers.1.mlp.down_proj")):
        np.testing.assert_allclose(
            leaves[path].dequantize(), expected[f"weight.{key}"], rtol=2**-10, atol=1e-6
        )
    assert checkpoint.nbytes == sum(map(leaf_nbytes, leaves.values()))


@pytest.mark.parametrize("name", FORMS)
def test_logits_of_transformers(name):
    checkpoint = open_checkpoint(FIXTURES / name)
    expected = reference(name)
    form = serving_form(checkpoint.config, read_params(checkpoint), "float32")
    tokens = jnp.asarray(expected["tokens"], jnp.int32)[None]
    logits = form.model.apply(form.params, tokens)
    logits = logits[0] if isinstance(logits, tuple) else logits
    np.testing.assert_allclose(logits[0], expected["logits"], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["gptqmodel_v2_act_order", "auto_gptq_3bit", "compressed_fp8"])
def test_unexpanded_weights_give_the_same_logits(name):
    """The weights as stored, through `matmul`: inputs gathered where there is an act-order."""
    checkpoint = open_checkpoint(FIXTURES / name)
    expected = reference(name)
    params = jax.tree.map(
        lambda leaf: leaf if isinstance(leaf, QuantTensor) else jnp.asarray(leaf, jnp.float32),
        read_params(checkpoint),
        is_leaf=lambda leaf: isinstance(leaf, QuantTensor),
    )
    tokens = jnp.asarray(expected["tokens"], jnp.int32)[None]
    logits = Transformer(checkpoint.config, jnp.float32).apply(params, tokens)
    logits = logits[0] if isinstance(logits, tuple) else logits
    np.testing.assert_allclose(logits[0], expected["logits"], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", FORMS)
def test_native_keeps_every_bit(name, folder, tmp_path):
    convert(folder, tmp_path / "native")
    native = open_checkpoint(tmp_path / "native")
    source = open_checkpoint(folder)
    assert_same_leaves(native.tensors(), source.tensors())
    assert native.config == source.config
    manifest = json.loads((tmp_path / "native" / "manifest.json").read_text())
    assert manifest["source"]["format"] == source.format
    if name == "compressed_fp8":
        np.testing.assert_array_equal(native.kv_scales.k_LK, source.kv_scales.k_LK)
        np.testing.assert_array_equal(native.kv_scales.v_LK, source.kv_scales.v_LK)
    else:
        assert native.kv_scales is None


def test_kv_scales_of_an_fp8_checkpoint():
    scales = open_checkpoint(FIXTURES / "compressed_fp8").kv_scales
    assert scales is not None
    stored = safetensors.safe_open(FIXTURES / "compressed_fp8" / "model.safetensors", "numpy")
    for kind, array in (("k", scales.k_LK), ("v", scales.v_LK)):
        assert array.dtype == np.float32
        expected = [
            np.float32(stored.get_tensor(f"model.layers.{i}.self_attn.{kind}_scale"))
            for i in range(2)
        ]
        np.testing.assert_array_equal(array, np.repeat(expected, 2, axis=1))
