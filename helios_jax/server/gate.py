"""What does every call pass on its way in and out?

In: who is it, does the message parse, is the server ready, has the client room for one more. Out:
one status code for whatever happened, one log line, the metrics, the span.
"""

import asyncio
import enum
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from helios_jax.server.config import ServerConfig
from helios_jax.server.errors import (
    RETRY_SECONDS,
    RpcError,
    StatusCode,
    to_rpc_error,
    unauthenticated,
    unavailable,
)
from helios_jax.server.proto import SERVICE
from helios_jax.server.security import Tokens, client_of
from helios_jax.server.telemetry import ServerMetrics, Tracer, log, logger

_DETAILS = "grpc-status-details-bin"
_OPEN_TO_ALL = "/grpc.health.v1.Health/"
_OURS = f"/{SERVICE}/"
# What is answered while the server is loading, and while it drains.
_WHILE_LOADING = {"GetServerInfo"}
# The latter also however many requests a client has: they are how it gets out of that.
_WHILE_DRAINING = {"GetServerInfo", "Abort"}


class State(enum.Enum):
    """Where a server is in its life."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass
class Call:
    """What is known of the call that a task serves.

    Attributes:
      method: of our service.
      client: see `client_of`.
      is_trusted: False where it presents no token and the server wants one.
      fields: for the log and the span.
    """

    method: str
    client: str
    is_trusted: bool = True
    fields: dict[str, Any] = field(default_factory=dict)


current_call: ContextVar[Call] = ContextVar("current_call")


@dataclass(frozen=True)
class _Malformed:
    """A message that does not parse."""

    error: str


class Gate(grpc.aio.ServerInterceptor):
    """Let all calls of a server through here.

    Attributes:
      state: set by whoever runs the server.
      num_calls: calls of our service that have not ended.
    """

    def __init__(self, config: ServerConfig, metrics: ServerMetrics, tokens: Tokens | None):
        self.state = State.LOADING
        self.num_calls = 0
        self._config = config
        self._metrics = metrics
        self._tokens = tokens
        self._tracer = Tracer()
        self._calls_by_client: Counter[str] = Counter()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def wait_idle(self) -> None:
        """Returns once no call of our service is left."""
        await self._is_idle.wait()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        details = handler_call_details
        handler = await continuation(details)
        if handler is None:
            return None
        token, is_trusted = None, True
        if self._tokens is not None and not details.method.startswith(_OPEN_TO_ALL):
            token = self._tokens.find(details.invocation_metadata)
            is_trusted = token is not None
        if not details.method.startswith(_OURS):
            return _guarded(handler) if is_trusted else _same_shape(handler, _refuse)
        method = details.method.removeprefix(_OURS)
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def serve(request: Any, context: Any) -> Any:
            call = Call(method, client_of(context, token), is_trusted)
            current_call.set(call)
            with self._tracer.span(details.method.lstrip("/"), details.invocation_metadata) as note:
                return await self._serve(call, inner, request, context, note)

        return _same_shape(handler, serve)

    async def _serve(
        self, call: Call, inner: Callable[[Any, Any], Awaitable], request: Any, context: Any, note
    ) -> Any:
        started, code, failure = time.perf_counter(), "OK", None
        try:
            self._enter(call, request)
            try:
                return await inner(request, context)
            finally:
                self._leave(call)
        except asyncio.CancelledError:
            # The client went away, or its deadline passed, which the loop is told likewise.
            is_late = context.time_remaining() == 0
            code = "DEADLINE_EXCEEDED" if is_late else "CANCELLED"
            raise
        except Exception as error:
            failure = to_rpc_error(error)
            code = failure.code.name
            if failure.reason == "INTERNAL":
                logger.exception("%s: fault", call.method, extra={"fields": call.fields})
        finally:
            seconds = time.perf_counter() - started
            self._tell(call, code, seconds, failure, note)
        assert failure is not None, "the call has returned otherwise"
        await context.abort(
            failure.code,
            failure.status().message,
            ((_DETAILS, failure.status().SerializeToString()),),
        )

    def _enter(self, call: Call, request: Any) -> None:
        """RpcError where the call may not go on; else `_leave` must follow."""
        if not call.is_trusted:
            raise unauthenticated()
        if self.state is State.LOADING and call.method not in _WHILE_LOADING:
            raise unavailable("the model is loading; try again soon", "LOADING")
        if self.state is State.DRAINING and call.method not in _WHILE_DRAINING:
            raise unavailable(
                "the server is shutting down and takes no more requests; try another, or again "
                "when it is back",
                "DRAINING",
            )
        if isinstance(request, _Malformed):
            raise RpcError(StatusCode.INVALID_ARGUMENT, request.error, "MALFORMED")
        most = self._config.max_requests_per_client
        if call.method not in _WHILE_DRAINING and self._calls_by_client[call.client] >= most:
            raise RpcError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"max_requests_per_client={most}: the client has as many calls in flight; wait "
                "until one has ended",
                "TOO_MANY_REQUESTS",
                retry_seconds=RETRY_SECONDS,
            )
        self._calls_by_client[call.client] += 1
        self.num_calls += 1
        self._is_idle.clear()

    def _leave(self, call: Call) -> None:
        self.num_calls -= 1
        self._calls_by_client[call.client] -= 1
        if not self._calls_by_client[call.client]:
            del self._calls_by_client[call.client]
        if not self.num_calls:
            self._is_idle.set()

    def _tell(
        self, call: Call, code: str, seconds: float, failure: RpcError | None, note: Callable
    ) -> None:
        self._metrics.called(call.method, code)
        fields = {"method": call.method, "client": call.client, "code": code}
        fields |= {"seconds": round(seconds, 6)} | call.fields
        if failure is not None:
            fields |= {"reason": failure.reason, "error": failure.status().message}
        log("call", logging.WARNING if code == "INTERNAL" else logging.INFO, **fields)
        note({f"helios.{name}": value for name, value in fields.items()})


async def _refuse(request: Any, context: Any) -> None:
    error = unauthenticated()
    details = ((_DETAILS, error.status().SerializeToString()),)
    await context.abort(error.code, error.message, details)


def _parsing(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """What gives `_Malformed` for bytes that `parse` cannot read, where gRPC would say INTERNAL."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return _Malformed(f"the message does not parse: {error}")

    return read


def _guarded(handler: Any) -> Any:
    """A handler of another service that says INVALID_ARGUMENT where a message does not parse."""
    if handler.request_streaming:
        return handler
    inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

    async def serve(request: Any, context: Any) -> Any:
        if isinstance(request, _Malformed):
            await context.abort(StatusCode.INVALID_ARGUMENT, request.error)
        return await inner(request, context)

    return _same_shape(handler, serve)


def _same_shape(handler: Any, behaviour: Callable) -> Any:
    """A handler like the other, with another behaviour."""
    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(behaviour, handler.request_deserializer, handler.response_serializer)
    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(behaviour, _parsing(handler.request_deserializer), handler.response_serializer)
