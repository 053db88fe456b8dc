"""Do all forms in which parameters can serve compute the same model?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax import ModelConfig, Transformer, init_params
from helios_jax.model import fuse_params, separate_head
from helios_jax.model.forms import serving_form
from helios_jax.quant import ExpandedWeight, QuantTensor
from tests.model import reference_models
from tests.model.quantised import dequantise, quantise, quantise_linears

CASE = "qwen2_window_unused"  # QKV bias, a head of its own


def logits(model, params, name=CASE):
    return np.asarray(jax.jit(model.apply)(params, reference_models.tokens(name)[None])[0])


def kl(reference_TV, actual_TV) -> float:
    """Mean over tokens of KL(softmax reference || softmax actual), in float64."""

    def logprobs(logits_TV):
        shifted = np.asarray(logits_TV, np.float64) - np.max(logits_TV, axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    p, q = logprobs(reference_TV), logprobs(actual_TV)
    return float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1)))


@pytest.mark.parametrize("dtype, bound", [("bfloat16", 5e-3), ("float32", 1e-9)])
def test_activations_dtype(dtype, bound, load_case, references):
    config, params = load_case(CASE)
    model = Transformer(config, jnp.dtype(dtype))
    tokens = reference_models.tokens(CASE)[None]
    hidden = jax.eval_shape(lambda p: model.apply(p, tokens, method="hidden")[0], params)
    assert hidden.dtype == dtype
    actual = logits(model, params)
    assert actual.dtype == np.float32
    assert kl(references[f"logits/{CASE}"], actual) < bound


@pytest.mark.parametrize("name, tied_table", [("qwen2", True), ("mistral", False)])
def test_quantised_params(name, tied_table, load_case):
    """QuantTensors, split or fused, with the head tied or separate, equal the dense weights."""
    config, params = load_case(name)
    params = quantise_linears(params, embedding=tied_table)
    expected = logits(Transformer(config), dequantise(params), name)
    assert np.max(np.abs(expected - logits(Transformer(config), load_case(name)[1], name))) > 0.1
    np.testing.assert_allclose(logits(Transformer(config), params, name), expected, atol=5e-5)
    fused = fuse_params(params)
    assert isinstance(fused["params"]["layers_0"]["attention"]["qkv"]["kernel"], QuantTensor)
    np.testing.assert_allclose(
        logits(Transformer(config, fused=True), fused, name), expected, atol=5e-5
    )
    head_config, head_params = separate_head(config, params)
    np.testing.assert_allclose(
        logits(Transformer(head_config), head_params, name), expected, atol=5e-5
    )


def test_fusing_keeps_the_codes(load_case):
    params = quantise_linears(load_case("llama2")[1])
    attention = params["params"]["layers_0"]["attention"]
    fused = fuse_params(params)["params"]["layers_0"]
    joined = [attention[name]["kernel"] for name in "qkv"]
    for field in ("packed", "scale", "offset"):
        np.testing.assert_array_equal(
            getattr(fused["attention"]["qkv"]["kernel"], field),
            np.concatenate([getattr(kernel, field) for kernel in joined]),
        )
    assert set(fused["attention"]) == {"qkv", "o"} and set(fused["ffn"]) == {"gate_up", "down"}
    assert set(attention) == {"q", "k", "v", "o"}, "the argument is left as it was"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda kernel: kernel[:-1], r"layers_1/attention/q/kernel has shape \(63, 64\).*\(64, 64"),
        (lambda kernel: quantise(kernel.T[:, :32]), r"q/kernel has shape \(32, 64\).*\(64, 64\)"),
    ],
)
def test_wrong_shapes_are_named(change, message, load_case):
    config, params = load_case("llama2")
    params = jax.tree.map(lambda leaf: leaf, params)
    linear = params["params"]["layers_1"]["attention"]["q"]
    linear["kernel"] = change(linear["kernel"])
    with pytest.raises(ValueError, match=message):
        Transformer(config).apply(params, jnp.zeros((1, 1), jnp.int32))


@pytest.mark.parametrize(
    "dtype, quantised, bound",
    [
        ("float32", False, 1e-9),
        ("float32", True, 1e-9),
        ("bfloat16", False, 5e-3),
        ("bfloat16", True, 5e-3),
        ("int8", False, 5e-3),
        ("int8", True, 5e-3),
        ("int4", True, 1e-9),
    ],
)
def test_serving_form(dtype, quantised, bound, load_case, references):
    config, params = load_case(CASE)
    expected = references[f"logits/{CASE}"]
    if quantised:
        params = quantise_linears(params)
        expected = logits(Transformer(config), dequantise(params))
    form = serving_form(config, params, dtype, platform="cpu")
    assert form.dtype == dtype and form.description
    assert form.cache_dtype == (jnp.float32 if dtype == "float32" else jnp.bfloat16)
    assert form.model.fused and form.model.dtype == jnp.float32
    assert kl(expected, logits(form.model, form.params)) < bound
    kernel = form.params["params"]["layers_0"]["ffn"]["gate_up"]["kernel"]
    if dtype == "int8":
        assert isinstance(kernel, ExpandedWeight)
        # One row at a time runs on the int8 codes.
        tokens = reference_models.tokens(CASE)[:1][None]
        row = jax.jit(form.model.apply)(form.params, tokens)[0]
        assert kl(expected[:1], row) < 3e-2
    elif dtype == "int4":
        assert isinstance(kernel, QuantTensor)
    else:
        assert kernel.dtype == dtype


def test_auto_is_the_platforms_form(load_case):
    config, params = load_case(CASE)
    quantised = quantise_linears(params)
    assert serving_form(config, params, platform="cpu").dtype == "int8"
    assert serving_form(config, params, platform="gpu").dtype == "bfloat16"
    form = serving_form(config, quantised, platform="gpu")
    assert form.dtype == "int4" and form.model.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "dtype, platform, message",
    [
        ("fp8", "cpu", r"dtype='fp8': must be one of \('auto'"),
        ("int8", "gpu", "dtype='int8' on platform 'gpu': .* use 'int4' or 'bfloat16'"),
        ("int4", "cpu", "dtype='int4': this checkpoint holds no quantised weights"),
    ],
)
def test_forms_refused(dtype, platform, message, load_case):
    with pytest.raises(ValueError, match=message):
        serving_form(*load_case(CASE), dtype, platform=platform)


def test_transformer_is_a_static_argument():
    """Equal configurations make one program; any field that differs makes another."""
    traces = []

    def count(model, params, tokens):
        traces.append(model)
        return model.apply(params, tokens)

    jitted = jax.jit(count, static_argnums=0)
    config = ModelConfig(
        architecture="llama", vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1,
        num_heads=2, num_kv_heads=1, head_dim=8, max_model_len=16,
    )  # fmt: skip
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    tokens = jnp.zeros((1, 2), jnp.int32)
    for _ in range(2):
        model = Transformer(ModelConfig.from_dict(config.to_dict()))
        assert model == Transformer(config) and hash(model) == hash(Transformer(config))
        jitted.lower(model, params, tokens)
    assert len(traces) == 1
    changed = Transformer(dataclasses.replace(config, sliding_window=1))
    assert changed != Transformer(config)
    jitted.lower(changed, params, tokens)
    assert len(traces) == 2
    assert Transformer(config, jnp.bfloat16) != Transformer(config)
