"""Does a model's name lead to the right place, and a wrong one to a message that helps?"""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from helios_jax import hub


@pytest.fixture(autouse=True)
def empty_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("HELIOS_CACHE", str(tmp_path / "helios"))


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("HELIOS_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert hub.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("HELIOS_CACHE")
    assert hub.cache_dir() == tmp_path / "b/helios"
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert hub.cache_dir() == tmp_path / ".cache/helios"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_dir() == tmp_path / ".cache/helios"
    monkeypatch.setenv("HELIOS_CACHE", "~/c")
    assert hub.cache_dir() == tmp_path / "c"
    assert not (tmp_path / "c").exists()


def make_huggingface(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")


def make_sharded(folder: Path) -> None:
    make_huggingface(folder)
    (folder / "model.safetensors").rename(folder / "m-1.safetensors")
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_native(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("make", [make_huggingface, make_sharded, make_native])
def test_a_local_folder(tmp_path, monkeypatch, make):
    folder = tmp_path / "model"
    folder.mkdir()
    make(folder)
    assert hub.resolve(folder) == hub.resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("model") == Path("model")
    with pytest.raises(ValueError, match="is a local path; there is nothing to pull"):
        hub.pull("model")


def test_a_local_gguf(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF...")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04"])
def test_a_file_that_is_no_gguf(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="is not GGUF"):
        hub.resolve(tmp_path / "m.gguf")


def test_a_folder_that_is_no_checkpoint(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ValueError, match="lacks config.json, model.safetensors.*found notes.txt"):
        hub.resolve(tmp_path)
    make_sharded(tmp_path)
    (tmp_path / "m-1.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks m-1.safetensors"):
        hub.resolve(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match="lacks a readable model.safetensors.index.json"):
        hub.resolve(tmp_path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("smollm-135m", r"Did you mean 'smollm2-135m'\?"),
        ("SmolLM2-135M", r"Did you mean 'smollm2-135m'\?"),
        ("org/name", r"Did you mean 'hf:org/name'\?"),
        ("gpt", r"neither a known model nor an existing path\. Known: smollm2-135m\. Pulled: none"),
        ("", "model=''"),
        ("./none", "no such file or folder; a model is a local"),
        ("none.gguf", "no such file or folder"),
    ],
)
def test_an_unknown_name(name, message):
    for question in (hub.resolve, hub.pull):
        with pytest.raises(ValueError, match=message):
            question(name)


def test_models_known_and_pulled():
    [absent] = hub.list_models()
    assert (absent.name, absent.path, absent.licence) == ("smollm2-135m", None, "Apache-2.0")
    native = hub.cache_dir() / "models/smollm2-135m"
    native.mkdir(parents=True)
    (native / "params").write_bytes(bytes(1000))
    [pulled] = hub.list_models()
    assert (pulled.path, pulled.size_bytes, pulled.format) == (native, 1000, "native")
