"""Which tokenizer does a Hugging Face folder describe?

tokenizer.json holds the vocabulary and the rules; tokenizer_config.json and special_tokens_map.json
name the special tokens; the chat template is in a file of its own or in tokenizer_config.json.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from helios_jax.config import require


def read_huggingface(folder: Path, eos_token_ids: Iterable[int] = ()) -> dict[str, Any]:
    """The fields of a `Tokenizer` for this folder (see `Tokenizer.from_huggingface`)."""
    config = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }
    backend = read_backend(folder)
    # Some folders keep the cut and the padding of the batches they were trained with.
    backend.no_truncation()
    backend.no_padding()
    _add_missing_tokens(backend, config)
    bos = _token_id(backend, config, "bos_token")
    eos = _token_id(backend, config, "eos_token")
    prefix, suffix = _framing(backend)
    if bos is None and len(prefix) == 1:
        bos = prefix[0]
    require(
        prefix in ([], [bos]) and suffix in ([], [eos]),
        f"{folder / 'tokenizer.json'}: its post-processor puts tokens {prefix} before and {suffix} "
        f"after a text; only bos_token ({bos}) before and eos_token ({eos}) after are implemented",
    )
    # Where tokenizer.json has rules for this they count, as in transformers; else the config's.
    has_rules = backend.post_processor is not None
    return {
        "backend": backend,
        "bos_token_id": bos,
        "eos_token_ids": tuple([] if eos is None else [eos]) + tuple(eos_token_ids),
        "add_bos": bool(prefix) if has_rules else bool(config.get("add_bos_token")),
        "add_eos": bool(suffix) if has_rules else bool(config.get("add_eos_token")),
        "chat_template": _chat_template(folder, config.get("chat_template")),
    }


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer in folder/tokenizer.json."""
    path = folder / "tokenizer.json"
    require(
        path.is_file(),
        f"{path} is missing: the tokenizer is read from it; where a model has only tokenizer.model "
        "or vocab.json, write it with transformers' AutoTokenizer.from_pretrained(...)"
        ".save_pretrained(folder)",
    )
    try:
        return tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(f"{path} is not a readable tokenizer.json: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    require(isinstance(content, dict), f"{path}: must hold a JSON object")
    return content


def _content(token: Any) -> str | None:
    """A special token is written as a string, as an object with its content, or null."""
    return token["content"] if isinstance(token, dict) else token


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Adds what tokenizer_config.json lists beyond tokenizer.json, at the ids it states."""
    listed = config.get("added_tokens_decoder", {})
    for token_id, token in sorted((int(key), value) for key, value in listed.items()):
        known = backend.token_to_id(token["content"])
        if known is None:
            flags = {name: value for name, value in token.items() if name != "__type"}
            backend.add_tokens([AddedToken(**flags)])
            known = backend.token_to_id(token["content"])
        require(
            known == token_id,
            f"tokenizer_config.json states id {token_id} for {token['content']!r}, tokenizer.json "
            f"gives it {known}: the two files belong to different tokenizers",
        )


def _token_id(backend: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> int | None:
    token = _content(config.get(name))
    if token is None:
        return None
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise ValueError(
            f"tokenizer_config.json: {name}={token!r} is not in the vocabulary of tokenizer.json; "
            "correct the one or the other"
        )
    added = backend.get_added_tokens_decoder().get(token_id)
    if added is None or not added.special:
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    return token_id


def _framing(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    framed = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        end = start + len(bare)
        if framed[start:end] == bare:
            return framed[:start], framed[end:]
    raise ValueError("tokenizer.json: its post-processor changes the tokens of a text")


def _chat_template(folder: Path, configured: Any) -> str | dict[str, str] | None:
    """Template files come before tokenizer_config.json's text or list of named texts."""
    if isinstance(configured, list):
        configured = {entry["name"]: entry["template"] for entry in configured}
    default = folder / "chat_template.jinja"
    extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if not default.is_file() and not extra:
        return configured
    named = {path.stem: path.read_text(encoding="utf-8") for path in extra}
    if default.is_file():
        named = {"default": default.read_text(encoding="utf-8"), **named}
    return named["default"] if list(named) == ["default"] else named
