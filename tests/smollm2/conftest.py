"""The embedded model in the forms that the tests of this folder compare."""

import pytest

from checkpoints_conv import open_checkpoint, read_params
from helios_jax.model.forms import ServingForm, serving_form


@pytest.fixture(scope="session")
def checkpoint(smollm2_native_path):
    return open_checkpoint(smollm2_native_path)


@pytest.fixture(scope="session")
def stored_params(checkpoint):
    return read_params(checkpoint)


@pytest.fixture(scope="session")
def float32_form(checkpoint, stored_params) -> ServingForm:
    return serving_form(checkpoint.config, stored_params, "float32")
