"""One server process for all tests of a file, and clients for it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from helios_jax.server.client import Client
from helios_jax.server.proto.inference_pb2_grpc import InferenceStub
from tests.server.processes import Server


@pytest.fixture(scope="session")
def server_folder(tmp_path_factory) -> Path:
    """Logs of servers, and the programs that they compiled."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(server_folder) -> Iterator[Server]:
    """Shared by tests that leave it empty."""
    process = Server(server_folder, grace_seconds=5, write_timeout_seconds=2)
    yield process
    assert process.stop() == 0
    faults = [line for line in process.lines() if line["level"] in ("error", "critical")]
    assert faults == []


@pytest.fixture
def start(server_folder) -> Iterator[Callable[..., Server]]:
    """Starts a server for one test."""
    started: list[Server] = []

    def start(**options) -> Server:
        started.append(Server(server_folder, **options))
        return started[-1]

    yield start
    for process in started:
        if process.process.poll() is None:
            process.kill()


@pytest.fixture(scope="module")
def client(server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


@pytest.fixture(scope="module")
def stub(server) -> Iterator[InferenceStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield InferenceStub(channel)
