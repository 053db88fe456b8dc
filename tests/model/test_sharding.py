"""Are parameters laid out over a mesh as the rules say, and is the result that of one device?

What needs devices runs in a process of its own, with eight simulated ones: `eight_devices.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from helios_jax import ModelConfig, param_shardings
from helios_jax.model import logical_axes

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(
    architecture="qwen3", vocab_size=60, hidden_size=64, intermediate_size=96, num_layers=2,
    num_heads=8, num_kv_heads=4, head_dim=8, max_model_len=64, qkv_bias=True, qk_norm=True,
    attention_output_bias=True, mlp_bias=True,
)  # fmt: skip


def mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def specs(config, mesh, rules=None) -> dict[str, PartitionSpec]:
    flat = jax.tree_util.tree_flatten_with_path(param_shardings(config, mesh, rules))[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.spec for path, leaf in flat
    }


@pytest.mark.slow
def test_eight_devices():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/model/eight_devices.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_tensor_parallel_specs():
    """Column-parallel into heads and ffn, row-parallel out of them; norms are whole."""
    found = specs(CONFIG, mesh(data=2, model=4))
    layer = "params/layers_1"
    expected = {
        "params/embed/embedding": ("model", None),
        f"{layer}/attention/q/kernel": (None, "model"),
        f"{layer}/attention/k/kernel": (None, "model"),
        f"{layer}/attention/v/kernel": (None, "model"),
        f"{layer}/attention/q/bias": ("model",),
        f"{layer}/attention/k/bias": ("model",),
        f"{layer}/attention/v/bias": ("model",),
        f"{layer}/attention/o/kernel": ("model", None),
        f"{layer}/attention/o/bias": (None,),
        f"{layer}/attention/q_norm/scale": (None,),
        f"{layer}/attention/k_norm/scale": (None,),
        f"{layer}/attention_norm/scale": (None,),
        f"{layer}/ffn_norm/scale": (None,),
        f"{layer}/ffn/gate/kernel": (None, "model"),
        f"{layer}/ffn/up/kernel": (None, "model"),
        f"{layer}/ffn/down/kernel": ("model", None),
        f"{layer}/ffn/gate/bias": ("model",),
        f"{layer}/ffn/up/bias": ("model",),
        f"{layer}/ffn/down/bias": (None,),
        "params/final_norm/scale": (None,),
        "params/lm_head/kernel": (None, "model"),
    }
    for name, spec in expected.items():
        assert tuple(found[name]) == spec, name
    others = {name for name in found if "layers_0" not in name}
    assert others == set(expected)


def test_rules_may_be_the_callers():
    found = specs(CONFIG, mesh(data=2, model=4), {"embed": "data", "ffn": "model"})
    assert tuple(found["params/embed/embedding"]) == (None, "data")
    assert tuple(found["params/layers_0/ffn/gate/kernel"]) == ("data", "model")
    assert tuple(found["params/layers_0/attention/q/kernel"]) == ("data", None)
    assert tuple(found["params/final_norm/scale"]) == ("data",)
    # A mesh without the rules' axis replicates.
    assert not any(any(spec) for spec in specs(CONFIG, mesh(rows=8)).values())
    assert not any(any(spec) for spec in specs(CONFIG, mesh(model=4), {}).values())


def test_logical_axes_have_no_boxes():
    axes = logical_axes(CONFIG)["params"]
    assert axes["lm_head"]["kernel"] == ("embed", "vocab")
    assert axes["layers_0"]["attention"]["q_norm"]["scale"] == ("head_dim",)


@pytest.mark.parametrize(
    "axes, rules, message",
    [
        (
            {"model": 8}, None,
            "mesh axis 'model' has 8 devices: it must divide kv_heads=4; use fewer, or pass rules "
            "without 'kv_heads'",
        ),
        ({"model": 3}, {"vocab": "model", "ffn": "model", "heads": "model"}, "divide heads=8"),
        ({"data": 5}, {"embed": "data"}, "'data' has 5 devices: it must divide embed=64"),
        ({"model": 2}, {"layers": "model"}, r"unknown axes \['layers'\]: known are \['embed', "),
        (
            {"model": 2}, {"embed": "model", "ffn": "model"},
            "'ffn' and 'embed' of layers_0/ffn/down/kernel to the mesh axis 'model'",
        ),
    ],
)  # fmt: skip
def test_rules_refused(axes, rules, message):
    with pytest.raises(ValueError, match=message):
        param_shardings(CONFIG, mesh(**axes), rules)
