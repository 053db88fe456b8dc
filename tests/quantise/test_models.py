"""Are whole models quantised as asked, layer by layer, and resumed to the same bits?"""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_conv import open_checkpoint, read_params, write_checkpoint
from helios_jax.calibrate import (
    DEFAULT_RULES,
    Recipe,
    Reference,
    Rule,
    cut_windows,
    load_calibration,
    quantize,
    quantize_layer,
    score,
)
from helios_jax.calibrate.layerwise import STAGES, Layer, fold_scales
from helios_jax.calibrate.quantizing import in_features
from helios_jax.calibrate.workspace import workspace
from helios_jax.model import Transformer, init_params
from helios_jax.model.blockwise import run_block
from helios_jax.model.forms import serving_form
from helios_jax.quant import GptqOptions, QuantTensor, Scheme
from tests import tiny
from tests.quantise.conftest import make_checkpoint
from tests.quantise.interruption import equal, kill_and_resume

SIZES = dict(hidden_size=64, intermediate_size=128, head_dim=16)


def calibration_of(checkpoint, text_file):
    return load_calibration(
        [text_file], checkpoint.tokenizer, num_sequences=8, sequence_length=64, held_out=0.2
    )


def quantized(source, recipe, text_file, folder) -> dict:
    checkpoint = open_checkpoint(source)
    calibration = calibration_of(checkpoint, text_file)
    leaves = quantize(checkpoint, recipe, calibration, folder)
    return {"/".join(path): leaf for path, leaf in leaves()}


def as_params(leaves: dict) -> dict:
    tree: dict = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return {"params": tree}


def held_out_scores(source, text_file, leaves: dict):
    """Scores on the held-out windows against the source."""
    checkpoint = open_checkpoint(source)
    calibration = calibration_of(checkpoint, text_file)
    tokens = [token for unit in calibration.held_out for token in unit]
    windows = cut_windows(tokens, 64, 64)
    original = serving_form(checkpoint.config, read_params(checkpoint), "float32")
    form = serving_form(checkpoint.config, as_params(leaves), "float32")
    reference = Reference(original.model, original.params, windows)
    return score(form.model, form.params, windows, reference)


# What comes out


@pytest.mark.parametrize("method", ("awq", "gptq"))
def test_data_helps(source, text_file, tmp_path, method):
    """On held-out text both methods are nearer to the source than rounding to nearest."""
    scheme = Scheme(3, 32, "full")
    nearest = quantized(source, Recipe("rtn", scheme), text_file, tmp_path / "rtn")
    better = quantized(source, Recipe(method, scheme), text_file, tmp_path / method)
    kl = [held_out_scores(source, text_file, leaves).kl for leaves in (nearest, better)]
    assert kl[1] < 0.8 * kl[0]


def test_every_linear_is_quantised_and_nothing_else(source, text_file, tmp_path):
    leaves = quantized(source, Recipe("gptq", Scheme(4, 64)), text_file, tmp_path / "work")
    original = dict(open_checkpoint(source).tensors())
    assert [*leaves] == ["/".join(path) for path in original]
    for path, before in original.items():
        leaf = leaves["/".join(path)]
        if path[-1] == "kernel":
            assert isinstance(leaf, QuantTensor)
            assert (leaf.bits, leaf.group_size, leaf.perm) == (4, 64, None)
            assert (leaf.in_features, leaf.out_features) == before.shape
        else:
            np.testing.assert_array_equal(leaf, before)


