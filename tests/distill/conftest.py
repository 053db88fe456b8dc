"""A target that is a native checkpoint, small enough to be sampled and learnt in a test."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints_conv import Checkpoint, write_checkpoint
from checkpoints_conv.tree import expected_leaves
from helios_jax.config import ModelConfig
from helios_jax.model import init_params
from tests import tiny

CONFIG = tiny.config(max_model_len=128)


def target_params(config: ModelConfig = CONFIG, seed: int = 0):
    params = init_params(config, jax.random.key(seed))
    # Clearly different logits: there is something to learn.
    params = jax.tree.map(lambda leaf: np.asarray(leaf * 4 if leaf.ndim == 2 else leaf), params)
    params["params"]["embed"]["embedding"] = params["params"]["embed"]["embedding"] * 5
    return params


def write_model(folder: Path, config: ModelConfig, params) -> Path:
    tree = {
        tuple(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(params["params"])[0]
    }
    leaves = [(path, tree[path]) for path in expected_leaves(config)]
    checkpoint = Checkpoint(
        path=folder, format="native", config=config, generation={}, num_tensors=len(leaves),
        nbytes=sum(leaf.nbytes for _, leaf in leaves), read_leaves=lambda: iter(leaves),
        read_tokenizer=tiny.tokenizer, describe_source=lambda: {"made": "for a test"},
    )  # fmt: skip
    write_checkpoint(checkpoint, folder)
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "native", CONFIG, target_params())


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "a prompt {chr(97 + i)}"}}\n' for i in range(10)))
    return path


def changed(config: ModelConfig, **changes) -> ModelConfig:
    return dataclasses.replace(config, **changes)
