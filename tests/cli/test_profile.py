"""Does `helios profile` count, measure and predict, and say what it cannot?"""

import json

import jax
import pytest

import helios_jax.bench.profile as profiling
from helios_jax.bench import tables
from helios_jax.bench.bandwidth import measure_read_bandwidth
from helios_jax.model import init_params
from helios_jax.model.forms import serving_form
from helios_jax.profiler import PARTS
from tests import tiny


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
