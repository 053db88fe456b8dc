"""Are torch's own files read with torch, refused without it, and never run?"""

import builtins
import json
import pickle

import numpy as np
import pytest

from checkpoints_conv import open_checkpoint
from checkpoints_conv.huggingface import tensor_name
from tests.checkpoints.tiny_checkpoints import random_weights, tiny_config, write_huggingface


@pytest.fixture
def folder(tmp_path):
    config = tiny_config(num_layers=1)
    write_huggingface(tmp_path, config, random_weights(config))
    (tmp_path / "model.safetensors").unlink()
    return tmp_path


def test_without_torch(folder, monkeypatch):
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    real = builtins.__import__

    def missing(name, *rest):
        if name == "torch":
            raise ImportError("no torch")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"'pytorch_model\.bin', a pickle.*torch is not installed"):
        open_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_files", [1, 2])
def test_with_torch(folder, dtype, num_files):
    torch = pytest.importorskip("torch")
    weights = random_weights(tiny_config(num_layers=1))
    tensors = {
        tensor_name(path): torch.from_numpy(array).to(getattr(torch, dtype))
        for path, array in weights.items()
    }
    if num_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        names = list(tensors)
        parts = {"a.bin": names[::2], "b.bin": names[1::2]}
        for file, part in parts.items():
            torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map = {name: file for file, part in parts.items() for name in part}
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    leaves = dict(open_checkpoint(folder).tensors())
    for path, array in weights.items():
        expected = array.T if path[-1] == "kernel" else array
        rounded = torch.from_numpy(expected.copy()).to(getattr(torch, dtype)).float().numpy()
        assert leaves[path].dtype.name == dtype
        np.testing.assert_array_equal(leaves[path].astype(np.float32), rounded)


def test_code_in_a_pickle_is_not_run(folder, tmp_path):
    pytest.importorskip("torch")
    witness = tmp_path / "ran"

    class Code:
        def __reduce__(self):
            return (open, (str(witness), "w"))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Code()}))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: torch cannot read it as weights"):
        open_checkpoint(folder)
    assert not witness.exists()