def test_rules_choose_per_linear_and_the_last_match_counts(source, text_file, tmp_path):
    scheme = Scheme(4, 32)
    texts = ["*/ffn/down=8", "layers_1/*=3:64", "layers_1/attention/v=skip", "embed=8"]
    rules = (*DEFAULT_RULES, *(Rule.parse(text, scheme) for text in texts))
    leaves = quantized(source, Recipe("awq", scheme, rules), text_file, tmp_path / "work")

    def form(name):
        leaf = leaves[name]
        return (leaf.bits, leaf.group_size) if isinstance(leaf, QuantTensor) else "dense"

    assert form("layers_0/ffn/down/kernel") == (8, 32)
    assert form("layers_0/attention/q/kernel") == (4, 32)
    assert form("layers_1/ffn/down/kernel") == (3, 64)
    assert form("layers_1/attention/v/kernel") == "dense"
    assert form("layers_1/attention/k/kernel") == (3, 64)
    assert form("embed/embedding") == (8, 32)
    # q, k and v share their inputs: with one of them skipped, none is scaled.
    norms = [dict(open_checkpoint(source).tensors())["layers_1", "attention_norm", "scale"],
             leaves["layers_1/attention_norm/scale"]]  # fmt: skip
    np.testing.assert_array_equal(*norms)
    scores = held_out_scores(source, text_file, leaves)
    assert 0 < scores.kl < 0.5


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_kv_heads=1, qkv_bias=True, attention_output_bias=True, mlp_bias=True),
        dict(num_kv_heads=4, qk_norm=True, tie_word_embeddings=False, activation="gelu"),
    ],
)
def test_folding_awq_scales_changes_nothing_but_rounding(tmp_path, text_file, changes):
    """At 8 bits AWQ's scales are large and its rounding small: no worse than rounding alone."""
    source = make_checkpoint(tmp_path / "model", **SIZES, **changes)
    nearest, leaves = (
        quantized(source, Recipe(method, Scheme(8, 32)), text_file, tmp_path / method)
        for method in ("rtn", "awq")
    )
    original = dict(open_checkpoint(source).tensors())
    before = original["layers_0", "ffn_norm", "scale"]
    assert np.abs(np.log(leaves["layers_0/ffn_norm/scale"] / before)).max() > 0.1
    kl = [held_out_scores(source, text_file, found).kl for found in (nearest, leaves)]
    assert kl[1] < 1.2 * kl[0] < 5e-3


def test_a_quantised_head(tmp_path, text_file):
    """Rules may take an untied head along; a tied one is the embedding."""
    scheme = Scheme(4, 32)
    rules = (*DEFAULT_RULES, Rule.parse("lm_head=8", scheme))
    source = make_checkpoint(tmp_path / "model", **SIZES, tie_word_embeddings=False)
    leaves = quantized(source, Recipe("rtn", scheme, rules), text_file, tmp_path / "work")
    assert leaves["lm_head/kernel"].bits == 8
    assert not isinstance(leaves["embed/embedding"], QuantTensor)
    tied = in_features(tiny.config(**SIZES))
    with pytest.raises(ValueError, match="'lm_head': matches no linear; this model's head is its"):
        Recipe("rtn", scheme, rules).check(tied)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.linears[0])
@pytest.mark.parametrize(
    "changes", [dict(num_kv_heads=2), dict(num_kv_heads=4, activation="gelu", qk_norm=True)]
)
def test_folding_alone_changes_nothing(stage, changes):
    """Before anything is rounded: the layer with scales folded in computes what it did."""
    config = tiny.config(**SIZES, **changes, qkv_bias=True, mlp_bias=True)
    params = init_params(config, jax.random.key(0))["params"]["layers_0"]
    params = jax.tree.map(lambda leaf: leaf + 0.1 if leaf.ndim == 1 else leaf, params)
    hidden_BTD = np.random.default_rng(0).standard_normal((2, 32, 64)).astype(np.float32)
    hidden_BTD[..., 5] *= 30
    run = jax.jit(run_block, static_argnums=0)
    before = run(config, params, hidden_BTD)
    layer = Layer(config, params)
    statistics = layer.collect(stage.linears[0], [hidden_BTD])
    schemes = {linear: Scheme(3, 32) for linear in stage.linears}
    scaled, alpha = fold_scales(layer, stage, schemes, statistics)
    assert alpha > 0
    np.testing.assert_allclose(run(config, layer.dense, hidden_BTD), before, atol=2e-5)
    again = layer.collect(stage.linears[0], [hidden_BTD])
    np.testing.assert_allclose(again.magnitude_K, scaled.magnitude_K, rtol=1e-4)
    np.testing.assert_allclose(again.moment_KK, scaled.moment_KK, rtol=1e-3, atol=1e-5)


