"""Does any damage to a file end in a ValueError or OSError, soon and in little memory?"""

import json
import shutil
import struct
import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from checkpoints_conv import convert, open_checkpoint
from tests.checkpoints.tiny_checkpoints import (
    gguf_metadata,
    random_weights,
    tiny_config,
    write_gguf,
    write_huggingface,
)

MAX_BYTES = 20 << 20  # the tiny models have 0.3 MB


def read_all(path):
    """Whether all of the checkpoint could be read; any error but the two allowed comes through."""
    try:
        checkpoint = open_checkpoint(path)
        for _ in checkpoint.tensors():
            pass
        _ = checkpoint.tokenizer
    except (ValueError, OSError):
        return False
    return True


def mutations(data, rng, start, end):
    """One damaged copy: a byte, a run of bytes, or eight bytes of a length, changed."""
    data = bytearray(data)
    at = int(rng.integers(start, end))
    match rng.integers(4):
        case 0:
            data[at] ^= 1 << int(rng.integers(8))
        case 1:
            data[at] = int(rng.integers(256))
        case 2:
            run = rng.integers(0, 256, int(rng.integers(1, 16)), np.uint8).tobytes()
            data[at : at + len(run)] = run
        case 3:
            value = (0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1)[rng.integers(6)]
            data[at : at + 8] = struct.pack("<Q", value)
    return bytes(data)


def try_mutations(make_path, write, data, count, start=0, end=None, seed=0):
    rng = np.random.default_rng(seed)
    survived = 0
    tracemalloc.start()
    try:
        for _ in range(count):
            write(mutations(data, rng, start, end or len(data)))
            survived += read_all(make_path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    return survived


def test_gguf_headers(tmp_path):
    config = tiny_config(num_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), Type.Q4_1)
    data = path.read_bytes()
    header = data.index(b"blk.0.ffn_up.weight") + 200
    survived = try_mutations(path, path.write_bytes, data, 250, end=header)
    # Within the counts, keys and descriptions nearly every change matters.
    survived_start = try_mutations(path, path.write_bytes, data, 150, end=900, seed=1)
    assert survived < 250 and survived_start < 75


