"""How does one model's text become token ids, and back?"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from helios_jax.config import require
from helios_jax.tokenizer.chat import render_chat_template
from helios_jax.tokenizer.gguf_metadata import read_gguf_metadata
from helios_jax.tokenizer.huggingface import read_backend, read_huggingface
from helios_jax.tokenizer.spelling import Spelling, read_spelling
from helios_jax.tokenizer.stream import IncrementalDecoder

_FACTS_FILE = "tokenizer_config.json"


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with its rules, and what is known about its special tokens.

    Special tokens written out in a text ("<|im_end|>") are read as those tokens, in plain prompts
    and in chat alike, as Hugging Face and vLLM do: chat templates depend on it.

    Attributes:
      backend: the `tokenizers` library's tokenizer; not to be changed.
      bos_token_id: begins a text; None where the model has none.
      eos_token_ids: each of them ends a text. The first is the one chat templates call eos_token.
      add_bos: `encode` puts BOS in front.
      add_eos: `encode` puts EOS at the end; almost no model that generates text wants that.
      chat_template: jinja2 source, or several by name ("default", "tool_use", ...), or None.
    """

    backend: tokenizers.Tokenizer = field(repr=False)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | Mapping[str, str] | None = field(default=None, repr=False)

    def __post_init__(self):
        unique = tuple(dict.fromkeys(int(token_id) for token_id in self.eos_token_ids))
        object.__setattr__(self, "eos_token_ids", unique)
        named = {} if self.bos_token_id is None else {"bos_token_id": self.bos_token_id}
        named |= {f"eos_token_ids[{i}]": token_id for i, token_id in enumerate(unique)}
        for name, token_id in named.items():
            require(
                0 <= token_id < self.vocab_size,
                f"{name}={token_id}: must be in 0..{self.vocab_size - 1} (vocab_size)",
            )
        require(
            self.bos_token_id is not None or not self.add_bos,
            "add_bos=True: needs a bos_token_id; give it, or set add_bos=False",
        )
        require(
            bool(self.eos_token_ids) or not self.add_eos,
            "add_eos=True: needs eos_token_ids; give them, or set add_eos=False",
        )

    @classmethod
    def from_huggingface(cls, folder: str | Path, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
        """Reads a Hugging Face model folder.

        Args:
          folder: holds tokenizer.json and, optionally, tokenizer_config.json,
            special_tokens_map.json and chat_template.jinja.
          eos_token_ids: further ids that end a text, from config.json and generation_config.json;
            they come after the tokenizer's own.
        """
        return cls(**read_huggingface(Path(folder), eos_token_ids))

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuilds the tokenizer of a GGUF file.

        Args:
          metadata: the file's key-value pairs as plain Python values; read are `tokenizer.ggml.*`
            and `tokenizer.chat_template*`.
        """
        return cls(**read_gguf_metadata(metadata))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads what `save` wrote."""
        path = Path(folder) / _FACTS_FILE
        require(path.is_file(), f"{path} is missing: {folder} holds no saved tokenizer")
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not readable JSON: {error}") from error
        known = sorted(cls._fact_names())
        require(
            isinstance(facts, dict) and sorted(facts) == known,
            f"{path}: must hold exactly the keys {known}; a Hugging Face folder is read by "
            "from_huggingface",
        )
        return cls(read_backend(Path(folder)), **facts)

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json; `load` gives an equal tokenizer."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {name: getattr(self, name) for name in self._fact_names()}
        if isinstance(self.chat_template, Mapping):
            facts["chat_template"] = dict(self.chat_template)
        text = self.backend.to_str(pretty=False)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        text = json.dumps(facts, ensure_ascii=False, indent=2)
        (folder / _FACTS_FILE).write_text(text, encoding="utf-8")

    @functools.cached_property
    def vocab_size(self) -> int:
        """Token ids are below this; a model's embedding may have more rows (padding)."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out unless asked not to."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @functools.cached_property
    def spelling(self) -> Spelling:
        """How the vocabulary spells bytes."""
        return read_spelling(self.backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`.

        With `add_special_tokens`, BOS comes in front if the model wants it (`add_bos`) and the text
        does not begin with it already: a rendered chat template often does. ValueError for what is
        not text.
        """
        require(isinstance(text, str), f"text={text!r}: must be a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has a lone surrogate at index {error.start}: must be valid Unicode; decode "
                "the bytes it came from as UTF-8"
            ) from error
        ids = self.backend.encode(text, add_special_tokens=False).ids
        if add_special_tokens and self.add_bos and ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None
            ids = [self.bos_token_id, *ids]
        if add_special_tokens and self.add_eos and ids[-1:] != [self.eos_token_ids[0]]:
            ids = [*ids, self.eos_token_ids[0]]
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD.

        For tokens that arrive one by one, or that continue a prompt, see `IncrementalDecoder`.
        """
        decoder = IncrementalDecoder(self, skip_special_tokens)
        return decoder.push(token_ids) + decoder.flush()

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for an id without a token."""
        require(token_id >= 0, f"token_id={token_id}: must not be negative")
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it; None if there is none."""
        return self.backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, in UTF-8; b"" for an id without a token (padding)."""
        known = self._bytes_by_id.get(token_id)
        if known is not None:
            return known
        token = self.id_to_token(token_id)
        spelled = b"" if token is None else self.spelling.to_bytes(token, token_id in self._added)
        self._bytes_by_id[token_id] = spelled
        return spelled

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of a conversation.

        Args:
          messages: [{"role": ..., "content": ...}, ...].
          add_generation_prompt: end with the beginning of an answer.
          tools: JSON schemas of functions, for templates that know tools.
          chat_template: the name of one of the model's templates, or jinja2 source, to use instead
            of "default" (with tools: "tool_use", where there is one).
          **variables: whatever else the template reads, such as enable_thinking.

        `encode` takes the result as it is: BOS is there once, written by the template or not.
        ValueError as `render_chat_template`, and where the model has no template.
        """
        known = {
            "add_generation_prompt": add_generation_prompt,
            "tools": tools,
            "documents": None,
            "bos_token": self._token_text(self.bos_token_id),
            "eos_token": self._token_text(next(iter(self.eos_token_ids), None)),
        }
        template = self._choose_template(chat_template, tools)
        return render_chat_template(template, messages, {**known, **variables})

    def fingerprint(self) -> str:
        """sha256 over tokens with their ids, merges and special tokens, in hexadecimal.

        Equal fingerprints mean that token ids mean the same, so that two models may work as target
        and draft. Which tokens begin and end a text is no part of it: that differs between a base
        model and its chat version, and between the files one model is published in.
        """
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        model = json.loads(self.backend.to_str())["model"]
        merges = [
            merge.split(" ") if isinstance(merge, str) else merge
            for merge in model.get("merges", [])
        ]
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        content = {
            "tokens": sorted((token_id, token) for token, token_id in vocabulary.items()),
            "merges": merges,
            "special": sorted(self.special_token_ids),
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @functools.cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @functools.cached_property
    def _bytes_by_id(self) -> dict[int, bytes]:
        return {}

    @classmethod
    def _fact_names(cls) -> list[str]:
        return [entry.name for entry in dataclasses.fields(cls) if entry.name != "backend"]

    def _token_text(self, token_id: int | None) -> str:
        return "" if token_id is None else self.token_bytes(token_id).decode(errors="replace")

    def _choose_template(self, chosen: str | None, tools: Any) -> str:
        by_name = self.chat_template if isinstance(self.chat_template, Mapping) else {}
        if chosen is not None:
            return by_name.get(chosen, chosen)
        if isinstance(self.chat_template, str):
            return self.chat_template
        name = "tool_use" if tools is not None and "tool_use" in by_name else "default"
        require(
            name in by_name,
            f"chat_template: the model has none called {name!r} (it has {sorted(by_name)}); give "
            "chat_template=..., or a prompt as text",
        )
        return by_name[name]