def test_an_identity_scale_layer_matches_the_full_model(source):
    """`advance` over both layers and the final norm is the model's own forward pass."""
    from helios_jax.calibrate import advance

    checkpoint = open_checkpoint(source)
    params = read_params(checkpoint)
    tokens_BT = np.arange(24).reshape(2, 12)
    model = Transformer(checkpoint.config)
    variables = jax.tree.map(jnp.asarray, params)
    expected = jax.jit(partial(model.apply, method="hidden"))(variables, tokens_BT)[0]
    tree = params["params"]
    hidden = np.array(tree["embed"]["embedding"][tokens_BT])
    for layer in ("layers_0", "layers_1"):
        advance(checkpoint.config, tree[layer], [hidden[:1], hidden[1:]])
    normed = model.apply(
        variables, jnp.asarray(hidden), method=lambda module, h: module.final_norm(h)
    )
    np.testing.assert_allclose(normed, expected, rtol=2e-5, atol=2e-5)


def test_a_researcher_may_quantise_one_layer(source):
    checkpoint = open_checkpoint(source)
    tree = read_params(checkpoint)["params"]
    hidden = np.random.default_rng(0).standard_normal((4, 16, 64)).astype(np.float32)
    recipe = Recipe("gptq", Scheme(4, 32), gptq=GptqOptions(act_order=False))
    result = quantize_layer("layers_1", checkpoint.config, tree["layers_1"], recipe, [hidden])
    assert {*result.errors} == {
        *(f"attention/{name}" for name in "qkvo"), "ffn/gate", "ffn/up", "ffn/down",
    }  # fmt: skip
    assert all(0 < error < 0.05 for error in result.errors.values()), result.errors
    # The caller's tree is not touched.
    assert not isinstance(tree["layers_1"]["ffn"]["down"]["kernel"], QuantTensor)


# What is refused


def test_recipes_that_do_not_fit(source):
    channels = in_features(open_checkpoint(source).config)
    with pytest.raises(ValueError, match="layers_0/attention/q: group_size=128 does not divide"):
        Recipe("rtn", Scheme(4, 128)).check(channels)
    with pytest.raises(ValueError, match="rule 'lm_haed': matches no linear; names are like embed"):
        Recipe("rtn", Scheme(4, 64), (Rule("lm_haed", None),)).check(channels)
    with pytest.raises(ValueError, match="method='nf4': must be one of"):
        Recipe("nf4")
    for text in ("down", "=8", "down=5", "down=8:48", "down=all"):
        with pytest.raises(ValueError, match=f"rule '{text}': must be PATTERN=skip"):
            Rule.parse(text, Scheme())


def test_weights_that_are_not_finite_are_named(source):
    checkpoint = open_checkpoint(source)
    layer = read_params(checkpoint)["params"]["layers_0"]
    layer["ffn"]["up"]["kernel"][3, 4] = np.nan
    with pytest.raises(ValueError, match="layers_0/ffn/up: its weights are not finite"):
        quantize_layer("layers_0", checkpoint.config, layer, Recipe("rtn", Scheme(4, 32)), [])
    layer["ffn"]["up"]["kernel"][3, 4] = 1e6
    with pytest.raises(ValueError, match="layers_0/ffn/up: its largest weight is 1e.06: scales"):
        quantize_layer("layers_0", checkpoint.config, layer, Recipe("rtn", Scheme(4, 32)), [])


