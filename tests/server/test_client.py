"""Does the client put a stream together that breaks off and begins again, and know when to stop?"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from helios_jax.server.client import Client, _Assembler
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
        assembler, parts = _Assembler("Go"), []
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
    assembler = _Assembler([1])
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


def test_a_certificate_without_its_key_is_refused():
    with pytest.raises(ValueError, match="a certificate of one's own needs all three"):
        Client(tls_cert="x")
