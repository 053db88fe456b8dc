"""How does a Python program use a server? `Client`, and `AsyncClient` for event loops.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", temperature=0).outputs[0].text)
        for part in client.stream("Once upon a time", max_tokens=50, timeout=10):
            print(part.text, end="", flush=True)

Sampling parameters are given by name and default as in `helios_jax.SamplingParams`; the server
checks them. `timeout` is the call's deadline, which the server's scheduler works towards. Needs
neither jax nor a model. What goes wrong is a `grpc.RpcError`, whose details `error_details` reads.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from helios_jax.outputs import (
    Acceptance,
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestOutput,
    StreamOutput,
    Timings,
    Usage,
)
from helios_jax.server.proto import SERVICE
from helios_jax.server.proto import inference_pb2 as pb
from helios_jax.server.proto.inference_pb2_grpc import InferenceStub

DEFAULT_ADDRESS = "127.0.0.1:50051"
Prompt = str | Sequence[int]
Message = Mapping[str, str]

_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
_DETAILS_KEY = "grpc-status-details-bin"
_LEAST_DELAY, _MOST_DELAY = 0.1, 2.0
# A server that was started again is found soon.
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000)]
_DETAIL_TYPES = (
    error_details_pb2.BadRequest,
    error_details_pb2.ErrorInfo,
    error_details_pb2.RetryInfo,
)


class _Connection:
    """What both clients share: how to connect, and how to ask.

    Args:
      address: host:port.
      token: bearer token; sent in clear unless there is TLS.
      tls_ca: PEM file of who signs the server's certificate; "" for those that the system trusts;
        None for no TLS.
      tls_cert, tls_key: PEM files of the client's own certificate, where the server wants one.
      retry_seconds: for how long a call is tried again while the server is away, loading or full; a
        stream that broke off goes on where it was. Drawn outputs get a seed for that.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        retry_seconds: float = 0.0,
    ):
        if (tls_cert is None) != (tls_key is None) or (tls_cert is not None and tls_ca is None):
            raise ValueError(
                f"tls_cert={tls_cert!r}, tls_key={tls_key!r}, tls_ca={tls_ca!r}: a certificate of "
                "one's own needs all three"
            )
        self._retry_seconds = retry_seconds
        self._metadata = [("authorization", f"Bearer {token}")] if token is not None else []
        credentials = None
        if tls_ca is not None:
            read = [None if not path else Path(path).read_bytes() for path in (tls_ca, tls_key)]
            own = None if tls_cert is None else Path(tls_cert).read_bytes()
            credentials = grpc.ssl_channel_credentials(read[0], read[1], own)
        self._channel = self._open(address, credentials)
        self._stub = InferenceStub(self._channel)
        # Any: the package has no types.
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def _open(self, address: str, credentials: grpc.ChannelCredentials | None) -> Any:
        raise NotImplementedError

    def _fixed(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """Parameters whose tokens are the same every time, if calls are tried again."""
        seed = sampling.get("seed")
        if self._retry_seconds and seed in (None, -1):
            return sampling | {"seed": random.getrandbits(62)}
        return sampling


class Client(_Connection):
    """Blocking calls; may be shared by threads."""

    def _open(self, address: str, credentials: grpc.ChannelCredentials | None) -> Any:
        if credentials is None:
            return grpc.insecure_channel(address, _OPTIONS)
        return grpc.secure_channel(address, credentials, _OPTIONS)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it what is in flight."""
        self._channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str = "",
        priority: float | None = None,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
        speculate: bool | None = None,
        **sampling: Any,
    ) -> RequestOutput:
        """Completes a prompt, its n outputs side by side.

        Args:
          prompt: text or token ids.
          timeout: seconds that the call may take.
          request_id: for the server's log and `abort`.
          priority, ttft_target_seconds, tpot_target_seconds, speculate: see `Engine.submit`.
          sampling: fields of `SamplingParams`.

        Returns:
          The outcome; `prompt_token_ids` is empty where a text was sent.
        """
        request = _generate_request(
            prompt, request_id, self._fixed(sampling), priority=priority,
            ttft_target_seconds=ttft_target_seconds, tpot_target_seconds=tpot_target_seconds,
            speculate=speculate,
        )  # fmt: skip
        return _outcome(prompt, self._call(self._stub.GenerateOnce, request, timeout))

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str = "",
        priority: float | None = None,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
        speculate: bool | None = None,
        **sampling: Any,
    ) -> Iterator[StreamOutput]:
        """Completes a prompt (n = 1) and yields text as it comes; closing it ends the request."""
        request = _generate_request(
            prompt, request_id, self._fixed(sampling), priority=priority,
            ttft_target_seconds=ttft_target_seconds, tpot_target_seconds=tpot_target_seconds,
            speculate=speculate,
        )  # fmt: skip
        return self._stream(self._stub.Generate, request, timeout, _Assembler(prompt))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        request_id: str = "",
        template_variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Any,
    ) -> RequestOutput:
        """Answers a conversation: messages with `role` and `content`."""
        outcome = None
        for part in self.stream_chat(
            messages, timeout=timeout, request_id=request_id,
            template_variables=template_variables, tools=tools, **sampling,
        ):  # fmt: skip
            outcome = part.request_output
        assert outcome is not None, "a stream ends with its outcome"
        return outcome

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        request_id: str = "",
        template_variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Any,
    ) -> Iterator[StreamOutput]:
        """`stream` for a conversation."""
        request = pb.ChatRequest(
            request_id=request_id,
            conversation=_conversation(messages, template_variables, tools),
            sampling=_sampling(self._fixed(sampling)),
        )
        return self._stream(self._stub.Chat, request, timeout, _Assembler(None))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call(self._stub.Tokenize, request, None).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._call(self._stub.Detokenize, request, None).text

    def model_info(self) -> pb.GetModelInfoResponse:
        """What is served."""
        return self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), None)

    def server_info(self) -> pb.GetServerInfoResponse:
        """Limits, versions and load."""
        return self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), None)

    def abort(self, request_id: str) -> None:
        """Ends one's own request; NOT_FOUND if none in flight has that id."""
        self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id), None)

    def is_ready(self, timeout: float = 5.0) -> bool:
        """Whether the server is there and takes requests."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = self._health.Check(request, timeout=timeout)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        attempts = _Attempts(timeout, self._retry_seconds)
        while True:
            try:
                return method(request, timeout=attempts.time_left(), metadata=self._metadata)
            except grpc.RpcError as error:
                time.sleep(attempts.delay(error))

    def _stream(
        self, method: Any, request: Any, timeout: float | None, assembler: "_Assembler"
    ) -> Iterator[StreamOutput]:
        attempts = _Attempts(timeout, self._retry_seconds)
        # The call begins here and not at the first `next`.
        call = method(request, timeout=attempts.time_left(), metadata=self._metadata)

        def parts() -> Iterator[StreamOutput]:
            nonlocal call
            try:
                while True:
                    try:
                        for response in call:
                            yield from assembler.add(response)
                        return
                    except grpc.RpcError as error:
                        time.sleep(attempts.delay(error))
                    assembler.start_over()
                    call = method(request, timeout=attempts.time_left(), metadata=self._metadata)
            finally:
                call.cancel()

        return parts()


class AsyncClient(_Connection):
    """The same for an event loop."""

    def _open(self, address: str, credentials: grpc.ChannelCredentials | None) -> Any:
        if credentials is None:
            return grpc.aio.insecure_channel(address, _OPTIONS)
        return grpc.aio.secure_channel(address, credentials, _OPTIONS)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection, and with it what is in flight."""
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str = "",
        priority: float | None = None,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
        speculate: bool | None = None,
        **sampling: Any,
    ) -> RequestOutput:
        """See `Client.generate`; cancelling ends the request."""
        request = _generate_request(
            prompt, request_id, self._fixed(sampling), priority=priority,
            ttft_target_seconds=ttft_target_seconds, tpot_target_seconds=tpot_target_seconds,
            speculate=speculate,
        )  # fmt: skip
        return _outcome(prompt, await self._call(self._stub.GenerateOnce, request, timeout))

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str = "",
        priority: float | None = None,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
        speculate: bool | None = None,
        **sampling: Any,
    ) -> AsyncIterator[StreamOutput]:
        """See `Client.stream`; the request begins with the iteration."""
        request = _generate_request(
            prompt, request_id, self._fixed(sampling), priority=priority,
            ttft_target_seconds=ttft_target_seconds, tpot_target_seconds=tpot_target_seconds,
            speculate=speculate,
        )  # fmt: skip
        return self._stream(self._stub.Generate, request, timeout, _Assembler(prompt))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        request_id: str = "",
        template_variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Any,
    ) -> RequestOutput:
        """See `Client.chat`."""
        outcome = None
        async for part in self.stream_chat(
            messages, timeout=timeout, request_id=request_id,
            template_variables=template_variables, tools=tools, **sampling,
        ):  # fmt: skip
            outcome = part.request_output
        assert outcome is not None, "a stream ends with its outcome"
        return outcome

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        request_id: str = "",
        template_variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **sampling: Any,
    ) -> AsyncIterator[StreamOutput]:
        """See `Client.stream_chat`."""
        request = pb.ChatRequest(
            request_id=request_id,
            conversation=_conversation(messages, template_variables, tools),
            sampling=_sampling(self._fixed(sampling)),
        )
        return self._stream(self._stub.Chat, request, timeout, _Assembler(None))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._call(self._stub.Tokenize, request, None)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return (await self._call(self._stub.Detokenize, request, None)).text

    async def model_info(self) -> pb.GetModelInfoResponse:
        """What is served."""
        return await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest(), None)

    async def server_info(self) -> pb.GetServerInfoResponse:
        """Limits, versions and load."""
        return await self._call(self._stub.GetServerInfo, pb.GetServerInfoRequest(), None)

    async def abort(self, request_id: str) -> None:
        """See `Client.abort`."""
        await self._call(self._stub.Abort, pb.AbortRequest(request_id=request_id), None)

    async def is_ready(self, timeout: float = 5.0) -> bool:
        """See `Client.is_ready`."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = await self._health.Check(request, timeout=timeout)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        attempts = _Attempts(timeout, self._retry_seconds)
        while True:
            try:
                return await method(request, timeout=attempts.time_left(), metadata=self._metadata)
            except grpc.RpcError as error:
                await asyncio.sleep(attempts.delay(error))

    async def _stream(
        self, method: Any, request: Any, timeout: float | None, assembler: "_Assembler"
    ) -> AsyncIterator[StreamOutput]:
        attempts = _Attempts(timeout, self._retry_seconds)
        while True:
            call = method(request, timeout=attempts.time_left(), metadata=self._metadata)
            try:
                async for response in call:
                    for part in assembler.add(response):
                        yield part
                return
            except grpc.RpcError as error:
                await asyncio.sleep(attempts.delay(error))
            finally:
                call.cancel()
            assembler.start_over()


def error_details(error: grpc.RpcError) -> list[Any]:
    """The google.rpc details of an error: BadRequest, ErrorInfo, RetryInfo, as far as sent."""
    metadata: Any = error.trailing_metadata() or ()  # pyright: ignore[reportAttributeAccessIssue]
    packed = next((value for key, value in metadata if key == _DETAILS_KEY), None)
    if packed is None:
        return []
    found = []
    for detail in status_pb2.Status.FromString(packed).details:
        found += [message for kind in _DETAIL_TYPES if (message := _unpacked(detail, kind))]
    return found


def _unpacked(detail: any_pb2.Any, kind: Any) -> Any:
    message = kind()
    return message if detail.Unpack(message) else None


class _Attempts:
    """For how long, and how often, one call is tried."""

    def __init__(self, timeout: float | None, retry_seconds: float):
        now = time.monotonic()
        self._deadline = None if timeout is None else now + timeout
        self._last = now + retry_seconds
        self._pause = _LEAST_DELAY

    def time_left(self) -> float | None:
        """Of the call's deadline."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def delay(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next attempt; raises the error where there is to be none."""
        code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
        infos = [d for d in error_details(error) if isinstance(d, error_details_pb2.RetryInfo)]
        may_retry = code is grpc.StatusCode.UNAVAILABLE or bool(infos)
        if infos:
            self._pause = max(infos[0].retry_delay.ToMilliseconds() / 1000, _LEAST_DELAY)
        # Clients that were turned away together come back one by one.
        delay, self._pause = self._pause * random.uniform(0.5, 1), min(self._pause * 2, _MOST_DELAY)
        ends = self._last if self._deadline is None else min(self._last, self._deadline)
        if not may_retry or time.monotonic() + delay > ends:
            raise error
        return delay


