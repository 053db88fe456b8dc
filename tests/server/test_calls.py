"""Do clients of a real server get what the engine would give them, and the right error else?"""

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jax
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from helios_jax import SamplingParams
from helios_jax.server.client import AsyncClient, Client, error_details
from helios_jax.server.proto import SERVICE
from helios_jax.server.proto import inference_pb2 as pb
from tests import tiny
from tests.server.processes import LLM_OPTIONS
from tests.test_readme import EXAMPLES

GREEDY = dict(temperature=0, max_tokens=12, ignore_eos=True)
# As long as the model goes: a second's work for a few of them.
LONG = dict(temperature=0, max_tokens=1000, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(server_folder):
    """The same model in this process; its programs are those that the server has compiled."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(server_folder / "xla"))
    yield tiny.llm(**LLM_OPTIONS)
    jax.config.update("jax_compilation_cache_dir", before)


def failure(call: Callable[[], Any]) -> Any:
    """The error of a call that must fail."""
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value


def detail(error: grpc.RpcError, kind: Any) -> Any:
    found = [each for each in error_details(error) if isinstance(each, kind)]
    assert len(found) == 1, found
    return found[0]


def eventually(check: Callable[[], bool], seconds: float = 10) -> None:
    ends = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < ends, "it does not become true"
        time.sleep(0.01)


def assert_idle(client: Client, seconds: float = 10) -> None:
    """No request in flight and no block in use, within a moment."""

    def is_idle() -> bool:
        load = client.server_info().load
        return not (
            load.num_requests or load.num_used_blocks or load.num_running or load.num_waiting
        )

    eventually(is_idle, seconds)


# What is generated


def test_tokens_are_those_of_the_engine_in_process(client, stub, llm):
    """Greedy and drawn, with text and ids, one output and several, streamed and at once."""
    cases: list[tuple[Any, dict[str, Any]]] = [
        ([1, 2, 3], GREEDY),
        ("Hällo", dict(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)),
        ("Hi", dict(temperature=0.9, seed=-5, top_p=0.9, top_k=40, n=2, max_tokens=9)),
    ]
    for prompt, options in cases:
        wanted = llm.generate([prompt], SamplingParams(**options))[0]
        found = client.generate(prompt, **options)
        assert found.outputs == wanted.outputs and found.usage == wanted.usage
        assert 0 < found.timings.ttft_seconds <= found.timings.total_seconds
        assert found.acceptance is None
        if options.get("n", 1) == 1:
            parts = list(client.stream(prompt, **options))
            assert "".join(part.text for part in parts) == wanted.outputs[0].text
            assert sum((part.token_ids for part in parts), []) == wanted.outputs[0].token_ids
            assert parts[-1].request_output.outputs == wanted.outputs
    assert_idle(client)


def test_a_stream_is_started_then_tokens_then_finished(stub, client):
    request = pb.GenerateRequest(
        request_id="mine", text="Hello", sampling=pb.SamplingParams(n=2, seed=1, max_tokens=10)
    )
    events = list(stub.Generate(request))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["tokens"] * (len(kinds) - 2), "finished"]
    assert events[0].started.request_id == "mine"
    assert events[0].started.usage == pb.Usage(prompt_tokens=5)
    finished = events[-1].finished
    assert [end.index for end in finished.outputs] == [0, 1]
    streamed = [[], []]
    for event in events[1:-1]:
        streamed[event.tokens.index] += event.tokens.token_ids
    assert [len(ids) for ids in streamed] == [end.num_tokens for end in finished.outputs]
    assert finished.usage.completion_tokens == sum(map(len, streamed))
    assert finished.timings.total_seconds > 0 and not finished.HasField("acceptance")
    at_once = stub.GenerateOnce(request)
    assert [list(output.token_ids) for output in at_once.outputs] == streamed
    assert [output.end for output in at_once.outputs] == list(finished.outputs)


def test_a_chat_is_its_rendered_prompt(client, llm):
    text = llm.tokenizer.apply_chat_template(MESSAGES)
    wanted = client.generate(text, **GREEDY)
    assert client.chat(MESSAGES, **GREEDY).outputs == wanted.outputs
    assert client.tokenize(text) == llm.tokenizer.encode(text)
    without = client.chat(MESSAGES, template_variables={"add_generation_prompt": False}, **GREEDY)
    assert without.usage.prompt_tokens < wanted.usage.prompt_tokens
    info = client.model_info()
    assert info.has_chat_template and info.model == "tiny"
    assert info.tokenizer_fingerprint == llm.tokenizer.fingerprint()


def test_text_to_ids_and_back(client, stub):
    ids = client.tokenize("Grüße 🙂")
    assert client.detokenize(ids) == "Grüße 🙂"
    assert client.detokenize([*ids, tiny.EOS], skip_special_tokens=False).endswith("<eos>")
    conversation = pb.Conversation(messages=[pb.ChatMessage(role="user", content="Hi")])
    rendered = stub.Tokenize(pb.TokenizeRequest(conversation=conversation))
    assert rendered.text == "<|user|>Hi\n<|assistant|>"
    assert list(rendered.token_ids) == client.tokenize(rendered.text)
    assert rendered.max_model_len == LLM_OPTIONS["max_model_len"]


def test_an_event_loop_has_the_same(server, client):
    import asyncio

    wanted = client.generate("Hello", **GREEDY)

    async def work() -> None:
        async with AsyncClient(server.address) as asynchronous:
            assert await asynchronous.is_ready()
            outputs = await asyncio.gather(
                *(asynchronous.generate("Hello", **GREEDY) for _ in range(3))
            )
            assert [output.outputs for output in outputs] == [wanted.outputs] * 3
            parts = [part async for part in asynchronous.stream("Hello", **GREEDY)]
            assert parts[-1].request_output.outputs == wanted.outputs
            assert (await asynchronous.chat(MESSAGES, **GREEDY)).outputs[0].token_ids
            assert await asynchronous.detokenize(await asynchronous.tokenize("abc")) == "abc"
            assert (await asynchronous.model_info()).vocab_size == 258
            with pytest.raises(grpc.RpcError) as raised:
                await asynchronous.abort("nobody's")
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
            # A task that is cancelled takes its request along.
            task = asyncio.ensure_future(asynchronous.generate("x", **LONG))
            while not (await asynchronous.server_info()).load.num_requests:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(work())
    assert_idle(client)


# Errors


@pytest.mark.parametrize(
    "request_, field, words",
    [
        (dict(), "prompt", "prompt is missing: set text or token_ids"),
        (dict(text=""), "prompt", "prompt is empty: must hold at least one token"),
        (dict(token_ids=pb.TokenIds()), "prompt", "prompt is empty"),
        (dict(token_ids=pb.TokenIds(ids=[258])), "prompt", "token id 258: must be in 0..257"),
        (dict(token_ids=pb.TokenIds(ids=[-1])), "prompt", "token id -1: must be in 0..257"),
        (dict(text="x" * 256), "prompt", "256 tokens: max_model_len=256 must leave room"),
        (dict(sampling=dict(top_p=1.5)), "sampling.top_p", r"top_p=1.5: must be in \(0, 1]"),
        (dict(sampling=dict(temperature=float("nan"))), "sampling.temperature", "finite"),
        (dict(sampling=dict(max_tokens=0)), "sampling.max_tokens", "max_tokens=0: must be"),
        (dict(sampling=dict(n=-3)), "sampling.n", "n=-3: must be an integer >= 1"),
        (dict(sampling=dict(stop=[""])), "sampling.stop", "stop contains ''"),
        (dict(sampling=dict(stop=["a"] * 17)), "sampling.stop", "17 entries: must be at most 16"),
        (dict(sampling=dict(stop=["a" * 257])), "sampling.stop", "257 characters in one string"),
        (
            dict(sampling=dict(logit_bias={258: 1.0})),
            "sampling.logit_bias",
            "logit_bias contains.*258",
        ),
        (
            dict(sampling=dict(allowed_token_ids=pb.TokenIds())),
            "sampling.allowed_token_ids",
            r"allowed_token_ids=\[]: must name at least one",
        ),
        (
            dict(scheduling=dict(ttft_target_seconds=-1)),
            "scheduling.ttft_target_seconds",
            "ttft_target_seconds=-1.0: must be above 0",
        ),
        (dict(scheduling=dict(priority=float("inf"))), "scheduling.priority", "finite number"),
        (dict(scheduling=dict(priority=1e300)), "scheduling.priority", "finite.*at most 1e"),
        (dict(sampling=dict(logit_bias={1: 1e300})), "sampling.logit_bias", "must be a finite"),
        (dict(sampling=dict(repetition_penalty=1e-300)), "sampling.repetition_penalty", "must be"),
        (dict(request_id="x" * 129), "request_id", "129 characters: must be at most 128"),
    ],
)
def test_what_breaks_a_rule_names_the_field(stub, request_, field, words):
    fields = {"text": "Hi"} if not {"text", "token_ids"} & request_.keys() and request_ else {}
    request = pb.GenerateRequest(**fields, **request_)
    for method in (stub.GenerateOnce, lambda r: list(stub.Generate(r))):
        error = failure(lambda method=method: method(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(words, error.details())
        (violation,) = detail(error, error_details_pb2.BadRequest).field_violations
        assert violation.field == field
        info = detail(error, error_details_pb2.ErrorInfo)
        assert info.domain == "helios.v1" and info.metadata["field"] == field


def test_other_methods_name_the_field_too(stub):
    conversation = pb.Conversation(messages=[pb.ChatMessage(role="user", content="Hi")])
    conversation.template_variables["chat_template"] = "{{ 1 }}"
    cases = [
        (lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=[999])), "token_ids"),
        (lambda: stub.Tokenize(pb.TokenizeRequest()), "input"),
        (lambda: list(stub.Chat(pb.ChatRequest())), "conversation.messages"),
        (
            lambda: list(stub.Chat(pb.ChatRequest(conversation=conversation))),
            "conversation.template_variables",
        ),
        (
            lambda: list(
                stub.Chat(pb.ChatRequest(conversation=pb.Conversation(messages=[pb.ChatMessage()])))
            ),
            "conversation.messages",
        ),
    ]
    for call, field in cases:
        error = failure(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        assert detail(error, error_details_pb2.ErrorInfo).metadata["field"] == field


def test_what_cannot_be_is_told_apart(server, client, stub):
    """Never fits; not implemented; not found; not parsed; no such method; too large."""
    error = failure(lambda: client.generate("Hi", n=9))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [type(each) for each in error_details(error)] == [error_details_pb2.ErrorInfo]
    error = failure(lambda: client.generate("Hi", logprobs=-1))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    error = failure(lambda: client.abort("no such request"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    with grpc.insecure_channel(server.address) as channel:
        for name in ("GenerateOnce", "Tokenize"):
            raw = channel.unary_unary(f"/{SERVICE}/{name}")
            # A string that is no UTF-8, and a message that is cut off.
            for data in (b"\x0a\x01\xff", b"\x0a\x7fabc"):
                error = failure(lambda raw=raw, data=data: raw(data))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "does not parse" in error.details()
        raw = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert failure(lambda: raw(b"\xff")).code() is grpc.StatusCode.INVALID_ARGUMENT
        for path in (f"/{SERVICE}/Nothing", "/other.Service/Generate"):
            error = failure(lambda path=path: channel.unary_unary(path)(b""))
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    error = failure(lambda: client.generate("x" * (5 << 20)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    # Just below the limit it is read, and said to be too long.
    error = failure(lambda: client.generate([1] * 1_000_000))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "max_model_len" in error.details()
    assert client.is_ready()


# Requests that end early


def test_a_deadline_ends_a_request_and_frees_its_blocks(server, client):
    assert failure(lambda: client.generate("Hi", timeout=0.001, **LONG)).code() is (
        grpc.StatusCode.DEADLINE_EXCEEDED
    )

    def late(_: int) -> str:
        try:
            list(client.stream("Hi", timeout=0.03, **LONG))
        except grpc.RpcError as error:
            return error.code().name
        return "finished"

    # All of them share two places, so that some wait when their time is up.
    with ThreadPoolExecutor(8) as threads:
        ends = list(threads.map(late, range(8)))
    assert ends.count("DEADLINE_EXCEEDED") >= 6 and set(ends) <= {"DEADLINE_EXCEEDED", "finished"}
    assert_idle(client)
    eventually(lambda: bool(server.calls(code="DEADLINE_EXCEEDED", method="Generate")))


@pytest.mark.parametrize("kind", ["stream", "unary", "channel"])
def test_a_client_that_goes_away_frees_everything(server, client, kind):
    drawn = server.metrics()['helios:generation_tokens_total{model_name="tiny"}']
    num_cancelled = len(server.calls(code="CANCELLED"))
    channel = grpc.insecure_channel(server.address)
    stub = pb_stub(channel)
    request = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(**LONG))
    calls = []
    for _ in range(6):
        if kind == "unary":
            calls.append(stub.GenerateOnce.future(request))
        else:
            calls.append(stub.Generate(request))
            assert next(calls[-1]).WhichOneof("event") == "started"
    eventually(lambda: client.server_info().load.num_requests == 6)
    if kind == "channel":
        channel.close()
    else:
        for call in calls:
            call.cancel()
    assert_idle(client)
    after = server.metrics()['helios:generation_tokens_total{model_name="tiny"}']
    assert after - drawn < 2 * 254, "they were aborted before the first two had ended"
    eventually(lambda: len(server.calls(code="CANCELLED")) == num_cancelled + 6)
    channel.close()


def pb_stub(channel: grpc.Channel) -> Any:
    from helios_jax.server.proto.inference_pb2_grpc import InferenceStub

    return InferenceStub(channel)


def test_abort_ends_the_call_of_ones_own(client, stub):
    request = pb.GenerateRequest(
        request_id="long one", text="Hi", sampling=pb.SamplingParams(**LONG)
    )
    stream = stub.Generate(request)
    assert next(stream).started.request_id == "long one"
    error = failure(lambda: client.generate("Hi", request_id="long one", **GREEDY))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    client.abort("long one")
    error = failure(lambda: list(stream))
    assert error.code() is grpc.StatusCode.CANCELLED and "aborted" in error.details()
    assert_idle(client)


def test_a_full_queue_says_when_to_come_back(server, client, stub):
    request = pb.GenerateRequest(text="Hi", sampling=pb.SamplingParams(**LONG))
    streams = [stub.Generate(request) for _ in range(LLM_OPTIONS["max_num_rows"])]
    for stream in streams:
        next(stream)
    error = failure(lambda: client.generate("Hi", **GREEDY))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.ErrorInfo).reason == "QUEUE_FULL"
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    with Client(server.address, retry_seconds=30) as patient:
        assert patient.generate("Hi", **GREEDY).outputs[0].token_ids
    for stream in streams:
        assert list(stream)[-1].WhichOneof("event") == "finished"
    assert_idle(client)


def test_a_client_that_does_not_read_stalls_nobody(server, client):
    """Its messages gather on the server, and after a while the request is ended."""
    options = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(server.address, options) as channel:
        request = pb.GenerateRequest(
            request_id="unread", text="Hi", sampling=pb.SamplingParams(**LONG)
        )
        stream = pb_stub(channel).Generate(request)
        next(stream)
        started = time.monotonic()
        for _ in range(5):
            assert client.generate("Hello", timeout=2, **GREEDY).outputs[0].token_ids
        assert time.monotonic() - started < 2
        eventually(lambda: bool(server.calls(request_id="unread")))
        (call,) = server.calls(request_id="unread")
        assert call["code"] == "RESOURCE_EXHAUSTED" and call["reason"] == "SLOW_READER"
        assert_idle(client)
        stream.cancel()


# What belongs to a server


def test_health_is_checked_and_watched(server):
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        error = failure(lambda: health.Check(health_pb2.HealthCheckRequest(service="other")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service="other"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


def test_a_generic_client_needs_reflection_alone(server, client):
    """Messages and methods as the server describes them, as grpcurl does it."""
    with grpc.insecure_channel(server.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        service = pool.FindServiceByName(SERVICE)
        assert {method.name for method in service.methods} == {
            "Generate", "GenerateOnce", "Chat", "Tokenize", "Detokenize", "GetModelInfo",
            "GetServerInfo", "Abort",
        }  # fmt: skip
        method = service.methods_by_name["Generate"]
        make = message_factory.GetMessageClass
        asked = make(method.input_type)(text="Hello")
        asked.sampling.temperature = 0
        asked.sampling.max_tokens = 12
        asked.sampling.ignore_eos = True
        call = channel.unary_stream(
            f"/{SERVICE}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=make(method.output_type).FromString,
        )
        ids = [token for event in call(asked) for token in event.tokens.token_ids]
    assert ids == client.generate("Hello", **GREEDY).outputs[0].token_ids


def test_prometheus_is_told(server, client):
    def read() -> dict[str, float]:
        return {
            name.replace('{model_name="tiny"}', ""): value
            for name, value in server.metrics().items()
        }

    before = read()
    client.generate("Hello", **GREEDY)
    failure(lambda: client.generate("Hi", top_p=2))
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["helios:generation_tokens_total"] == GREEDY["max_tokens"]
    assert grown["helios:e2e_request_latency_seconds_count"] == 1
    assert grown["helios:time_to_first_token_seconds_count"] == 1
    assert grown["helios:request_prompt_tokens_sum"] == 5
    label = '{code="%s",method="GenerateOnce",model_name="tiny"}'
    assert grown["helios:grpc_calls_total" + label % "OK"] == 1
    assert grown["helios:grpc_calls_total" + label % "INVALID_ARGUMENT"] == 1
    assert grown['helios:request_success_total{finished_reason="length",model_name="tiny"}'] == 1
    assert after["helios:kv_cache_usage_perc"] == after["helios:num_requests_running"] == 0
    assert {"helios:num_requests_waiting", "helios:num_preemptions_total"} <= after.keys()


def test_the_log_has_the_request_and_not_its_text(server, client):
    client.generate("a secret", request_id='of "mine"\n', **GREEDY)
    eventually(lambda: bool(server.calls(request_id='of "mine"\n')))
    (call,) = server.calls(request_id='of "mine"\n')
    assert call["code"] == "OK" and call["prompt_tokens"] == 8
    assert call["completion_tokens"] == 12 and call["finish_reason"] == "length"
    assert "secret" not in server.log_path.read_text()


def test_the_example_in_the_readme(server, llm, capsys):
    (example,) = (example for example in EXAMPLES if "client.stream" in example)
    assert "127.0.0.1:50051" in example
    exec(example.replace("127.0.0.1:50051", server.address), {})
    params = SamplingParams(temperature=0, max_tokens=8)
    (wanted,) = llm.generate("The capital of France is", params)
    assert capsys.readouterr().out == wanted.outputs[0].text
