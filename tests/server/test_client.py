"""Does the client put a stream together that breaks off and begins again, and know when to stop?"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from helios_jax.server.client import AsyncClient, Client, _Attempts
from helios_jax.server.client_convert import Assembler
from helios_jax.server.errors import RpcError, unavailable
from helios_jax.server.proto import inference_pb2 as pb
from helios_jax.server.proto.inference_pb2_grpc import (
    InferenceServicer,
    add_InferenceServicer_to_server,
)

WORDS = ["Once ", "upon ", "a ", "time"]


def tokens(index: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(tokens=pb.Tokens(text=WORDS[index], token_ids=[index, index + 10]))


def finished(num_tokens: int) -> pb.GenerateResponse:
    end = pb.OutputEnd(finish_reason=pb.FINISH_REASON_STOP, num_tokens=num_tokens)
    return pb.GenerateResponse(finished=pb.Finished(outputs=[end]))


def test_a_stream_that_begins_again_goes_on_where_it_was():
    for broken_after in range(4):
        assembler, parts = Assembler("Go"), []
        for index in range(broken_after):
            parts += assembler.add(tokens(index))
        assembler.start_over()
        # In other pieces than the first time.
        whole = pb.Tokens(text="".join(WORDS[:2]), token_ids=[0, 10, 1, 11])
        for message in (pb.GenerateResponse(tokens=whole), tokens(2), tokens(3), finished(8)):
            parts += assembler.add(message)
        assert "".join(part.text for part in parts) == "Once upon a time"
        assert sum((part.token_ids for part in parts), []) == [0, 10, 1, 11, 2, 12, 3, 13]
        outcome = parts[-1].request_output
        assert outcome is not None and outcome.outputs[0].text == "Once upon a time"
        assert outcome.prompt == "Go" and outcome.outputs[0].finish_reason == "stop"


def test_tokens_that_a_stop_string_takes_back_are_dropped():
    assembler = Assembler([1])
    parts = [*assembler.add(tokens(0)), *assembler.add(finished(1))]
    assert parts[-1].request_output.outputs[0].token_ids == [0]


class Failing(InferenceServicer):
    """Fails `failures` times with `error`, in the middle of its stream; `seeds` is what came."""

    def __init__(self, error: RpcError, failures: int):
        self.error, self.failures = error, failures
        self.seeds: list[int] = []

    def Generate(self, request, context):
        self.seeds.append(request.sampling.seed)
        yield tokens(0)
        if len(self.seeds) <= self.failures:
            status = self.error.status()
            context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
            context.abort(self.error.code, status.message)
        yield tokens(1)
        yield finished(4)


@pytest.fixture
def serve():
    servers = []

    def serve(servicer: Any) -> str:
        server = grpc.server(ThreadPoolExecutor(2))
        servers.append(server)
        add_InferenceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}"

    yield serve
    for server in servers:
        server.stop(None)


def test_a_call_is_tried_again_while_that_makes_sense(serve):
    away = unavailable("away", "LOADING")
    away.retry_seconds = 0.01
    servicer = Failing(away, failures=2)
    with Client(serve(servicer), retry_seconds=20) as client:
        parts = list(client.stream("Go", temperature=1))
        assert "".join(part.text for part in parts) == "Once upon "
        # The same text came each time.
        assert len(servicer.seeds) == 3 and len(set(servicer.seeds)) == 1
        assert servicer.seeds[0] > 0
    never = Failing(RpcError(grpc.StatusCode.INTERNAL, "broken", "INTERNAL"), failures=9)
    with Client(serve(never), retry_seconds=20) as client:
        with pytest.raises(grpc.RpcError, match="broken"):
            list(client.stream("Go"))
        assert len(never.seeds) == 1
    gone = Failing(away, failures=1000)
    with Client(serve(gone), retry_seconds=0.3) as client:
        began = time.monotonic()
        with pytest.raises(grpc.RpcError, match="away"):
            list(client.stream("Go"))
        assert time.monotonic() - began < 2 and len(gone.seeds) > 1
    once = Failing(away, failures=1000)
    with Client(serve(once)) as client:
        with pytest.raises(grpc.RpcError, match="away"):
            list(client.stream("Go"))
        assert len(once.seeds) == 1


class Asked(InferenceServicer):
    """Answers at once; `requests` is what came."""

    def __init__(self):
        self.requests: list[Any] = []

    def Generate(self, request, context):
        self.requests.append(request)
        yield finished(0)

    Chat = Generate


def test_prompts_and_conversations_are_scheduled_and_sampled_alike(serve):
    asked = Asked()
    options = dict(priority=-2, ttft_target_seconds=0.5, speculate=False, top_k=3, seed=None)
    messages = [{"role": "user", "content": "Hi"}]

    async def work() -> None:
        async with AsyncClient(address) as client:
            await client.chat(messages, request_id="4", **options)
            assert [part async for part in client.stream("Hi", **options)]

    address = serve(asked)
    with Client(address) as client:
        client.chat(messages, **options)
        assert list(client.stream_chat(messages, **options))
        assert list(client.stream("Hi", **options))
    asyncio.run(work())
    assert len(asked.requests) == 5 and asked.requests[3].request_id == "4"
    for request in asked.requests:
        assert request.scheduling == pb.Scheduling(
            priority=-2, ttft_target_seconds=0.5, speculate=False
        )
        assert request.sampling == pb.SamplingParams(top_k=3)


def test_who_is_told_when_to_come_back_comes_no_earlier():
    class Error(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.RESOURCE_EXHAUSTED

        def trailing_metadata(self):
            status = RpcError(self.code(), "full", "QUEUE_FULL", retry_seconds=0.5).status()
            return [("grpc-status-details-bin", status.SerializeToString())]

    delays = [_Attempts(None, 60).delay(Error()) for _ in range(100)]
    assert 0.5 <= min(delays) < max(delays) <= 0.75


def test_a_certificate_without_its_key_is_refused():
    with pytest.raises(ValueError, match="a certificate of one's own needs all three"):
        Client(tls_cert="x")
