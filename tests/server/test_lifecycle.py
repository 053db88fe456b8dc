"""Does a server load, drain, die and come back without losing what it accepted?"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import grpc
import pytest
import trustme
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from helios_jax.server import run
from helios_jax.server.client import Client, error_details
from helios_jax.server.config import ServerConfig
from helios_jax.server.errors import RpcError
from helios_jax.server.gate import Call, State
from helios_jax.server.proto import SERVICE
from helios_jax.server.proto import inference_pb2 as pb
from helios_jax.server.proto.inference_pb2_grpc import InferenceStub
from helios_jax.server.security import Tokens
from helios_jax.server.service import _Active
from tests.server.processes import ROOT
from tests.server.test_calls import GREEDY, LONG, failure
from tests.server.test_service import fake_llm

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_server_is_killed_comes_back_and_drains(start):
    """One that retries sees nothing of the kill but time; SIGTERM loses nothing that began."""
    port = free_port()
    first = start(port=port)
    with Client(first.address) as client:
        wanted = client.generate("Hi", **LONG).outputs[0]
        # In the middle of its stream; the second one while the new server loads.
        with Client(first.address, retry_seconds=60) as patient:
            stream = patient.stream("Hi", **LONG)
            begun = [next(stream)]
            first.kill()
            assert failure(lambda: client.generate("Hi", **GREEDY)).code() is (
                grpc.StatusCode.UNAVAILABLE
            )
            second = start(port=port, llm={"seconds": 1}, waits=False, grace_seconds=20)
            check_loading(second)
            parts = begun + list(stream)
        assert "".join(part.text for part in parts) == wanted.text
        assert sum((part.token_ids for part in parts), []) == wanted.token_ids
        assert parts[-1].request_output.outputs == [wanted]
    drain(second)


def check_loading(server) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub, health = InferenceStub(channel), health_pb2_grpc.HealthStub(channel)
        error = failure(lambda: stub.GenerateOnce(pb.GenerateRequest(text="Hi")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "loading" in error.details()
        assert any(isinstance(d, error_details_pb2.RetryInfo) for d in error_details(error))
        info = stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.state == pb.SERVER_STATE_LOADING and info.limits.max_model_len == 0
        assert health.Check(health_pb2.HealthCheckRequest()).status == SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert [next(watch).status, next(watch).status] == [NOT_SERVING, SERVING]


def drain(server) -> None:
    """SIGTERM with eight streams in flight, six of which still wait."""
    with grpc.insecure_channel(server.address) as channel:
        stub, health = InferenceStub(channel), health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        assert next(watch).status == SERVING
        request = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(**LONG))
        streams = [stub.Generate(request) for _ in range(8)]
        for stream in streams:
            assert next(stream).WhichOneof("event") == "started"
        server.signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        error = failure(lambda: stub.GenerateOnce(request))
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()
        kinds = [[event.WhichOneof("event") for event in stream] for stream in streams]
        assert [each.count("finished") for each in kinds] == [1] * 8
        assert all(each[-1] == "finished" for each in kinds)
    assert server.process.wait(20) == 0
    assert server.wait_for("draining")["requests"] == 8
    assert server.lines()[-1]["message"] == "stopped"


def test_certificates_tokens_and_faults(start, server_folder):
    """One server for all of them; its model gives no numbers, so that nothing is generated."""
    authority, stranger = trustme.CA(), trustme.CA()
    files = {}
    for name, pem in {
        "ca": authority.cert_pem,
        "other_ca": stranger.cert_pem,
        "cert": authority.issue_cert("localhost").private_key_and_cert_chain_pem,
        "mine": authority.issue_cert("me@example.org").private_key_and_cert_chain_pem,
        "forged": stranger.issue_cert("me@example.org").private_key_and_cert_chain_pem,
    }.items():
        files[name] = server_folder / f"{name}.pem"
        pem.write_to_path(files[name])
    tokens = server_folder / "tokens"
    tokens.write_text("# ours\nfirst-token\n\n  second-token  \n")
    server = start(
        llm={"nan": True}, tls_cert=str(files["cert"]), tls_key=str(files["cert"]),
        tls_client_ca=str(files["ca"]), auth_token_file=str(tokens), host="localhost",
        max_requests_per_client=2, grace_seconds=0.5,
    )  # fmt: skip
    address = f"localhost:{server.port}"
    mine = dict(tls_ca=files["ca"], tls_cert=files["mine"], tls_key=files["mine"])
    for token in ("first-token", "second-token"):
        with Client(address, token=token, **mine) as client:
            assert client.is_ready()
            error = failure(lambda client=client: client.generate("Hi", **GREEDY))
            assert error.code() is grpc.StatusCode.INTERNAL and "NaN" in error.details()
            error = failure(lambda client=client: list(client.stream("Hi", **GREEDY)))
            assert error.code() is grpc.StatusCode.INTERNAL
            assert client.server_info().load.num_used_blocks == 0
    for token in (None, "", "first-toke", "first-token2", "# ours"):
        with Client(address, token=token, **mine) as client:
            error = failure(client.server_info)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED, token
            assert client.is_ready(), "a probe needs no token"
    refused = server.calls(code="UNAUTHENTICATED", method="GetServerInfo")
    assert len(refused) == 5 and refused[0]["client"].startswith("certificate:")
    counted = server.metrics()
    label = '{code="UNAUTHENTICATED",method="GetServerInfo",model_name="tiny"}'
    assert counted["helios:grpc_calls_total" + label] == 5
    # What the model could not do is no success.
    assert not [name for name in counted if name.startswith("helios:request_success_total")]
    with Client(address, **mine) as client:
        reflected = reflection_pb2_grpc.ServerReflectionStub(client._channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        error = failure(lambda: list(reflected.ServerReflectionInfo(iter([asked]))))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
    for wrong in (
        dict(tls_ca=files["ca"]),
        dict(tls_ca=files["ca"], tls_cert=files["forged"], tls_key=files["forged"]),
        mine | dict(tls_ca=files["other_ca"]),
        {},
    ):
        with Client(address, token="first-token", **wrong) as client:
            assert failure(client.server_info).code() is grpc.StatusCode.UNAVAILABLE
    check_concurrency(server, address, mine)


def check_concurrency(server, address: str, mine: dict) -> None:
    """A client may have two requests at a time."""
    with Client(address, token="first-token", **mine) as client:
        errors = []

        def ask() -> None:
            errors.append(failure(lambda: client.generate("Hi", **GREEDY)).code())

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(errors) == {grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED}
    (refused,) = {call["reason"] for call in server.calls(code="RESOURCE_EXHAUSTED")}
    assert refused == "TOO_MANY_REQUESTS"
    assert all(call["client"].startswith("certificate:") for call in server.calls(code="INTERNAL"))
    assert server.stop() == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(port=70000), "port=70000: must be in 0..65535"),
        (dict(tls_cert=ROOT / "x"), "tls_cert='.*x', tls_key=None: must be given together"),
        (dict(tls_client_ca=ROOT / "x"), "tls_client_ca='.*x': needs tls_cert and tls_key"),
        (dict(grace_seconds=-1.0), "grace_seconds=-1.0: must be a finite number, at least 0"),
        (dict(max_requests_per_client=0), "max_requests_per_client=0: must be at least 1"),
        (dict(record=ROOT / "README.md"), "record='.*README.md': exists already"),
        (dict(max_message_bytes=1), "max_message_bytes=1: must be in 4096"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ServerConfig(**options)


def test_tokens_are_read_and_compared(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("\n# nothing\n")
    with pytest.raises(ValueError, match="holds no token"):
        Tokens.read(file)
    with pytest.raises(ValueError, match="cannot be read"):
        Tokens.read(tmp_path / "absent")
    tokens = Tokens(["a", "b"])
    assert tokens.find([("authorization", "Bearer b")]) == 1
    assert tokens.find([("authorization", "bearer  a ")]) == 0
    for metadata in (None, [], [("authorization", "a")], [("authorization", "Bearer ")]):
        assert tokens.find(metadata) is None


def helios(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", "helios_jax.cli.main", *arguments], env=environment, cwd=ROOT,
        capture_output=True, text=True, timeout=120, **options,
    )  # fmt: skip


def test_what_keeps_a_server_from_starting_is_one_message():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = helios("serve", "smollm2-135m", "--port", str(port))
    assert done.returncode == 1
    assert f"port={port}: cannot be listened on" in done.stderr
    assert "Traceback" not in done.stderr
    done = helios("serve", "no/such/model", "--port", "0", "--log-format", "json")
    assert done.returncode == 2 and "no/such/model" in done.stderr.splitlines()[-1]
    messages = [json.loads(line)["message"] for line in done.stderr.splitlines()[:-1]]
    assert messages[0] == "listening" and messages[-1] == "stopped"


def test_a_signal_while_loading_ends_it_well(start):
    server = start(llm={"seconds": 30}, waits=False)
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 10
    assert server.lines()[-1]["message"] == "stopped"


class DyingEngine:
    """Its thread ends as soon as it is started."""

    def start(self, on_failure) -> None:
        thread = threading.Thread(target=on_failure, args=[MemoryError("no room for the KV pool")])
        thread.start()

    def stop(self) -> None: ...

    def stop_recording(self) -> None: ...


def test_a_server_ends_with_its_engine_and_says_why(caplog):
    """Rather than be found healthy and answer nobody; `grace_seconds` are not waited for."""
    llm = SimpleNamespace(
        engine=DyingEngine(), tokenizer=SimpleNamespace(fingerprint=str), dtype_report=""
    )

    async def work() -> None:
        config = ServerConfig(port=0, warm_up=False, grace_seconds=60.0)
        async with asyncio.timeout(10):
            await run._Server(config).live(lambda: llm)

    with pytest.raises(MemoryError, match="no room for the KV pool"), caplog.at_level("INFO"):
        asyncio.run(work())
    messages = [record.message for record in caplog.records]
    assert "the engine ended" in messages and messages[-1] == "stopped"


@pytest.mark.skipif(sys.platform != "linux", reason="a priority is the whole process's")
def test_what_computes_gives_way_to_what_sends():
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, found = priority(), []

    def load() -> None:
        run._give_way()
        child = threading.Thread(target=lambda: found.append(priority()))
        child.start()
        child.join()

    loading = threading.Thread(target=load)
    loading.start()
    loading.join()
    assert found == [min(before + 5, 19)] and priority() == before


@pytest.mark.parametrize("grace_seconds, signals", [(0.05, 1), (60.0, 2)])
def test_what_does_not_end_in_time_is_cut_off(grace_seconds, signals):
    """When the grace period is over, or somebody insists."""

    async def work() -> None:
        server = run._Server(ServerConfig(grace_seconds=grace_seconds))
        gate, service, active = server._gate, server._service, _Active("id", number=7)
        service.llm, aborted = fake_llm()
        gate.state = State.SERVING
        service._active["client", "id"] = active
        gate._enter(Call("Generate", "client"), pb.GenerateRequest())
        for _ in range(signals):
            server._signalled()
        async with asyncio.timeout(10):
            await server._drain()
            with pytest.raises(RpcError, match="shut down before the request was done") as raised:
                await active.inbox.read()
        assert raised.value.code is grpc.StatusCode.UNAVAILABLE
        assert aborted == [7]
        with pytest.raises(RpcError, match="takes no more requests"):
            gate._enter(Call("Generate", "client"), pb.GenerateRequest())

    asyncio.run(work())
