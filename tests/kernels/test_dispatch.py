"""Is the backend chosen by one rule, refused with a reason, logged once and readable?"""

import json
import logging
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels import devices, dispatch, tuning
from pallas_kernels.int4_matmul import int4_matmul, shapes

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="says what happens without a GPU")
def test_without_a_gpu():
    assert dispatch.choose("op", None, None).backend == "xla"
    assert "needs an NVIDIA GPU" in dispatch.choose("op", None, None).reason
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU and the default device"):
        dispatch.choose("op", "triton", None)
    assert dispatch.choose("op", "interpret", None).backend == "interpret"


def test_for_a_gpu():
    with dispatch.compile_for("a100"):
        assert dispatch.choose("op", None, None).backend == "triton"
        assert dispatch.choose("op", None, "it is odd") == dispatch.Choice("xla", "it is odd")
        assert dispatch.choose("op", None, None, "many rows").backend == "xla"
        assert dispatch.choose("op", "triton", None, "many rows").backend == "triton"
        with pytest.raises(NotImplementedError, match="it is odd"):
            dispatch.choose("op", "triton", "it is odd")
    assert dispatch.target().device is None or jax.default_backend() == "gpu"


def test_calls_that_name_no_backend_take_the_preferred_one():
    with dispatch.preferring("interpret"):
        assert dispatch.choose("op", None, None).backend == "interpret"
        assert dispatch.choose("op", "xla", None).backend == "xla"
        with pytest.raises(NotImplementedError, match="it is odd"):
            dispatch.choose("op", None, "it is odd")
        with dispatch.preferring(None), dispatch.compile_for("a100"):
            assert dispatch.choose("op", None, None).backend == "triton"
    with dispatch.compile_for("a100"):
        assert dispatch.choose("op", None, None).backend == "triton"


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="backend='cuda'"):
        dispatch.choose("op", "cuda", None)


def test_choice_is_logged_once_and_readable(caplog):
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        for _ in range(3):
            dispatch.choose("logged_op", "xla", None)
    assert [r.getMessage() for r in caplog.records] == ["logged_op is served by xla: requested"]
    assert dispatch.in_use()["logged_op"] == (dispatch.Choice("xla", "requested"),)


def test_tuned_rows_limit_sends_many_rows_to_xla():
    positional, keyword = shapes.abstract_arguments(shapes.Case(4096, 64, 128))
    zero = keyword.pop("zero")
    with dispatch.compile_for("h200"):
        jax.eval_shape(lambda p, z: int4_matmul(*p, zero=z, **keyword), positional, zero)
    assert any("many rows" in c.reason for c in dispatch.in_use()["int4_matmul"])


def test_devices_are_found_by_kind():
    assert devices.device_of_kind("NVIDIA H200", (9, 0)).key == "h200"
    assert devices.device_of_kind("NVIDIA A100-SXM4-40GB", (8, 0)).key == "a100"
    assert devices.device_of_kind("NVIDIA GeForce RTX 4090", (8, 9)).key == "l4"
    assert devices.device_of_kind("NVIDIA B200", (10, 0)).arch == "sm_90"


def test_pallas_triton_is_still_there():
    """Fails when jax removes the backend: then port the bodies to jax_triton."""
    from jax.experimental.pallas import triton

    assert callable(triton.elementwise_inline_asm) and callable(triton.load)


