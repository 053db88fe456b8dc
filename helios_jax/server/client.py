"""How does a Python program use a server? `Client`, and `AsyncClient` for event loops.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("The capital of France is", temperature=0).outputs[0].text)
        for part in client.stream("Once upon a time", max_tokens=50, timeout=10):
            print(part.text, end="", flush=True)

Sampling parameters are given by name and default as in `helios_jax.SamplingParams`, beside them
what the scheduler should heed (see `Client.stream`); the server checks them. `timeout` is the
call's deadline, which the server's scheduler works towards. Needs neither jax nor a model. What
goes wrong is a `grpc.RpcError`, whose details `error_details` reads.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from helios_jax.outputs import RequestOutput, StreamOutput
from helios_jax.server.client_convert import (
    Assembler,
    Message,
    Prompt,
    chat_request,
    generate_request,
    outcome_from_proto,
)
from helios_jax.server.proto import SERVICE
from helios_jax.server.proto import inference_pb2 as pb
from helios_jax.server.proto.inference_pb2_grpc import InferenceStub

DEFAULT_ADDRESS = "127.0.0.1:50051"
# What `stream` gives.
S = TypeVar("S", Iterator[StreamOutput], AsyncIterator[StreamOutput])

_DETAILS_KEY = "grpc-status-details-bin"
_LEAST_DELAY, _MOST_DELAY = 0.1, 2.0
# A server that was started again is found soon.
_OPTIONS = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 2000)]
_DETAIL_TYPES = (
    error_details_pb2.BadRequest,
    error_details_pb2.ErrorInfo,
    error_details_pb2.RetryInfo,
)


class _Connection(Generic[S]):
    """What both clients share: how to connect, and how to ask for streams.

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

    def _stream(self, method: Any, request: Any, timeout: float | None, assembler: Assembler) -> S:
        raise NotImplementedError

    def stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        request_id: str = "",
        **options: Any,
    ) -> S:
        """Completes a prompt (n = 1) and yields text as it comes; closing it ends the request.

        `Client`'s request begins at once, `AsyncClient`'s with the iteration.

        Args:
          prompt: text or token ids.
          timeout: seconds that the call may take.
          request_id: for the server's log and `abort`.
          options: fields of `SamplingParams`, and `priority`, `ttft_target_seconds`,
            `tpot_target_seconds` and `speculate`, see `Engine.submit`.

        Raises:
          ValueError: an option that there is not, or a value of another type.
        """
        request = generate_request(prompt, request_id, self._fixed(options))
        return self._stream(self._stub.Generate, request, timeout, Assembler(prompt))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        request_id: str = "",
        template_variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> S:
        """`stream` for a conversation: messages with `role` and `content`.

        Args:
          template_variables: for the model's chat template.
          tools: JSON schemas of functions, for templates that know tools.
        """
        request = chat_request(
            messages, template_variables, tools, request_id, self._fixed(options)
        )
        return self._stream(self._stub.Chat, request, timeout, Assembler(None))

    def _fixed(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options whose tokens are the same every time, if calls are tried again."""
        if self._retry_seconds and options.get("seed") in (None, -1):
            return options | {"seed": random.getrandbits(62)}
        return options


class Client(_Connection[Iterator[StreamOutput]]):
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
        **options: Any,
    ) -> RequestOutput:
        """Completes a prompt, its n outputs side by side.

        Args:
          prompt: text or token ids.
          timeout: seconds that the call may take.
          request_id, options: see `stream`.

        Returns:
          The outcome; `prompt_token_ids` is empty where a text was sent.
        """
        request = generate_request(prompt, request_id, self._fixed(options))
        return outcome_from_proto(prompt, self._call(self._stub.GenerateOnce, request, timeout))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        request_id: str = "",
        template_variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> RequestOutput:
        """Answers a conversation; arguments as in `stream_chat`."""
        outcome = None
        for part in self.stream_chat(
            messages, timeout=timeout, request_id=request_id,
            template_variables=template_variables, tools=tools, **options,
        ):  # fmt: skip
            outcome = part.request_output
        assert outcome is not None, "a stream ends with its outcome"
        return outcome

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
        self, method: Any, request: Any, timeout: float | None, assembler: Assembler
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


class AsyncClient(_Connection[AsyncIterator[StreamOutput]]):
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
        **options: Any,
    ) -> RequestOutput:
        """See `Client.generate`; cancelling ends the request."""
        request = generate_request(prompt, request_id, self._fixed(options))
        return outcome_from_proto(
            prompt, await self._call(self._stub.GenerateOnce, request, timeout)
        )

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        timeout: float | None = None,
        request_id: str = "",
        template_variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> RequestOutput:
        """See `Client.chat`."""
        outcome = None
        async for part in self.stream_chat(
            messages, timeout=timeout, request_id=request_id,
            template_variables=template_variables, tools=tools, **options,
        ):  # fmt: skip
            outcome = part.request_output
        assert outcome is not None, "a stream ends with its outcome"
        return outcome

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
        self, method: Any, request: Any, timeout: float | None, assembler: Assembler
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
        delay, self._pause = self._pause * random.uniform(1, 1.5), min(self._pause * 2, _MOST_DELAY)
        ends = self._last if self._deadline is None else min(self._last, self._deadline)
        if not may_retry or time.monotonic() + delay > ends:
            raise error
        return delay
