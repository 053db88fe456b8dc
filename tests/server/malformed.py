"""Requests that no decent client sends, drawn from the proto's own descriptor."""

import math
import random
from collections import Counter
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from helios_jax.server.proto import SERVICE
from helios_jax.server.proto import inference_pb2 as pb

# All that a request may end with; never UNKNOWN or INTERNAL.
ALLOWED = {
    "OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "NOT_FOUND",
    "DEADLINE_EXCEEDED", "ALREADY_EXISTS",
}  # fmt: skip
_METHODS = pb.DESCRIPTOR.services_by_name["Inference"].methods
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: 32,
    FieldDescriptor.CPPTYPE_INT64: 64,
}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-310, 1e308, -1e308, math.inf, -math.inf, math.nan, 1e-6, 2.0)
_TEXTS = ("", "a", "\0", "🙂" * 50, "<eos>", "\u202e\ufeff", "%s%n{}", "x" * 3000, "{{ 1 / 0 }}")


def storm(channel: grpc.Channel, number: int, seed: int) -> Counter[str]:
    """Sends so many requests, several at a time; how they ended, by kind and code."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    waiting: list[tuple[str, Any, bool]] = []
    for _ in range(number):
        method = rng.choice(_METHODS)
        kind, data = _draw(rng, method.input_type)
        path = f"/{SERVICE}/{method.name}"
        # What happens to be right is not to run to its end.
        timeout = 0.05 if kind == "extreme" else 10
        if method.server_streaming:
            call: Any = channel.unary_stream(path)(data, timeout=timeout)
        else:
            call = channel.unary_unary(path).future(data, timeout=timeout)
        waiting.append((kind, call, method.server_streaming))
        if len(waiting) == 32:
            counts += _ends(waiting)
            waiting.clear()
    return counts + _ends(waiting)


def _ends(calls: list[tuple[str, Any, bool]]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for kind, call, is_stream in calls:
        try:
            for _ in call if is_stream else ():
                pass
        except grpc.RpcError:
            pass
        code = call.code()
        # A drawn call of Abort may name another drawn request.
        is_aborted = code.name == "CANCELLED" and "by a call of Abort" in call.details()
        assert is_aborted or code.name in ALLOWED, f"{kind}: {code} {call.details()}"
        counts[f"{kind}: {code.name}"] += 1
    return counts


def _draw(rng: random.Random, type_: Descriptor) -> tuple[str, bytes]:
    """A kind of wrong and a request's bytes."""
    draw = rng.random()
    if draw < 0.2:
        return "random", rng.randbytes(rng.randint(1, 200))
    data = _message(rng, type_, depth=0).SerializeToString()
    if draw < 0.4 and data:
        return "cut", data[: rng.randrange(len(data))]
    if draw < 0.55 and data:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return "changed", bytes(changed)
    if draw < 0.551:
        return "huge", pb.GenerateRequest(text="x" * (5 << 20)).SerializeToString()
    if draw < 0.56:
        ids = pb.TokenIds(ids=[rng.randrange(-5, 300)] * rng.randint(1000, 200_000))
        return "long", pb.GenerateRequest(token_ids=ids).SerializeToString()
    return "extreme", data


def _message(rng: random.Random, type_: Descriptor, depth: int) -> Any:
    message = message_factory.GetMessageClass(type_)()
    for field in type_.fields:
        # A template's variables may nest for ever.
        if rng.random() < 0.6 or (depth > 3 and field.message_type is not None):
            continue
        if field.is_repeated:
            _fill(rng, message, field, depth)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_message(rng, field.message_type, depth + 1))
        else:
            setattr(message, field.name, _scalar(rng, field))
    return message


def _fill(rng: random.Random, message: Any, field: FieldDescriptor, depth: int) -> None:
    number = rng.choice([1, 2, 3, 20, 150]) if depth < 3 else 1
    values = getattr(message, field.name)
    entry = field.message_type
    if entry is None:
        values.extend(_scalar(rng, field) for _ in range(number))
    elif entry.GetOptions().map_entry:
        key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
        for _ in range(number):
            if value.message_type is None:
                values[_scalar(rng, key)] = _scalar(rng, value)
            else:
                values[_scalar(rng, key)].CopyFrom(_message(rng, value.message_type, depth + 2))
    else:
        for _ in range(min(number, 20)):
            values.add().CopyFrom(_message(rng, entry, depth + 1))


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    bits = _INTEGERS.get(field.cpp_type)
    if bits is not None:
        edge = 1 << (bits - 1)
        return rng.choice([0, 1, -1, 2, 20, 257, 258, edge - 1, -edge, rng.randrange(-edge, edge)])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice([*_FLOATS, rng.uniform(-3, 3)])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return 0
    return rng.choice(_TEXTS)