class _Assembler:
    """Puts a stream together; one that is begun again goes on where it broke off."""

    def __init__(self, prompt: Prompt | None):
        self._prompt = prompt
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self.start_over()

    def start_over(self) -> None:
        """What comes next is the stream's beginning once more, the same as it was."""
        self._num_known_chars, self._num_known_ids = len(self._text), len(self._token_ids)

    def add(self, response: pb.GenerateResponse) -> Iterator[StreamOutput]:
        """What a message brings that is new."""
        kind = response.WhichOneof("event")
        if kind == "tokens":
            part = self._add_tokens(response.tokens)
            if part.text or part.token_ids:
                yield part
        elif kind == "finished":
            yield self._finish(response.finished)

    def _add_tokens(self, tokens: pb.Tokens) -> StreamOutput:
        chars = min(self._num_known_chars, len(tokens.text))
        ids = min(self._num_known_ids, len(tokens.token_ids))
        self._num_known_chars -= chars
        self._num_known_ids -= ids
        text, token_ids = tokens.text[chars:], list(tokens.token_ids[ids:])
        logprobs = [_position(position) for position in tokens.logprobs[ids:]]
        self._text += text
        self._token_ids += token_ids
        self._logprobs += logprobs
        return StreamOutput(text, token_ids, logprobs=logprobs or None)

    def _finish(self, finished: pb.Finished) -> StreamOutput:
        end = finished.outputs[0]
        del self._token_ids[end.num_tokens :], self._logprobs[end.num_tokens :]
        completion = _completion(end, self._text, self._token_ids, self._logprobs)
        outcome = RequestOutput(outputs=[completion], **_common(self._prompt, finished))
        return StreamOutput("", [], completion.finish_reason, outcome)


