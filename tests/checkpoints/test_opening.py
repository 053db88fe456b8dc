"""Is what is no checkpoint refused by name, and is what is read checked as a whole?"""

import dataclasses

import numpy as np
import pytest

from checkpoints_conv import open_checkpoint, read_params
from checkpoints_conv.tree import LeafSpec, check_leaf
from helios_jax.quant import QuantTensor
from tests.checkpoints.tiny_checkpoints import (
    random_weights,
    tiny_config,
    write_gguf,
    write_huggingface,
)


@pytest.fixture
def checkpoint(tmp_path):
    config = tiny_config()
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", config, random_weights(config)))


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds neither manifest\.json.*but nothing"):
        open_checkpoint(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"give the file itself: .*m\.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "m.bin").write_bytes(b"\x80\x02PK")
    with pytest.raises(ValueError, match=r"m\.bin: neither a GGUF file .*nor a folder"):
        open_checkpoint(tmp_path / "m.bin")
    for content in (b"", b"not a model at all"):
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ValueError, match=r"m\.gguf: .*not a GGUF"):
            open_checkpoint(str(tmp_path / "m.gguf"))


def test_read_params_builds_the_tree_and_reports_progress(checkpoint):
    seen = []
    params = read_params(checkpoint, lambda done, total: seen.append((done, total)))
    tree = params["params"]
    assert list(params) == ["params"]
    assert sorted(tree) == ["embed", "final_norm", "layers_0", "layers_1", "lm_head"]
    assert sorted(tree["layers_0"]) == ["attention", "attention_norm", "ffn", "ffn_norm"]
    assert tree["lm_head"]["kernel"].shape == (64, 288)
    assert tree["layers_1"]["attention"]["k"]["kernel"].shape == (64, 32)
    assert len(seen) == checkpoint.num_tensors
    assert seen == sorted(seen) and seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)


def test_leaves_that_a_reader_forgets_or_repeats_are_noticed(checkpoint):
    leaves = list(checkpoint.tensors())

    def read(changed):
        read_params(dataclasses.replace(checkpoint, read_leaves=lambda: iter(changed)))

    read(leaves)
    with pytest.raises(ValueError, match=r"parameters are missing: embed/embedding"):
        read(leaves[1:])
    with pytest.raises(ValueError, match=r"'embed/embedding' is unexpected or there twice"):
        read([*leaves, leaves[0]])
    with pytest.raises(ValueError, match=r"'embed/embedding' has shape \(64, 288\): expected"):
        read([(leaves[0][0], leaves[0][1].T), *leaves[1:]])
    with pytest.raises(ValueError, match=r"'embed/embedding' has dtype float64"):
        read([(leaves[0][0], leaves[0][1].astype(np.float64)), *leaves[1:]])


def test_wrong_quantised_leaves_are_named():
    fields = dict(packed=np.zeros((8, 32), np.uint8), scale=np.zeros((8, 2), np.float16))
    spec = LeafSpec((8, 64), "linear")
    check_leaf("leaf", QuantTensor(**fields), spec)
    with pytest.raises(ValueError, match=r"leaf has \(out, in\) shape \(8, 64\): expected"):
        check_leaf("leaf", QuantTensor(**fields), LeafSpec((64, 8), "linear"))
    with pytest.raises(ValueError, match=r"leaf is quantised: norms and biases must be dense"):
        check_leaf("leaf", QuantTensor(**fields), LeafSpec((64,), "vector"))
    with pytest.raises(ValueError, match=r"leaf: group_size=64|leaf: scale has shape"):
        check_leaf("leaf", QuantTensor(**fields, group_size=64), spec)
    zero = np.zeros((8, 2), np.int8)
    with pytest.raises(ValueError, match=r"leaf: zero has dtype int8: must be one of \['int16'\]"):
        check_leaf("leaf", QuantTensor(**fields, zero=zero), spec)


def test_one_tensor_at_a_time(tmp_path):
    """Each tensor is read only when the iterator is asked for it."""
    config = tiny_config()
    folder = write_huggingface(tmp_path, config, random_weights(config))
    leaves = open_checkpoint(folder).tensors()
    next(leaves)
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError):
        next(leaves)