def test_truncated_gguf(tmp_path):
    config = tiny_config(num_layers=1)
    path = write_gguf(tmp_path / "m.gguf", config, random_weights(config), Type.Q4_1)
    data = path.read_bytes()
    lengths = [*range(0, 400, 7), *range(400, len(data) - 1, len(data) // 60), len(data) - 1]
    for length in lengths:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"m\.gguf: "):
            open_checkpoint(path)


def test_gguf_lengths_beyond_the_file(tmp_path):
    """A count of 2**60 is refused for what it is, not after reading that far."""
    path = tmp_path / "m.gguf"
    head = b"GGUF" + struct.pack("<I", 3)
    for tensors, values in ((2**60, 0), (0, 2**60)):
        path.write_bytes(head + struct.pack("<QQ", tensors, values) + bytes(100))
        with pytest.raises(ValueError, match=r"is 1152921504606846976, more than the rest"):
            open_checkpoint(path)
    for item_type in range(13):
        array = struct.pack("<QQ", 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, item_type, 2**60)
        path.write_bytes(head + array + bytes(100))
        with pytest.raises(ValueError, match=r"the length of metadata 'k'|arrays|truncated"):
            open_checkpoint(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(100))
    with pytest.raises(ValueError, match=r"version 50331648.*big-endian"):
        open_checkpoint(path)


def test_safetensors_headers(tmp_path):
    config = tiny_config(num_layers=1)
    folder = write_huggingface(tmp_path, config, random_weights(config))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    survived = try_mutations(folder, path.write_bytes, data, 200, end=end)
    assert survived < 100
    for length in (0, 4, 8, 100, end, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors: "):
            open_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_huggingface_json(tmp_path, name):
    config = tiny_config(num_layers=1)
    folder = write_huggingface(
        tmp_path, config, random_weights(config), generation={"eos_token_id": [257, 258]}
    )
    data = (folder / name).read_bytes()
    try_mutations(folder, (folder / name).write_bytes, data, 100)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    folder = tmp_path_factory.mktemp("native")
    config = tiny_config(num_layers=1)
    write_gguf(folder / "m.gguf", config, random_weights(config), Type.Q4_1)
    convert(folder / "m.gguf", folder / "model")
    return folder / "model"


def test_native_manifest(native, tmp_path):
    folder = shutil.copytree(native, tmp_path / "model")
    path = folder / "manifest.json"
    data = path.read_bytes()
    # The source and white space may change unnoticed; a parameter never does.
    start = data.index(b'"leaves"')
    survived = try_mutations(folder, path.write_bytes, data, 200, start=start)
    assert survived < 40


def test_native_parameters(native, tmp_path, monkeypatch):
    """Every file that Orbax wrote: damage is refused, or the weights are still right."""
    monkeypatch.setattr("checkpoints_conv.native._SETTLE_SECONDS", 0.1)
    folder = shutil.copytree(native, tmp_path / "model")
    rng = np.random.default_rng(3)
    refused = 0
    files = [path for path in (folder / "params" / "layers_0").rglob("*") if path.stat().st_size]
    for path in sorted(path for path in files if path.is_file()):
        data = path.read_bytes()
        for _ in range(2):
            path.write_bytes(mutations(data, rng, 0, len(data)))
            refused += not read_all(folder)
        path.write_bytes(data)
    assert refused > 0
    assert read_all(folder)


ODD_VALUES = (
    None, True, 0, -1, 7, 10**30, 1e308, float("nan"), float("inf"), 1.5, "", "x", [], [1], ["x"],
    [None], {}, {"a": 1},
)  # fmt: skip


def test_huggingface_values_of_any_type(tmp_path):
    config = tiny_config("qwen2", num_layers=1, qkv_bias=True)
    rope = {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "attention_factor": 1.0, "truncate": True, "rope_theta": 1e4,
    }  # fmt: skip
    more = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 5}
    more |= {"layer_types": ["sliding_attention"], "rope_parameters": None}
    generation = {"eos_token_id": [257, 258], "temperature": 0.5, "top_k": 3}
    weights = random_weights(config)
    folder = write_huggingface(
        tmp_path, config, weights, changes=more | {"rope_scaling": rope}, generation=generation
    )
    assert read_all(folder)
    refused = 0
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        good = json.loads((folder / name).read_text())
        changed = [good | {key: odd} for key in good for odd in ODD_VALUES]
        if name == "config.json":
            changed += [
                good | {"rope_scaling": rope | {key: odd}} for key in rope for odd in ODD_VALUES
            ]
        for values in changed:
            (folder / name).write_text(json.dumps(values))
            refused += not read_all(folder)
        (folder / name).write_text(json.dumps(good))
    assert refused > 300


def test_gguf_values_of_any_type(tmp_path):
    config = tiny_config(num_layers=1)
    weights = random_weights(config)
    keys = [key for key in gguf_metadata(config) if key != "general.architecture"]
    keys += [
        "llama.rope.scaling.type",
        "llama.rope.scaling.factor",
        "llama.rope.scaling.attn_factor",
    ]
    keys += ["llama.attention.sliding_window", "llama.attention.key_length", "general.alignment"]
    keys += ["general.sampling.temp", "tokenizer.chat_template", "split.count"]
    refused = 0
    for key in keys:
        for odd in (True, 0, 7, 2**32 - 1, 1e38, float("nan"), -1.5, "x", [1], ["x"]):
            if key == "general.alignment" and type(odd) is not int:
                continue  # gguf's writer takes the value for its own
            path = write_gguf(tmp_path / "m.gguf", config, weights, metadata={key: odd})
            refused += not read_all(path)
    assert refused > 100
