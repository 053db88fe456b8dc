"""Does `helios profile` count, measure and predict, and say what it cannot?"""

import dataclasses
import json

import jax
import pytest

import helios_jax.bench.profile as profiling
from checkpoints_conv import open_checkpoint, read_params
from helios_jax.bench import tables
from helios_jax.bench.bandwidth import measure_read_bandwidth
from helios_jax.model import init_params
from helios_jax.model.forms import serving_form
from helios_jax.profiler import (
    PARTS,
    Formats,
    decode_bytes,
    weights_as_stored,
    weights_of_formats,
)
from helios_jax.replay import MODELS
from tests import tiny
from tests.checkpoints.tiny_checkpoints import random_weights, tiny_config, write_huggingface


def test_a_configuration_is_predicted_for(helios, tmp_path):
    path = tmp_path / "profile.json"
    code, out, err = helios(
        "profile", "llama-3-8b", "--gpu", "h100", "--gpu", "b200", "--batch-size", "4",
        "--context-tokens", "2048", "--json", str(path),
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(path.read_text())
    assert list(report["bytes"]) == list(PARTS) and list(report["gpus"]) == ["h100", "b200"]
    # 8 KV heads of 128 at 8 bits in 32 layers, K and V: 64 KiB a token.
    assert report["bytes"]["kv_read"] == 4 * 2048 * 65_536
    h100 = report["gpus"]["h100"]
    assert h100["limit"] == "bytes" and h100["fits"]
    assert h100["seconds"] == pytest.approx(report["total_bytes"] / 3.352e12)
    assert report["gpus"]["b200"]["seconds"] < h100["seconds"]
    assert "https://www.nvidia.com" in out and "KV read" in out


@pytest.mark.parametrize("arguments, message", [
    (["--gpu", "h1000"], "gpu='h1000': must be one of a100"),
    (["--batch-size", "0"], "num_rows=0: must be at least 1"),
    (["--efficiency", "2"], "efficiency=2.0"),
    (["--json", "no/such/folder.json"], "its folder must exist"),
    (["--plot", "no/such/folder.png"], "its folder must exist"),
])  # fmt: skip
def test_what_cannot_be_is_refused(helios, arguments, message):
    code, out, err = helios("profile", "llama-3-8b", *arguments)
    assert code == 2 and message in err and not out


def test_a_step_is_timed_and_xla_asked():
    config = tiny.config()
    form = serving_form(config, init_params(config, jax.random.key(0)), "bfloat16")
    job = profiling.ProfileJob(num_rows=2, context_tokens=40, repeats=3)
    measured, xla = profiling._measured(form, "bfloat16", job, 0)
    assert 0 < measured["best_seconds"] <= measured["seconds"]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(form.params))
    assert xla["bytes_accessed"] >= held and xla["argument_bytes"] >= held
    report = profiling.profile_config("tiny", config, profiling.Formats(), job)
    report |= {
        "measured": measured
        | {"round_seconds": 1.0, "floor_seconds": 0.25, "roofline_share": 0.25},
        "xla": xla,
        "bandwidth": measure_read_bandwidth(1 << 20),
    }
    text = " ".join(tables.describe_profile(report))
    assert "25% of the roofline" in text and "MB accessed" in text
    assert report["bandwidth"]["bytes_per_second"] == max(report["bandwidth"]["methods"].values())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config()
    return write_huggingface(tmp_path_factory.mktemp("model"), config, random_weights(config))


def test_gpus_are_predicted_with_the_cache_asked_for_and_the_draft_as_it_is_stored(
    helios, checkpoint, tmp_path, monkeypatch
):
    bandwidth = {"bytes_per_second": 1e10, "method": "m", "methods": {"m": 1e10}}
    monkeypatch.setattr(profiling, "measure_read_bandwidth", lambda: bandwidth)
    path = tmp_path / "profile.json"
    code, _, err = helios(
        "profile", str(checkpoint), "--draft", str(checkpoint), "--kv-cache-dtype", "bfloat16",
        "--context-tokens", "40", "--repeats", "1", "--gpu", "h100", "--json", str(path),
    )  # fmt: skip
    assert code == 0, err
    opened = open_checkpoint(checkpoint)
    stored = weights_as_stored(read_params(opened))
    expected = decode_bytes(
        opened.config, stored, num_rows=1, context_tokens=40, kv_bits=16, num_draft_tokens=4,
        draft=(opened.config, stored),
    )  # fmt: skip
    assert json.loads(path.read_text())["gpus"]["h100"]["total_bytes"] == expected.total


@pytest.mark.parametrize("tied, num_tokens, with_draft, fits", [
    # 13.96 GB of linears and 1.05 of the head at 16 bits; 65,536 bytes a token; 0.9 x 23.6 GB.
    (True, 87_000, False, True),
    (False, 87_000, False, False),
    (False, 60_000, False, True),
    (False, 1_000, True, False),
])  # fmt: skip
def test_what_fits_counts_an_embedding_once_and_the_draft(tied, num_tokens, with_draft, fits):
    config = dataclasses.replace(MODELS["llama-3-8b"], tie_word_embeddings=tied)
    weights = weights_of_formats(config, Formats(weight_bits=16))
    job = profiling.ProfileJob(context_tokens=num_tokens, gpus=("l4",))
    draft = {"num_draft_tokens": 4, "draft": (config, weights)} if with_draft else {}
    assert profiling.predict(config, weights, job, 8, **draft)["l4"]["fits"] == fits