def test_inputs_that_are_not_finite_are_named(source):
    checkpoint = open_checkpoint(source)
    layer = read_params(checkpoint)["params"]["layers_0"]
    layer["ffn_norm"]["scale"][3] = 1e30
    hidden = np.ones((1, 8, 64), np.float32)
    recipe = Recipe("gptq", Scheme(4, 32))
    with pytest.raises(ValueError, match="layers_0/ffn/gate: its inputs are not finite"):
        quantize_layer("layers_0", checkpoint.config, layer, recipe, [hidden])


def test_calibration_is_asked_for(source, tmp_path):
    with pytest.raises(ValueError, match="method='awq': needs calibration text"):
        quantize(open_checkpoint(source), Recipe("awq", Scheme(4, 32)), None, tmp_path / "work")


# Interruption


class Stop(Exception):
    pass


@pytest.mark.parametrize("method", ("rtn", "awq", "gptq"))
def test_stopped_at_any_stage_it_resumes_to_the_same_bits(source, text_file, tmp_path, method):
    recipe = Recipe(method, Scheme(4, 32))
    whole = quantized(source, recipe, text_file, tmp_path / "whole")
    checkpoint = open_checkpoint(source)
    calibration = calibration_of(checkpoint, text_file)
    calls = itertools.count()
    stops = iter((3, 6, 10, 12, 20))
    limit = next(stops)
    interruptions = 0

    def progress(name, done, total):
        nonlocal limit
        if next(calls) == limit:
            limit = next(stops, -1)
            raise Stop

    while True:
        try:
            leaves = quantize(checkpoint, recipe, calibration, tmp_path / "work", progress)
            break
        except Stop:
            interruptions += 1
    assert interruptions >= 3
    assert equal(whole, {"/".join(path): leaf for path, leaf in leaves()})


def test_another_recipe_starts_afresh(source, text_file, tmp_path):
    quantized(source, Recipe("gptq", Scheme(4, 32)), text_file, tmp_path / "work")
    found = quantized(source, Recipe("gptq", Scheme(3, 32)), text_file, tmp_path / "work")
    whole = quantized(source, Recipe("gptq", Scheme(3, 32)), text_file, tmp_path / "whole")
    assert equal(found, whole)


def test_one_process_at_a_time(tmp_path):
    with workspace(tmp_path / "work", {"a": 1}):
        with pytest.raises(ValueError, match="another process is quantising there"):
            with workspace(tmp_path / "work", {"a": 1}):
                pass
    with workspace(tmp_path / "work", {"a": 1}) as work:
        assert work.resumed


def test_killed_at_random_times_it_resumes_to_the_same_bits(source, text_file, tmp_path):
    options = (
        "--method", "gptq", "--group-size", "32", "--calibration", text_file,
        "--num-sequences", "8", "--sequence-length", "64", "--check-tokens", "0",
    )  # fmt: skip
    kill_and_resume(source, options, tmp_path, num_kills=2, longest_wait=0.3)


# What is written


@pytest.mark.parametrize("bits, grid", [(3, "asymmetric"), (4, "full"), (8, "symmetric")])
def test_the_result_is_a_checkpoint_that_serves(source, text_file, tmp_path, bits, grid):
    checkpoint = open_checkpoint(source)
    calibration = calibration_of(checkpoint, text_file)
    recipe = Recipe("awq", Scheme(bits, 32, grid))
    leaves = quantize(checkpoint, recipe, calibration, tmp_path / "work")
    made = dataclasses.replace(checkpoint, read_leaves=leaves)
    write_checkpoint(made, tmp_path / "out")
    read = open_checkpoint(tmp_path / "out")
    assert equal(
        {"/".join(path): leaf for path, leaf in leaves()},
        {"/".join(path): leaf for path, leaf in read.tensors()},
    )
    tokens_BT = np.arange(32).reshape(2, 16)
    logits = []
    for dtype in ("float32", "int8", "int4"):
        form = serving_form(read.config, read_params(read), dtype)
        logits.append(np.asarray(jax.jit(form.model.apply)(form.params, tokens_BT), np.float32))
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=0.05 * np.abs(logits[0]).max())
