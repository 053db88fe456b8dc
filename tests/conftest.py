"""Which tests run: `--slow` adds the ones that take minutes; `gpu` ones need an NVIDIA GPU."""

import jax
import pytest


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes")


def pytest_collection_modifyitems(config, items):
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    slow = pytest.mark.skip(reason="takes minutes: give --slow")
    has_gpu = jax.default_backend() == "gpu"
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(no_gpu)
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(slow)