def _generate_request(
    prompt: Prompt, request_id: str, sampling: Mapping[str, Any], **scheduling: Any
) -> pb.GenerateRequest:
    chosen = {name: value for name, value in scheduling.items() if value is not None}
    request = pb.GenerateRequest(
        request_id=request_id, sampling=_sampling(sampling), scheduling=pb.Scheduling(**chosen)
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def _sampling(options: Mapping[str, Any]) -> pb.SamplingParams:
    message = pb.SamplingParams()
    known = message.DESCRIPTOR.fields_by_name
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{name} is no sampling parameter; must be one of {', '.join(known)}")
        if value is None:
            continue
        try:
            if name == "logit_bias":
                message.logit_bias.update(value)
            elif name == "allowed_token_ids":
                message.allowed_token_ids.SetInParent()
                message.allowed_token_ids.ids.extend(value)
            elif name == "bad_words_token_ids":
                message.bad_words_token_ids.extend(pb.TokenIds(ids=word) for word in value)
            elif name in ("stop", "bad_words", "stop_token_ids"):
                values = [value] if isinstance(value, str) else value
                getattr(message, name).extend(values)
            else:
                setattr(message, name, value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name}={value!r}: is not what the parameter takes: {error}"
            ) from None
    return message


def _conversation(
    messages: Sequence[Message],
    template_variables: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
) -> pb.Conversation:
    conversation = pb.Conversation(
        messages=[pb.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    )
    variables = dict(template_variables or {})
    if "add_generation_prompt" in variables:
        conversation.add_generation_prompt = variables.pop("add_generation_prompt")
    if variables:
        conversation.template_variables.update(variables)
    for tool in tools:
        conversation.tools.add().update(tool)
    return conversation


def _outcome(prompt: Prompt, response: pb.GenerateOnceResponse) -> RequestOutput:
    outputs = [
        _completion(
            output.end, output.text, list(output.token_ids), [_position(p) for p in output.logprobs]
        )
        for output in response.outputs
    ]
    return RequestOutput(outputs=outputs, **_common(prompt, response))


def _completion(
    end: pb.OutputEnd, text: str, token_ids: list[int], logprobs: list[PositionLogprobs]
) -> CompletionOutput:
    wants_logprobs = end.HasField("cumulative_logprob")
    kind = end.WhichOneof("stop_reason")
    return CompletionOutput(
        index=end.index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=end.cumulative_logprob if wants_logprobs else None,
        logprobs=logprobs if wants_logprobs else None,
        finish_reason=_REASONS[end.finish_reason],
        stop_reason=None if kind is None else getattr(end, kind),
    )


def _common(
    prompt: Prompt | None, message: pb.Finished | pb.GenerateOnceResponse
) -> dict[str, Any]:
    acceptance = None
    if message.HasField("acceptance"):
        got = message.acceptance
        acceptance = Acceptance(
            got.num_draft_tokens, got.num_accepted_tokens, got.num_verifications
        )
    positions = [_position(position) or None for position in message.prompt_logprobs]
    timings = message.timings
    return {
        "prompt": prompt if isinstance(prompt, str) else None,
        "prompt_token_ids": [] if prompt is None or isinstance(prompt, str) else list(prompt),
        "prompt_logprobs": positions or None,
        "usage": Usage(message.usage.prompt_tokens, message.usage.completion_tokens),
        "timings": Timings(timings.ttft_seconds, timings.total_seconds, timings.tpot_seconds),
        "acceptance": acceptance,
    }


def _position(position: pb.PositionLogprobs) -> PositionLogprobs:
    return {t.token_id: Logprob(t.logprob, t.rank, t.text) for t in position.tokens}
