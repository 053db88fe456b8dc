"""What do the model tests share: the reference values, and each case as our reader loads it."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints_conv import open_checkpoint, read_params
from tests.model import reference_models

REFERENCES = Path(__file__).parents[1] / "data" / "model" / "references.npz"


@pytest.fixture(scope="session")
def references() -> dict[str, np.ndarray]:
    """What transformers computed, by `generate_references.py`."""
    with np.load(REFERENCES) as file:
        return dict(file)


@pytest.fixture(scope="session")
def load_case(tmp_path_factory):
    """name -> (config, params) of a case, written as a Hugging Face folder and read back."""

    @functools.cache
    def load(name: str):
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(reference_models.CASES[name]))
        save_file(reference_models.weights(name), folder / "model.safetensors")
        checkpoint = open_checkpoint(folder)
        return checkpoint.config, read_params(checkpoint)

    return load
