"""What do all tests share: which ones run here, the real model, and compiled programs."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helios_jax import hub


def pytest_configure(config: pytest.Config) -> None:
    """Programs are compiled once for all of the run's processes: most of its time goes there.

    Unless the user has set a place for them (JAX_COMPILATION_CACHE_DIR) they are gone afterwards.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = tempfile.TemporaryDirectory(prefix="helios-tests-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    variables = {
        "JAX_COMPILATION_CACHE_DIR": folder.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        # Never reached, but only a cache with a limit locks the files that processes share.
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(1 << 34),
    }
    os.environ.update(variables)
    for name in variables:
        config.add_cleanup(lambda name=name: os.environ.pop(name))


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
    is_gpu = item.get_closest_marker("gpu") is not None
    if is_gpu:
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs an NVIDIA GPU, and jax finds none")
    real = any(name.startswith("smollm2") for name in getattr(item, "fixturenames", ()))
    optimise_programs(is_gpu or real)


def optimise_programs(optimises: bool) -> None:
    """How this process and those that it starts compile: only the real model's as users do.

    LLVM's optimisations are most of what a small model's tests would take.
    """
    name = "jax_disable_most_optimizations"
    os.environ[name.upper()] = str(not optimises)
    if jax := sys.modules.get("jax"):
        jax.config.update(name, not optimises)


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
