"""Is a quantised KV cache scored as the paged one computes, with scales that fit the model?"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_conv import open_checkpoint, read_params
from helios_jax.calibrate import cut_windows, score
from helios_jax.calibrate.kv_evaluation import evaluate_kv, kv_markdown, length_edges
from helios_jax.calibrate.kv_precision import (
    KV_DTYPES,
    KVRanges,
    RoundedKV,
    kv_bytes_per_sequence,
    kv_ranges,
    scales_of,
    there_and_back,
)
from helios_jax.calibrate.scoring import Reference, score_by_length
from pallas_kernels.append_kv import append_kv
from pallas_kernels.kv_format import FORMATS, pool_shape
from pallas_kernels.paged_attention import paged_attention
from tests import tiny
from tests.quantise.conftest import helios

TOKENS = np.random.default_rng(0).integers(0, 256, 150).tolist()


@pytest.fixture(scope="module")
def llm():
    return tiny.llm()


@pytest.mark.parametrize("kv_dtype", ("bfloat16", "fp8_e4m3", "int8"))
def test_attention_sees_what_chunks_through_a_paged_cache_see(kv_dtype):
    """45 tokens written and read in chunks of 17 and 28, in blocks that are out of order."""
    config = tiny.config(head_dim=16)
    rng = np.random.default_rng(0)
    num_tokens, heads, kv_heads, width = 45, 4, 2, 16
    query, key, value = (
        jnp.asarray(rng.standard_normal((num_tokens, n, width)), jnp.float32)
        for n in (heads, kv_heads, kv_heads)
    )
    largest = [np.abs(np.asarray(x)).max(axis=(0, 2)) * 0.9 for x in (key, value)]
    cache = RoundedKV.create(config, kv_dtype, KVRanges(*(np.stack([x, x]) for x in largest)))
    positions = jnp.arange(num_tokens)[None]
    found, _ = cache.attend(1, query[None], key[None], value[None], positions, None)

    scaled = FORMATS[kv_dtype].bits == 8
    options = dict(
        kv_dtype=kv_dtype,
        k_scale_K=cache.k_scale_LK[1] if scaled else None,
        v_scale_K=cache.v_scale_LK[1] if scaled else None,
        backend="xla",
    )
    per_block = FORMATS[kv_dtype].tokens_per_block
    num_blocks = -(-num_tokens // per_block)
    order = rng.permutation(num_blocks)
    pools = [jnp.zeros(pool_shape(num_blocks, kv_heads, width), jnp.uint16)] * 2
    expected = []
    for start, end in ((0, 17), (17, 45)):
        places = np.arange(start, end)
        slots = jnp.asarray(order[places // per_block] * per_block + places % per_block, jnp.int32)
        pools = append_kv(*pools, key[start:end], value[start:end], slots, **options)
        expected.append(
            paged_attention(
                query[start:end], *pools, jnp.asarray(order[None], jnp.int32),
                jnp.array([end], jnp.int32), jnp.array([0], jnp.int32),
                jnp.array([end - start], jnp.int32), max_query_len=end - start, **options,
            )
        )  # fmt: skip
    # The paged reference multiplies 16-bit formats in 16 bits.
    tolerance = 2e-2 if FORMATS[kv_dtype].bits == 16 else 2e-5
    np.testing.assert_allclose(found[0], jnp.concatenate(expected), atol=tolerance)


def test_float32_changes_nothing(llm):
    windows = cut_windows(TOKENS, 64, 64)
    cache = RoundedKV.create(llm.config, "float32", None)
    (found,) = score_by_length(llm.model, llm.params, windows, (), cache=cache)
    assert found.perplexity == pytest.approx(score(llm.model, llm.params, windows).perplexity)


def test_ranges_are_the_largest_magnitudes(llm):
    """Values of the first layer by hand; keys three times as large have three times the range."""
    tokens_BT = np.array(TOKENS[:96]).reshape(2, 48)
    ranges = kv_ranges(llm.model, llm.params, tokens_BT)
    tree = llm.params["params"]
    hidden = np.asarray(tree["embed"]["embedding"], np.float64)[tokens_BT]
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + llm.config.rms_norm_eps)
    normed = normed * np.asarray(tree["layers_0"]["attention_norm"]["scale"])
    qkv = np.asarray(tree["layers_0"]["attention"]["qkv"]["kernel"])
    width = 2 * llm.config.head_dim
    value = (normed @ qkv[:, -width:]).reshape(2, 48, 2, -1)
    np.testing.assert_allclose(ranges.v_LK[0], np.abs(value).max(axis=(0, 1, 3)), rtol=1e-4)
    larger = jax.tree.map(lambda leaf: leaf, llm.params)
    kernel = larger["params"]["layers_0"]["attention"]["qkv"]["kernel"]
    kernel = kernel.at[:, -2 * width : -width].multiply(3)
    larger["params"]["layers_0"]["attention"]["qkv"]["kernel"] = kernel
    again = kv_ranges(llm.model, larger, tokens_BT)
    np.testing.assert_allclose(again.k_LK[0], 3 * ranges.k_LK[0], rtol=1e-4)


@pytest.mark.parametrize("dtype", ("fp8_e4m3", "fp8_e5m2", "int8"))
def test_scales_use_the_whole_format(dtype):
    """Nothing saturates, and the largest value comes back exactly."""
    values = jax.random.normal(jax.random.key(0), (1, 64, 2, 8)) * jnp.array([[1.0], [1e4]])
    range_K = jnp.max(jnp.abs(values), axis=(0, 1, 3))
    scale_K = scales_of(range_K, dtype)
    back = there_and_back(values, scale_K, dtype)
    np.testing.assert_allclose(jnp.max(jnp.abs(back), axis=(0, 1, 3)), range_K, rtol=1e-6)
    step = {"fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "int8": 0}[dtype]
    tiny_step = {"fp8_e4m3": 2**-10, "fp8_e5m2": 2**-17, "int8": 0.5}[dtype]
    allowed = step * jnp.abs(values) + tiny_step * scale_K[:, None] * 1.01
    assert (jnp.abs(back - values) <= allowed).all()
    assert scales_of(np.zeros((1, 2)), dtype).tolist() == [[1.0, 1.0]]


def test_ranges_of_lengths_add_up(llm):
    windows = cut_windows(TOKENS, 64, 64)
    rounded = RoundedKV.create(llm.config, "fp8_e5m2", None)
    reference = Reference(llm.model, llm.params, windows)
    whole, parts = (
        score_by_length(llm.model, llm.params, windows, edges, reference, cache=rounded)
        for edges in ((), (8, 16, 32))
    )
    # Three windows: 64, 64 and 22 tokens, the last of which has no successor.
    assert [one.num_tokens for one in parts] == [7 * 3, 8 * 3, 16 + 16 + 6, 33 * 2]
    count = sum(one.num_tokens for one in parts)
    assert whole[0].num_tokens == count == len(TOKENS) - 1
    nll = sum(one.num_tokens * math.log(one.perplexity) for one in parts) / count
    assert nll == pytest.approx(math.log(whole[0].perplexity))
    assert sum(one.num_tokens * one.kl for one in parts) / count == pytest.approx(whole[0].kl)
    assert whole[0].kl > 0


def test_bytes_of_a_sequence():
    """2 layers x 2 heads x 8 elements, keys and values, 64 tokens: 4,096 values."""
    config = tiny.config(head_dim=8)
    sizes = {name: kv_bytes_per_sequence(config, name, 64) for name in KV_DTYPES}
    assert sizes == {
        "float32": 16384, "bfloat16": 8192, "float16": 8192,
        "fp8_e4m3": 4096, "fp8_e5m2": 4096, "int8": 4096, "k16v8": 6144,
    }  # fmt: skip
    # A block that is begun counts as a whole: 16 tokens of 8 bits, 8 of 16.
    assert kv_bytes_per_sequence(config, "int8", 65) == 4096 * 80 // 64
    assert kv_bytes_per_sequence(config, "bfloat16", 65) == 8192 * 72 // 64
    with pytest.raises(ValueError, match="kv_cache_dtype='fp4': must be one of"):
        kv_bytes_per_sequence(config, "fp4", 1)


def test_edges():
    assert length_edges(400) == [] and length_edges(512) == []
    assert length_edges(8192) == [512, 1024, 2048, 4096]


# The commands


def test_calibrated_scales_help_and_go_into_the_checkpoint(source, text_file, tmp_path, capsys):
    common = ("--text", text_file, "--context", 64, "--max-text-tokens", 300)
    wanted = ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "k16v8")
    helios(
        "evaluate", source, *(f"--kv-cache-dtype={name}" for name in wanted),
        "--kv-calibration", text_file, *common,
        "--json", tmp_path / "kv.json", "--markdown", tmp_path / "kv.md",
    )  # fmt: skip
    report = json.loads((tmp_path / "kv.json").read_text())
    kl = {(row["kv_dtype"], row["scales"]): row["mean"][0]["kl"] for row in report["rows"]}
    assert kl.pop(("float32", "none")) is None
    assert len(kl) == 1 + 2 * 4 and all(value > 0 for value in kl.values())
    assert kl["bfloat16", "none"] < kl["fp8_e4m3", "calibrated"] < kl["fp8_e5m2", "calibrated"]
    assert kl["int8", "calibrated"] < 0.1 * kl["int8", "1.0"]
    assert kl["k16v8", "calibrated"] < kl["fp8_e4m3", "calibrated"]
    tables = (tmp_path / "kv.md").read_text()
    assert tables == kv_markdown(report) + "\n" == capsys.readouterr().out
    assert "| int8 | calibrated |" in tables

    out = tmp_path / "out"
    helios(
        "calibrate-kv", source, "--calibration", text_file, "--sequence-length", 256, "--out", out
    )
    assert str(out) in capsys.readouterr().out
    before, after = map(open_checkpoint, (source, out))
    assert before.kv_scales is None and after.kv_scales.k_LK.shape == (2, 2)
    for leaf, other in zip(
        *(jax.tree.leaves(read_params(one)) for one in (before, after)), strict=True
    ):
        np.testing.assert_array_equal(leaf, other)
    again = evaluate_kv(str(out), ["int8"], {"words": text_file}, context=64, max_text_tokens=300)
    assert again["settings"]["scales_from"] == "the checkpoint's"
    assert [row["scales"] for row in again["rows"]] == ["none", "1.0", "calibrated"]
    assert again["rows"][2]["mean"][0]["kl"] < 0.1 * again["rows"][1]["mean"][0]["kl"]
    # A native checkpoint may be changed in place.
    helios("calibrate-kv", out, "--calibration", text_file, "--sequence-length", 64)
    changed = open_checkpoint(out).kv_scales
    assert (changed.k_LK <= after.kv_scales.k_LK * 1.001).all()
    assert not np.array_equal(changed.k_LK, after.kv_scales.k_LK)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--kv-cache-dtype", "fp4"), "kv_cache_dtype='fp4': must be one of"),
        (("--kv-cache-dtype", "int8", "--against", "x"), "kv_cache_dtype: takes one model"),
        (("--kv-calibration", "x.txt"), "kv_calibration: scales of which cache?"),
        (("--kv-cache-dtype", "int8", "--context", "9999"), "context=9999: "),
    ],
)
def test_what_cannot_be_asked(source, text_file, capsys, arguments, message):
    helios("evaluate", source, "--text", text_file, *arguments, code=2)
    assert message in capsys.readouterr().err


def test_scales_need_a_place(source, text_file, tmp_path, capsys):
    helios("calibrate-kv", "smollm2-135m", "--calibration", text_file, code=2)
    assert "only a local folder can be changed in place; give --out" in capsys.readouterr().err
    helios("calibrate-kv", source, "--calibration", tmp_path / "no.txt", code=2)
    assert "no.txt: cannot be read as UTF-8 text" in capsys.readouterr().err
