"""Is what stands at a target safe, whatever the format, and what options contradict it?"""

import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints_conv import convert, converting, open_checkpoint
from tests.checkpoints.tiny_checkpoints import (
    random_weights,
    tiny_config,
    write_gguf,
    write_huggingface,
)
from tests.checkpoints.tiny_quantised import copy_fixture

FORMATS = {"native": "native", "huggingface": "huggingface", "gguf": "gguf"}
ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    config = tiny_config()
    return write_huggingface(tmp_path / "source", config, random_weights(config))


@pytest.mark.parametrize("format", FORMATS)
def test_overwriting(source, tmp_path, format):
    target = tmp_path / "out" / "model"
    seen = []
    convert(source, target, lambda *progress: seen.append(progress), format=format)
    total = open_checkpoint(source).nbytes
    assert seen[-1] == (total, total)
    with pytest.raises(ValueError, match=r"model: exists already"):
        convert(source, target, format=format)
    convert(source, target, format=format, overwrite=True)
    assert open_checkpoint(target).format == FORMATS[format]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("format", FORMATS)
def test_other_people_s_files_stay(source, tmp_path, format):
    """A folder of the same format that was not written here is the user's original."""
    target = source if format == "huggingface" else tmp_path / "mine"
    if target is not source:
        target.mkdir()
        (target / "diary.txt").write_text("dear")
    before = sorted((path.name, path.read_bytes()) for path in target.iterdir())
    other = tmp_path / "m.gguf"
    config = tiny_config()
    write_gguf(other, config, random_weights(config))
    with pytest.raises(ValueError, match=r"only those are overwritten"):
        convert(other, target, format=format, overwrite=True)
    assert sorted((path.name, path.read_bytes()) for path in target.iterdir()) == before


@pytest.mark.parametrize("format", ["huggingface", "gguf", "awq", "gptq"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_nothing_is_left_when_writing_ends_early(tmp_path, format, error, monkeypatch):
    source = copy_fixture("autoawq", tmp_path / "source")

    def progress(done, total):
        if done > total / 2:
            raise error

    with pytest.raises(error):
        convert(source, tmp_path / "out", progress, format=format)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(format="onnx"), "format='onnx': must be one of ('native', 'huggingface', 'awq'"),
        (dict(quant_type="Q4_0"), "quant_type='Q4_0' with format='native': only 'gguf' has"),
        (dict(format="gguf", dtype="float16"), "dtype='float16' with format='gguf': only 'hugg"),
        (dict(format="gguf", quant_type="Q6_K"), "quant_type='Q6_K': must be one of ('F16', "),
        (dict(format="huggingface", dtype="int8"), "dtype='int8': must be one of ('bfloat16', "),
        (dict(num_kv_heads=3), "num_kv_heads=3: must divide the model's 2 KV heads"),
    ],
)
def test_options(source, tmp_path, options, message):
    with pytest.raises(ValueError) as error:
        convert(source, tmp_path / "out", **options)
    assert message in str(error.value) and not (tmp_path / "out").exists()


def test_a_full_disk_is_noticed_before_writing(source, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(converting, "require_space", lambda folder, size: asked.append(size))
    convert(source, tmp_path / "a", format="huggingface")
    convert(source, tmp_path / "b", format="huggingface", dtype="float32")
    convert(source, tmp_path / "c", format="gguf", quant_type="Q4_0")
    dense = open_checkpoint(source).nbytes
    assert asked[0] == dense // 2 and asked[1] == dense and dense // 8 < asked[2] < dense // 6


def test_the_command(source, tmp_path):
    done = subprocess.run(
        [
            sys.executable, "-m", "checkpoints_conv", source, tmp_path / "m.gguf", "--format",
            "gguf", "--quant-type", "Q8_0", "--kv-heads", "1", "--verify",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert open_checkpoint(tmp_path / "m.gguf").config.num_kv_heads == 1
