"""How do protos become the engine's types, and the other way round? One place per direction."""

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf import json_format

from helios_jax import SamplingParams
from helios_jax.outputs import (
    Acceptance,
    CompletionOutput,
    PositionLogprobs,
    RequestOutput,
    Timings,
    Usage,
)
from helios_jax.server import config as limits
from helios_jax.server.errors import invalid
from helios_jax.server.proto import inference_pb2 as pb

_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
_REPEATED = ("bad_words", "stop", "stop_token_ids")
_SCALARS = [
    field.name
    for field in pb.SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.message_type is None
]
# What the template gets from elsewhere, what would replace it, and Python's own.
_RESERVED_VARIABLES = {"self", "messages", "tools", "add_generation_prompt", "chat_template"}


# Requests in


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Parameters with what is set, and defaults for the rest.

    Raises:
      RpcError: a list or string is longer than the server takes.
      ValueError: a value breaks its rule.
    """
    _check_sizes(message)
    options: dict[str, Any] = {
        name: getattr(message, name) for name in _SCALARS if message.HasField(name)
    }
    for name in _REPEATED:
        if values := getattr(message, name):
            options[name] = list(values)
    if message.logit_bias:
        options["logit_bias"] = dict(message.logit_bias)
    if message.HasField("allowed_token_ids"):
        options["allowed_token_ids"] = list(message.allowed_token_ids.ids)
    if message.bad_words_token_ids:
        if message.bad_words:
            raise invalid(
                "sampling.bad_words_token_ids",
                "bad_words and bad_words_token_ids: must not both be given; use one of them",
            )
        options["bad_words_token_ids"] = [list(word.ids) for word in message.bad_words_token_ids]
    return SamplingParams(**options)


def scheduling_from_proto(message: pb.Scheduling) -> dict[str, Any]:
    """Arguments of `Engine.submit`."""
    return {
        field.name: getattr(message, field.name)
        for field in pb.Scheduling.DESCRIPTOR.fields
        if message.HasField(field.name)  # pyright: ignore[reportArgumentType]
    }


def conversation_from_proto(message: pb.Conversation) -> tuple[list[dict[str, str]], dict]:
    """Messages and keyword arguments of `Tokenizer.apply_chat_template`.

    Raises:
      RpcError: there is no message, or a template variable that is not the client's to set.
    """
    if not message.messages:
        raise invalid(
            "conversation.messages", "messages=[]: must hold at least one message; add the user's"
        )
    variables = json_format.MessageToDict(message.template_variables)
    for name in sorted(_RESERVED_VARIABLES & variables.keys()):
        raise invalid(
            "conversation.template_variables",
            f"template_variables contains {name!r}: must be left to the server; leave it out",
        )
    options: dict[str, Any] = dict(variables)
    if message.HasField("add_generation_prompt"):
        options["add_generation_prompt"] = message.add_generation_prompt
    if message.tools:
        options["tools"] = [json_format.MessageToDict(tool) for tool in message.tools]
    return [{"role": each.role, "content": each.content} for each in message.messages], options


def _check_sizes(message: pb.SamplingParams) -> None:
    lists = (
        ("stop", message.stop, limits.MAX_STOP),
        ("stop_token_ids", message.stop_token_ids, limits.MAX_STOP_TOKEN_IDS),
        ("logit_bias", message.logit_bias, limits.MAX_LOGIT_BIAS),
        ("bad_words", message.bad_words, limits.MAX_BAD_WORDS),
        ("bad_words_token_ids", message.bad_words_token_ids, limits.MAX_BAD_WORDS),
    )
    for name, values, most in lists:
        _check_length(name, "entries", len(values), most)
    for name, strings in (("stop", message.stop), ("bad_words", message.bad_words)):
        longest = max(map(len, strings), default=0)
        _check_length(name, "characters in one string", longest, limits.MAX_STRING_CHARS)
    longest = max((len(word.ids) for word in message.bad_words_token_ids), default=0)
    _check_length("bad_words_token_ids", "ids in one word", longest, limits.MAX_STRING_CHARS)


def _check_length(name: str, what: str, number: int, most: int) -> None:
    if number > most:
        raise invalid(
            f"sampling.{name}", f"{name} has {number} {what}: must be at most {most}",
            value=str(number), limit=str(most),
        )  # fmt: skip


# Answers out


def tokens_to_proto(
    index: int, text: str, token_ids: Sequence[int], logprobs: Iterable[PositionLogprobs]
) -> pb.Tokens:
    """What is new of one output."""
    return pb.Tokens(
        index=index,
        text=text,
        token_ids=token_ids,
        logprobs=[_position_to_proto(position) for position in logprobs],
    )


def finished_to_proto(output: RequestOutput) -> pb.Finished:
    """The end of a stream."""
    return pb.Finished(
        outputs=[_end_to_proto(completion) for completion in output.outputs], **_common(output)
    )


def once_to_proto(request_id: str, output: RequestOutput) -> pb.GenerateOnceResponse:
    """The whole outcome."""
    return pb.GenerateOnceResponse(
        request_id=request_id,
        outputs=[
            pb.Output(
                text=completion.text,
                token_ids=completion.token_ids,
                logprobs=[_position_to_proto(p) for p in completion.logprobs or ()],
                end=_end_to_proto(completion),
            )
            for completion in output.outputs
        ],
        **_common(output),
    )


def usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)


def _common(output: RequestOutput) -> dict[str, Any]:
    return {
        "usage": usage_to_proto(output.usage),
        "timings": _timings_to_proto(output.timings),
        "acceptance": None if output.acceptance is None else _acceptance(output.acceptance),
        "prompt_logprobs": [_position_to_proto(p or {}) for p in output.prompt_logprobs or ()],
    }


def _end_to_proto(completion: CompletionOutput) -> pb.OutputEnd:
    end = pb.OutputEnd(
        index=completion.index,
        finish_reason=_REASONS[completion.finish_reason],
        num_tokens=len(completion.token_ids),
        cumulative_logprob=completion.cumulative_logprob,
    )
    if isinstance(completion.stop_reason, str):
        end.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        end.stop_token_id = completion.stop_reason
    return end


def _timings_to_proto(timings: Timings) -> pb.Timings:
    return pb.Timings(
        ttft_seconds=timings.ttft_seconds,
        total_seconds=timings.total_seconds,
        tpot_seconds=timings.tpot_seconds,
    )


def _acceptance(acceptance: Acceptance) -> pb.Acceptance:
    return pb.Acceptance(
        num_draft_tokens=acceptance.num_draft_tokens,
        num_accepted_tokens=acceptance.num_accepted_tokens,
        num_verifications=acceptance.num_verifications,
        acceptance_rate=acceptance.acceptance_rate,
        acceptance_length=acceptance.acceptance_length,
    )


def _position_to_proto(position: PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        tokens=[
            pb.TokenLogprob(
                token_id=token, logprob=entry.logprob, rank=entry.rank, text=entry.decoded_token
            )
            for token, entry in position.items()
        ]
    )
