"""What do all tests share: which ones run here, the real model, and a process that lasts."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helios_jax import hub


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: run with --slow"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Here and not at collection, so that jax is imported only where a gpu test is about to run.
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs an NVIDIA GPU, and jax finds none")


# Linux gives a process 65,530 memory maps, a compiled program takes several, and XLA crashes when
# they run out, which all tests together would bring about.
MAX_MEMORY_MAPS = 20_000


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Frees compiled programs between files once there are many."""
    yield
    maps = Path("/proc/self/maps")
    jax, programs = (sys.modules.get(name) for name in ("jax", "helios_jax.engine.programs"))
    if jax and maps.exists() and maps.read_bytes().count(b"\n") > MAX_MEMORY_MAPS:
        if programs:
            programs.forget()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def smollm2_gguf_path() -> Path:
    """The embedded model's GGUF, in the user's cache (HELIOS_CACHE) and so kept between runs."""
    return hub.fetch_gguf("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_native_path() -> Path:
    """The embedded model as `helios pull` leaves it, likewise."""
    return hub.pull("smollm2-135m")
