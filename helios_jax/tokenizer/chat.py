"""What text does a chat template make of a conversation?

Templates come with models, from anywhere: they run in jinja2's immutable sandbox, with the
settings and helpers that Hugging Face templates rely on. The sandbox keeps a template from Python's
internals, from changing what it is given and from ranges of more than 100,000 items; it does not
bound a template's running time otherwise.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.exceptions import SecurityError

from helios_jax.config import require


def render_chat_template(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The prompt that `template` (jinja2 source) makes of `messages`.

    Args:
      template: the source text.
      messages: one conversation; each message has a role, and content that is a string or a list of
        text parts ({"type": "text", "text": ...}), which are joined with newlines; a message that
        calls tools may go without content. Other keys reach the template as they are.
      variables: what else the template may read, such as bos_token or add_generation_prompt.

    Raises:
      ValueError: a bad message; or the template has a syntax error, refused the conversation,
        failed, or reached outside the sandbox; the text says which.
    """
    conversation = check_messages(messages)
    try:
        return _compile(template).render(messages=conversation, **variables)
    except _TemplateRefusal as error:
        raise ValueError(f"the chat template refused the messages: {error.message}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template has a syntax error in line {error.lineno}: {error.message}; give "
            "another chat_template, or a prompt as text"
        ) from error
    except SecurityError as error:
        raise ValueError(
            f"the chat template was blocked, it reached outside its sandbox: {error}; do not trust "
            "this template, give another chat_template, or a prompt as text"
        ) from error
    except Exception as error:  # the template is foreign code: it may fail in any way
        raise ValueError(
            f"the chat template failed with {type(error).__name__}: {error}; it may not support "
            "this form of messages or tools"
        ) from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with text parts joined to strings; ValueError where one is malformed."""
    require(
        isinstance(messages, Sequence) and not isinstance(messages, str | bytes),
        f"messages={messages!r}: must be a sequence of messages such as "
        '[{"role": "user", "content": "Hello"}]',
    )
    require(len(messages) > 0, "messages=[]: must hold at least one message")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(name: str, message: Any) -> dict[str, Any]:
    require(
        isinstance(message, Mapping),
        f"{name}={message!r}: must be a mapping with 'role' and 'content'",
    )
    role = message.get("role")
    require(
        isinstance(role, str) and role != "",
        f"{name}['role']={role!r}: must be a non-empty string such as 'user'",
    )
    content = message.get("content")
    if content is None:
        require(
            bool(message.get("tool_calls")),
            f"{name}['content'] is missing: must be a string, unless the message has 'tool_calls'",
        )
        return dict(message)
    if isinstance(content, str):
        return dict(message)
    require(
        isinstance(content, Sequence),
        f"{name}['content']={content!r}: must be a string or a list of text parts",
    )
    parts = [_part_text(f"{name}['content'][{i}]", part) for i, part in enumerate(content)]
    return {**message, "content": "\n".join(parts)}


def _part_text(name: str, part: Any) -> str:
    require(
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str),
        f'{name}={part!r}: must be {{"type": "text", "text": ...}}; models here read text only',
    )
    return part["text"]


class _TemplateRefusal(jinja2.TemplateError):
    """A template called raise_exception(message)."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Refuses an unsafe attribute when it is read, not only when the result is used."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(
            f"access to attribute {attribute!r} of a {type(obj).__name__!r} is unsafe"
        )


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks what the assistant wrote, for training; its body renders as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationTag],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which is not what models were trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
