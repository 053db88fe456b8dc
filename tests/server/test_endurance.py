"""Does a server outlive its clients? Storms of requests, reduced here; the long forms are slow."""

import asyncio
import time

import grpc
import pytest

from helios_jax.server.client import Client
from tests.server.malformed import storm
from tests.server.processes import LLM_OPTIONS, Server
from tests.server.soak import KINDS, soak
from tests.server.test_calls import GREEDY, assert_idle

# A wider set of sampling parameters is compiled for, while everybody waits.
COMPILE_SECONDS = 240


def check_soak(server: Server, client: Client, num_streams: int, seconds: float) -> None:
    """Runs the soak, and looks at what it left."""
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    # Every kind of program and buffer is there before the memory is looked at.
    asyncio.run(soak(server.port, num_streams, min(seconds / 4, 15), seed + 1))
    assert_idle(client)
    before, memory = len(server.calls()), server.memory_bytes
    counts = asyncio.run(soak(server.port, num_streams, seconds, seed))
    assert_idle(client)
    print(dict(counts), f"memory {memory >> 20} -> {server.memory_bytes >> 20} MiB")
    for kind in KINDS:
        assert any(ended.startswith(f"{kind}:") for ended in counts), f"{kind}, seed {seed}"
    assert counts["reads: finished"] > 0 and counts["cancels: CANCELLED"] > 0
    # One line for each call, and each that finished says so there, once.
    calls = [
        call
        for call in server.calls()[before:]
        if call["method"] in ("Generate", "GenerateOnce") and "request_id" in call
    ]
    assert len({call["request_id"] for call in calls}) == len(calls)
    finished = [call for call in calls if call["code"] == "OK"]
    assert len(finished) >= sum(n for ended, n in counts.items() if ended.endswith("finished"))
    assert all(call["finish_reason"] == "length" for call in finished)
    assert server.memory_bytes < memory * 1.05, f"seed {seed}"


def check_storm(server: Server, client: Client, number: int) -> None:
    wanted = client.generate("Hello", **GREEDY)
    seed = time.time_ns() % 2**32
    print(f"seed {seed}")
    with grpc.insecure_channel(server.address) as channel:
        counts = storm(channel, number, seed)
    print(dict(counts))
    assert_idle(client, COMPILE_SECONDS)
    assert client.is_ready()
    assert client.generate("Hello", **GREEDY).outputs == wanted.outputs
    kinds = {ended.split(":")[0] for ended in counts}
    assert {"random", "cut", "changed", "extreme"} <= kinds
    assert counts["extreme: INVALID_ARGUMENT"] > 0 and counts["random: INVALID_ARGUMENT"] > 0
    # No fault that was not foreseen.
    assert not [line for line in server.lines() if "exception" in line]


def test_a_short_soak(server, client):
    check_soak(server, client, num_streams=12, seconds=4)


def test_a_small_storm(server, client):
    check_storm(server, client, 600)


@pytest.mark.slow
def test_the_long_soak(start):
    server = start(llm=LLM_OPTIONS | {"max_num_rows": 64}, write_timeout_seconds=5)
    with Client(server.address) as client:
        check_soak(server, client, num_streams=64, seconds=120)


@pytest.mark.slow
def test_the_long_storm(start):
    server = start()
    with Client(server.address) as client:
        check_storm(server, client, 100_000)
