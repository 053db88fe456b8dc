"""Does the byte model count what the arrays hold, for any configuration and form of the weights?"""

import dataclasses

import jax
import pytest

from helios_jax.cache.paged import init_pools
from helios_jax.config import ModelConfig
from helios_jax.model import init_params
from helios_jax.model.forms import serving_form
from helios_jax.profiler import (
    Formats,
    decode_bytes,
    formats_as_stored,
    kv_bytes_per_token,
    weights_as_stored,
    weights_of_formats,
    weights_of_params,
)
from helios_jax.quant import Scheme, rtn
from pallas_kernels.kv_format import format_of
from tests import tiny

CONFIGS = {
    "tied": tiny.config(hidden_size=64, num_heads=4, head_dim=16, intermediate_size=128),
    "untied": tiny.config(
        hidden_size=96, intermediate_size=160, num_layers=3, num_heads=6, head_dim=32,
        num_kv_heads=3, tie_word_embeddings=False,
    ),
    "biases": tiny.config(
        hidden_size=64, intermediate_size=96, num_heads=4, head_dim=16, qkv_bias=True,
        attention_output_bias=True, mlp_bias=True, qk_norm=True,
    ),
}  # fmt: skip
FORMS = {
    "float32": Formats(weight_bits=32, head_bits=32),
    "bfloat16": Formats(weight_bits=16),
    "int8": Formats(weight_bits=8, group_size=None, scale_bits=32, zero_bits=0),
}
# 7B by the article: 32 layers of 4096, FFN 11008.
ARTICLE = ModelConfig(
    "llama", vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_layers=32,
    num_heads=32, num_kv_heads=32, head_dim=128, max_model_len=4096,
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_formats_predict_the_arrays_that_serve(name, form):
    config, formats = CONFIGS[name], FORMS[form]
    if form == "int8":
        formats = dataclasses.replace(formats, head_bits=8 + 32 / config.hidden_size)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    served = jax.eval_shape(lambda p: serving_form(config, p, form, "cpu").params, params)
    counted = weights_of_params(served, num_rows=1)
    assert counted.once == weights_of_formats(config, formats).once
    if form == "float32":
        assert counted.per_token == 4 * config.hidden_size


@pytest.mark.parametrize("bits, group, grid", [
    (4, 32, "asymmetric"), (4, 64, "full"), (3, 32, "full"), (8, -1, "symmetric"),
])  # fmt: skip
def test_quantised_weights_count_with_their_scales_and_zeros(bits, group, grid):
    config = tiny.config(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    params = init_params(config, jax.random.key(0))
    scheme = Scheme(bits, group, grid)

    def place(path, leaf):
        is_linear = path[-1].key == "kernel" and "lm_head" not in str(path)
        return rtn(leaf.T, scheme) if is_linear else leaf

    stored = jax.tree_util.tree_map_with_path(place, params)
    formats = Formats(
        bits, None if group == -1 else group, zero_bits=16 if grid == "asymmetric" else 0
    )
    expected = weights_of_formats(config, formats)
    assert weights_as_stored(stored) == expected
    served = serving_form(config, stored, "int4", "cpu").params
    assert weights_of_params(served, 1).once == expected.once


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "fp8_e4m3", "int8"])
def test_kv_bytes_are_those_of_the_pools(kv_dtype):
    config, fmt = CONFIGS["untied"], format_of(kv_dtype)
    pools = jax.eval_shape(lambda: init_pools(config, 7))
    held = sum(pool.size * pool.dtype.itemsize for pool in pools)
    assert held == 7 * fmt.tokens_per_block * kv_bytes_per_token(config, fmt.bits)


def test_the_articles_sums_where_it_errs():
    """Per sequence of 2048 tokens: 1.07 GB at 16 bits with 32 KV heads, 268 MB with 8."""
    grouped = dataclasses.replace(ARTICLE, num_kv_heads=8)

    def megabytes(config, bits):
        weights = weights_of_formats(config, Formats(weight_bits=16))
        moved = decode_bytes(config, weights, num_rows=1, context_tokens=2048, kv_bits=bits)
        return moved.kv_read / 1e6

    assert megabytes(ARTICLE, 16) == pytest.approx(1073.7, abs=0.1)
    assert megabytes(grouped, 16) == pytest.approx(268.4, abs=0.1)
    assert megabytes(grouped, 8) == pytest.approx(134.2, abs=0.1)


def test_a_round_with_drafts_by_hand():
    draft = tiny.config(num_layers=1)
    weights, small = (weights_of_formats(c, Formats()) for c in (ARTICLE, draft))
    plain = decode_bytes(ARTICLE, weights, num_rows=2, context_tokens=100, kv_bits=8)
    drafted = decode_bytes(
        ARTICLE, weights, num_rows=2, context_tokens=100, kv_bits=8, num_draft_tokens=4,
        draft=(draft, small),
    )  # fmt: skip
    one = decode_bytes(draft, small, num_rows=2, context_tokens=100, kv_bits=8)
    assert drafted.draft == 4 * one.total and plain.draft == 0
    assert drafted.kv_read == plain.kv_read and drafted.kv_write == 5 * plain.kv_write
    assert drafted.logits == 5 * plain.logits == 10 * 4 * 32_000
    between = 2 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11_008)) * 2
    assert plain.activations == between
    assert plain.total == sum(plain)


def test_impossible_rounds_are_refused():
    weights = weights_of_formats(ARTICLE, Formats())
    with pytest.raises(ValueError, match="num_rows=0"):
        decode_bytes(ARTICLE, weights, num_rows=0, context_tokens=1, kv_bits=8)


@pytest.mark.parametrize("bits, asymmetric", [(4, False), (3, True), (8, False), (None, False)])
def test_what_is_stored_is_recognised(bits, asymmetric):
    """Its bytes predicted from the formats alone are those of the arrays."""
    config = CONFIGS["tied"]
    params = init_params(config, jax.random.key(0))
    if bits is not None:
        scheme = Scheme(bits, 32, "asymmetric" if asymmetric else "full")
        layers = {
            name: jax.tree.map(lambda leaf: rtn(leaf.T, scheme) if leaf.ndim == 2 else leaf, layer)
            for name, layer in params["params"].items()
            if name.startswith("layers_")
        }
        params = {"params": params["params"] | layers}
    formats = formats_as_stored(params)
    assert formats.weight_bits == (bits or 16) and formats.head_bits == 16
    predicted = weights_of_formats(config, formats)
    found = weights_as_stored(params)
    # A zero point takes 16 bits in memory where files pack it into a code's.
    assert predicted.once == pytest.approx(found.once, rel=0.1 if asymmetric else 1e-9)
    assert formats.zero_bits == (bits if asymmetric else 0 if bits else None)
