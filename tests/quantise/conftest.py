"""Tiny checkpoints in native form, and text to calibrate them on."""

import jax
import numpy as np
import pytest

from checkpoints_conv import write_checkpoint
from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.tree import expected_leaves
from helios_jax.cli.main import main
from helios_jax.model import init_params
from tests import tiny

TEXT = "The quick brown fox jumps over the lazy dog; 0123456789 times (or so they say).\n"


def make_checkpoint(folder, **changes):
    """A native checkpoint of a random model, with channels of unequal size, as real ones have."""
    config = tiny.config(**changes)
    params = init_params(config, jax.random.key(0))["params"]
    rng = np.random.default_rng(0)

    def leaves():
        for path in expected_leaves(config):
            leaf = params
            for part in path:
                leaf = leaf[part]
            leaf = np.array(leaf)
            if path[-1] == "scale":
                leaf = np.exp(rng.standard_normal(leaf.shape)).astype(np.float32)
            elif path[-1] == "bias":
                leaf = 0.1 * rng.standard_normal(leaf.shape).astype(np.float32)
            yield path, leaf

    checkpoint = Checkpoint(
        path=folder,
        format="native",
        config=config,
        generation={},
        num_tensors=len(expected_leaves(config)),
        nbytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        read_leaves=leaves,
        read_tokenizer=tiny.tokenizer,
        describe_source=lambda: {"made": "by a test"},
    )
    write_checkpoint(checkpoint, folder)
    return folder


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """Grouped queries (2 for a KV head), tied embedding, 64 and 128 inputs."""
    folder = tmp_path_factory.mktemp("source") / "model"
    return make_checkpoint(folder, hidden_size=64, intermediate_size=128, head_dim=16)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = TEXT.split()
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(rng.choice(words, 1500)))
    return path


def helios(*arguments, code: int = 0) -> None:
    """Runs the command line in this process; it must end with `code`."""
    with pytest.raises(SystemExit) as exited:
        main([str(argument) for argument in arguments])
    assert (exited.value.code or 0) == code
