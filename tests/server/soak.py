"""Many clients that cancel, run late, read slowly or vanish: what a server has to outlive."""

import asyncio
import random
import socket
import struct
import time
from collections import Counter

import grpc
import grpc.aio

from helios_jax.server.proto import inference_pb2 as pb
from helios_jax.server.proto.inference_pb2_grpc import InferenceStub

KINDS = ("reads", "cancels", "late", "slow", "drops", "unary", "unary cancels")
# Of which a server's own failure is none.
_EXPECTED = {
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}


async def soak(port: int, num_streams: int, seconds: float, seed: int) -> Counter[str]:
    """Keeps so many requests going for so long; how they ended, by kind.

    Raises:
      AssertionError: a stream got stuck, ended twice, or with an error of the server's.
    """
    ends = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    async with asyncio.TaskGroup() as group:
        for number in range(num_streams):
            rng = random.Random(f"{seed} {number}")
            group.create_task(_one_after_the_other(port, rng, ends, counts))
    return counts


async def _one_after_the_other(
    port: int, rng: random.Random, ends: float, counts: Counter[str]
) -> None:
    while time.monotonic() < ends:
        kind = rng.choice(KINDS)
        async with _Pipe(port) as pipe:
            address = f"127.0.0.1:{pipe.port if kind == 'drops' else port}"
            # A connection of its own, as other clients' would be.
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(address, options) as channel:
                async with asyncio.timeout(60):
                    counts[f"{kind}: {await _request(channel, kind, pipe, rng)}"] += 1


async def _request(channel: grpc.aio.Channel, kind: str, pipe: "_Pipe", rng: random.Random) -> str:
    stub = InferenceStub(channel)
    sampling = pb.SamplingParams(
        max_tokens=rng.randint(1, 200), temperature=rng.choice([0.0, 1.0]), ignore_eos=True
    )
    prompt = pb.TokenIds(ids=[rng.randrange(256) for _ in range(rng.randint(1, 50))])
    request = pb.GenerateRequest(token_ids=prompt, sampling=sampling)
    if rng.random() < 0.3:
        request.scheduling.ttft_target_seconds = rng.uniform(0.01, 1)
    timeout = rng.uniform(0.001, 0.5) if kind == "late" else None
    num_events = rng.randint(1, 10)
    try:
        if kind.startswith("unary"):
            call = stub.GenerateOnce(request)
            if kind == "unary cancels":
                await asyncio.sleep(rng.uniform(0, 0.2))
                call.cancel()
            answer = await call
            assert answer.outputs[0].end.num_tokens == sampling.max_tokens
            return "finished"
        stream, finished, tokens = stub.Generate(request, timeout=timeout), 0, 0
        async for event in stream:
            assert not finished, "nothing comes after the terminal message"
            finished += event.WhichOneof("event") == "finished"
            tokens += len(event.tokens.token_ids)
            num_events -= 1
            if kind == "slow":
                await asyncio.sleep(rng.uniform(0, 0.05))
            elif kind == "cancels" and not num_events:
                stream.cancel()
            elif kind == "drops" and not num_events:
                pipe.drop()
        assert finished == 1, "a stream ends with its terminal message"
        assert tokens == sampling.max_tokens
        return "finished"
    except grpc.aio.AioRpcError as error:
        assert error.code() in _EXPECTED, f"{kind}: {error}"
        return error.code().name
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return "CANCELLED"


class _Pipe:
    """A way to the server that can be cut without a goodbye."""

    def __init__(self, port: int):
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "_Pipe":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.drop()

    def drop(self) -> None:
        """Resets all connections."""
        for writer in self._writers:
            raw = writer.get_extra_info("socket")
            if raw is not None and raw.fileno() >= 0:
                # No orderly end: the peer gets a reset.
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, there_writer]
        await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except (ConnectionError, OSError):
        pass
    finally:
        writer.close()
