"""Which status code does an exception become, and with which google.rpc details?"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from helios_jax.engine import DeadlineExceeded, EngineError, EngineFull, NeverFits
from helios_jax.server.proto import inference_pb2 as pb

DOMAIN = "helios.v1"
# Status and details travel as headers, of which clients take 8 KiB.
MAX_MESSAGE_BYTES = 600
MAX_METADATA_BYTES = 200
RETRY_SECONDS = 1.0

StatusCode = grpc.StatusCode


@dataclass
class RpcError(Exception):
    """Ends a call with a status.

    Attributes:
      reason: a word for programs, in ErrorInfo.
      field: path of the field that is wrong, in BadRequest; "" where none is.
      metadata: of ErrorInfo.
      retry_seconds: after which it is worth while to try again; None where it is not.
    """

    code: grpc.StatusCode
    message: str
    reason: str
    field: str = ""
    metadata: dict[str, str] = default(default_factory=dict)
    retry_seconds: float | None = None

    def __str__(self) -> str:
        return self.message

    def status(self) -> status_pb2.Status:
        """The google.rpc.Status that goes out, cut to what fits headers."""
        message = cut(self.message, MAX_MESSAGE_BYTES)
        details: list[Any] = [
            error_details_pb2.ErrorInfo(
                reason=self.reason,
                domain=DOMAIN,
                metadata={k: cut(v, MAX_METADATA_BYTES) for k, v in self.metadata.items()},
            )
        ]
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.field, description=cut(self.message, MAX_METADATA_BYTES)
            )
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_seconds is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(int(self.retry_seconds * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        packed = []
        for detail in details:
            any_detail = any_pb2.Any()
            any_detail.Pack(detail)
            packed.append(any_detail)
        return status_pb2.Status(code=self.code.value[0], message=message, details=packed)


def invalid(field: str, message: str, **metadata: str) -> RpcError:
    """INVALID_ARGUMENT of a field, by its path in the request."""
    return RpcError(
        StatusCode.INVALID_ARGUMENT, message, "INVALID_ARGUMENT", field,
        {"field": field} | metadata,
    )  # fmt: skip


def unavailable(message: str, reason: str) -> RpcError:
    """UNAVAILABLE for now."""
    return RpcError(StatusCode.UNAVAILABLE, message, reason, retry_seconds=RETRY_SECONDS)


def unauthenticated() -> RpcError:
    """UNAUTHENTICATED: the call presents no token of the server's."""
    return RpcError(
        StatusCode.UNAUTHENTICATED,
        "the server wants a bearer token: send metadata 'authorization: Bearer TOKEN' with one of "
        "its tokens",
        "UNAUTHENTICATED",
    )


def non_finite() -> RpcError:
    """INTERNAL: the model gave a NaN or an infinity."""
    return RpcError(
        StatusCode.INTERNAL,
        "the model gave a NaN or an infinity for this request; serve with dtype='bfloat16' or "
        "'float32' weights, or check the checkpoint",
        "NON_FINITE",
    )


@contextmanager
def blaming_input() -> Iterator[None]:
    """What is done here with a client's input may find it wrong: ValueError is INVALID_ARGUMENT."""
    try:
        yield
    except NeverFits:
        raise
    except ValueError as error:
        raise _invalid_argument(str(error)) from error


def to_rpc_error(error: Exception) -> RpcError:
    """What the client is told; of a fault that is not foreseen, only that there was one."""
    if isinstance(error, RpcError):
        return error
    if isinstance(error, NeverFits):
        return RpcError(StatusCode.RESOURCE_EXHAUSTED, str(error), "NEVER_FITS")
    if isinstance(error, EngineFull):
        return RpcError(
            StatusCode.RESOURCE_EXHAUSTED, str(error), "QUEUE_FULL", retry_seconds=RETRY_SECONDS
        )
    if isinstance(error, DeadlineExceeded):
        return RpcError(StatusCode.DEADLINE_EXCEEDED, str(error), "DEADLINE_EXCEEDED")
    if isinstance(error, EngineError):
        return RpcError(StatusCode.INTERNAL, str(error), "STEP_FAILED")
    if isinstance(error, NotImplementedError):
        return RpcError(StatusCode.UNIMPLEMENTED, str(error), "UNIMPLEMENTED")
    return RpcError(StatusCode.INTERNAL, "internal error; the server's log has more", "INTERNAL")


def cut(text: str, num_bytes: int) -> str:
    """The beginning of a text, at most so many bytes in UTF-8."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= num_bytes:
        return encoded.decode()
    return encoded[: num_bytes - 3].decode(errors="ignore") + "…"


def _invalid_argument(message: str) -> RpcError:
    """Of the library's own message: `name=value: rule; remedy`, or `name says what: rule`."""
    head, _, limit = message.partition(": ")
    found = re.match(r"\w+", head)
    name, field = found[0] if found else "", ""
    if name in pb.SamplingParams.DESCRIPTOR.fields_by_name:
        field = f"sampling.{name}"
    elif name in pb.Scheduling.DESCRIPTOR.fields_by_name:
        field = f"scheduling.{name}"
    elif name == "messages":
        field = "conversation.messages"
    elif name == "prompt":
        field = "prompt"
    if not field:
        return RpcError(StatusCode.INVALID_ARGUMENT, message, "INVALID_ARGUMENT")
    parts = {"value": head.partition("=")[2], "limit": limit}
    return invalid(field, message, **{key: part for key, part in parts.items() if part})
