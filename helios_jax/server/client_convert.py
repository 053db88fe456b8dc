"""How do a client's calls become protos, and their answers `RequestOutput`s? Without jax."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
from helios_jax.server.proto import inference_pb2 as pb

Prompt = str | Sequence[int]
Message = Mapping[str, str]

_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


# Requests out


def generate_request(
    prompt: Prompt, request_id: str, options: Mapping[str, Any]
) -> pb.GenerateRequest:
    """A prompt's request; `options` as in `options_to_proto`."""
    sampling, scheduling = options_to_proto(options)
    request = pb.GenerateRequest(request_id=request_id, sampling=sampling, scheduling=scheduling)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def chat_request(
    messages: Sequence[Message],
    template_variables: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    request_id: str,
    options: Mapping[str, Any],
) -> pb.ChatRequest:
    """A conversation's request; `options` as in `options_to_proto`."""
    sampling, scheduling = options_to_proto(options)
    return pb.ChatRequest(
        request_id=request_id,
        conversation=_conversation(messages, template_variables, tools),
        sampling=sampling,
        scheduling=scheduling,
    )


def options_to_proto(options: Mapping[str, Any]) -> tuple[pb.SamplingParams, pb.Scheduling]:
    """What is given by name, None for what is not, as the two messages that have such fields.

    Raises:
      ValueError: neither has the field, or its value is of another type.
    """
    sampling, scheduling = pb.SamplingParams(), pb.Scheduling()
    known = {
        name: message
        for message in (sampling, scheduling)
        for name in message.DESCRIPTOR.fields_by_name
    }
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{name} is no option of a request; must be one of {', '.join(known)}")
        if value is None:
            continue
        try:
            if name == "logit_bias":
                sampling.logit_bias.update(value)
            elif name == "allowed_token_ids":
                sampling.allowed_token_ids.SetInParent()
                sampling.allowed_token_ids.ids.extend(value)
            elif name == "bad_words_token_ids":
                sampling.bad_words_token_ids.extend(pb.TokenIds(ids=word) for word in value)
            elif name in ("stop", "bad_words", "stop_token_ids"):
                values = [value] if isinstance(value, str) else value
                getattr(sampling, name).extend(values)
            else:
                setattr(known[name], name, value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}={value!r}: is not what the option takes: {error}") from None
    return sampling, scheduling


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


# Answers in


class Assembler:
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


def outcome_from_proto(prompt: Prompt, response: pb.GenerateOnceResponse) -> RequestOutput:
    """The whole outcome; `prompt_token_ids` is empty where the prompt is a text."""
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