def test_kernels_import_jax_and_numpy_only():
    code = (
        "import sys, pallas_kernels.sharding, pallas_kernels.bench.__main__\n"
        "print([m for m in ('helios_jax', 'flax', 'torch', 'optax') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.parametrize("key", devices.DEVICES)
def test_tables_cover_both_models(key):
    """Every matrix and attention shape of both models has an entry that says what it is."""
    from pallas_kernels.aot import cases
    from pallas_kernels.int4_matmul import config as matmul_configs
    from pallas_kernels.paged_attention import config as attention_configs

    of = dict(int4_matmul=matmul_configs, paged_attention=attention_configs)
    device = devices.DEVICES[key]
    for op, case in cases.model_cases():
        entry = tuning.lookup(key, op, of[op].key_of_case(case))
        assert entry is not None, (op, case)
        assert entry["status"] in ("predicted", "measured")
        assert entry["microseconds"] > 0 and 0 < entry["share_of_floor"] <= 1
        chosen = of[op].config_for(of[op].problem_of_case(case), device)
        assert chosen == type(chosen)(**entry["config"])


@pytest.fixture
def empty_tables(tmp_path, monkeypatch):
    def forget():
        tuning.load.cache_clear()
        tuning._index.cache_clear()

    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    forget()
    yield
    forget()


def test_store_keeps_other_entries(empty_tables):
    entries = [dict(key=dict(a=1), status="predicted"), dict(key=dict(a=2), status="predicted")]
    tuning.store("toy", "op", entries)
    tuning.store_max_kernel_rows("toy", 256)
    path = tuning.store("toy", "op", [dict(key=dict(a=2), status="measured")])
    assert json.loads(path.read_text()) == dict(
        device="toy", max_kernel_rows=256,
        op=[entries[0], dict(key=dict(a=2), status="measured")],
    )  # fmt: skip
    assert tuning.lookup("toy", "op", dict(a=2)) == dict(key=dict(a=2), status="measured")
    assert tuning.lookup("toy", "op", dict(a=3)) is None


def test_tuning_writes_the_fastest_and_the_rows_limit(empty_tables, monkeypatch):
    """With a clock that likes one split and XLA from 256 rows on."""
    from pallas_kernels.bench import __main__ as bench
    from pallas_kernels.int4_matmul import config as matmul_configs

    def clock(op, case, device, config=None, backend="triton"):
        if config is not None and op == "int4_matmul":
            return 1e-3 * config.split_k
        return 1e-3 * (200 if backend == "xla" else getattr(case, "M", 1))

    monkeypatch.setattr(bench, "_time", clock)
    case = shapes.Case(16, 4096, 4096)
    todo = [("int4_matmul", case), ("int4_matmul", shapes.Case(64, 4096, 4096))]
    monkeypatch.setattr(bench.compile_cases, "model_cases", lambda: list(todo))
    device = devices.DEVICES["h200"]
    result = bench.tune(device)
    rule = matmul_configs.rule(matmul_configs.problem_of_case(case), device)
    entry = tuning.lookup("h200", "int4_matmul", matmul_configs.key_of_case(case))
    assert entry is not None and entry["status"] == "measured"
    assert entry["config"]["split_k"] == rule.split_k // 2
    assert result["max_kernel_rows"] == matmul_configs.max_kernel_rows(device) == 128
    # A run whose time was over measures, in the next one, what it left out.
    monkeypatch.setattr(bench, "BUDGET_SECONDS", -1)
    todo.append(("int4_matmul", shapes.Case(16, 1024, 4096)))
    assert sorted(todo, key=lambda c: bench._is_measured(device, *c))[0] == todo[-1]
    assert bench.tune(device)["entries"]["int4_matmul"] == []


def test_bench_on_a_cpu_prints_the_byte_model(tmp_path):
    import os

    out = tmp_path / "bench.json"
    run = subprocess.run(
        [sys.executable, "-m", "pallas_kernels.bench", "--out", str(out)],
        env=os.environ | dict(JAX_PLATFORMS="cpu"), capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    model = json.loads(out.read_text())["byte_model"]
    first = next(row for row in model if row["case"].get("N") == 6144)
    assert first["bytes_read"] == sum(
        (2 * 4096, 6144 * 2048, 6144 * 32 * 2, 6144 * 32 * 2)  # x, codes, scales, zero points
    )
    assert np.isclose(first["floor_microseconds"]["h200"], first["bytes_read"] / 4.32e6, rtol=0.01)
