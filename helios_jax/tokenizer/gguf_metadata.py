"""Which tokenizer do a GGUF file's `tokenizer.*` values describe?

GGUF stores a vocabulary with the type of each token, and either merges and the name of a
pre-tokenizer (model "gpt2": byte-level BPE) or a score per token (model "llama": SentencePiece).
The pre-tokenizers and decoders themselves are not in the file; they are known by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from helios_jax.config import require
from helios_jax.tokenizer.spelling import SPACE

# Token types of the GGUF specification.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2_SPLIT = _WORDS + r"\p{N}" + _REST


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# By the value of tokenizer.ggml.pre. Files from before that key existed, and those whose converter
# knew no better ("default"), are read as GPT-2's.
PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "gpt2": _gpt2,
    "default": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "llama3": lambda: _split(_LLAMA3_SPLIT),
    "llama-v3": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
}
# Llama 3's tokenizer takes a word that is in the vocabulary whole, whatever the merges say.
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
MODELS = ("gpt2", "llama")


def read_gguf_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Tokenizer` for these values (see `Tokenizer.from_gguf_metadata`)."""
    model = _required(metadata, "model")
    require(
        model in MODELS,
        f"tokenizer.ggml.model={model!r}: not implemented, known are {MODELS}; convert the model "
        "from its Hugging Face folder, whose tokenizer.json is read as it is",
    )
    tokens = [str(token) for token in _required(metadata, "tokens")]
    types = _per_token(metadata, "token_type", tokens)
    if len(set(tokens)) != len(tokens):
        first, second = _first_duplicate(tokens)
        raise ValueError(
            f"tokenizer.ggml.tokens: ids {first} and {second} are both {tokens[first]!r}; "
            "the file is damaged"
        )

    # A SentencePiece file that says nothing means Llama's ids; a byte-level one has no default.
    spm = model == "llama"
    bos = _token_id(metadata, "bos_token_id", 1 if spm else None, tokens)
    eos = [
        token_id
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
        if (token_id := _token_id(metadata, key, None, tokens)) is not None
    ]
    if spm and not eos:
        eos = [2]
    if spm:
        backend = _sentencepiece(metadata, tokens, types)
        add_bos_default = True
    else:
        backend = _byte_level(metadata, tokens)
        add_bos_default = metadata.get("tokenizer.ggml.pre") in _LLAMA3 and bos is not None
    _add_tokens(backend, tokens, types, {bos, *eos})
    return {
        "backend": backend,
        "bos_token_id": bos,
        "eos_token_ids": tuple(eos),
        "add_bos": bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos_default)),
        "add_eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "chat_template": _chat_template(metadata),
    }


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    require(
        name in PRE_TOKENIZERS,
        f"tokenizer.ggml.pre={name!r}: this pre-tokenizer is not implemented, known are "
        f"{sorted(PRE_TOKENIZERS)}; convert the model from its Hugging Face folder, whose "
        "tokenizer.json is read as it is",
    )
    # A merge is "left right". Neither part holds a space, which byte-level BPE writes as U+0120.
    merges = []
    for i, merge in enumerate(_required(metadata, "merges")):
        left, space, right = str(merge).partition(" ")
        require(
            left != "" and space != "" and right != "",
            f"tokenizer.ggml.merges[{i}]={merge!r}: must be two tokens with a space between",
        )
        merges.append((left, right))
    backend = _bpe(tokens, merges, ignore_merges=name in _LLAMA3)
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]
) -> tokenizers.Tokenizer:
    scores = [float(score) for score in _required(metadata, "scores")]
    require(
        len(scores) == len(tokens),
        f"tokenizer.ggml.scores has {len(scores)} values: must have one for each of the "
        f"{len(tokens)} tokens",
    )
    unknown = _token_id(metadata, "unknown_token_id", 0, tokens)
    assert unknown is not None
    backend = _bpe(
        tokens,
        _merges_by_score(tokens, scores, types),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    # The prefix goes in front of the text and behind each special token, as in llama.cpp and in
    # Hugging Face's legacy Llama tokenizer.
    add_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend(SPACE)] if add_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", left=1, right=0)] if add_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(
    tokens: list[str], scores: list[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """BPE merges that do what SentencePiece's BPE does: join the pair of the best-scored piece.

    Every way to cut a piece into two other pieces is a merge; merges are ordered by the score of
    the piece they make, best first. Pieces that text never makes (control, unknown, byte) get none.
    """
    vocabulary = set(tokens)
    ranked = sorted(range(len(tokens)), key=lambda token_id: -scores[token_id])
    return [
        (token[:cut], token[cut:])
        for token_id in ranked
        if types[token_id] not in (_UNKNOWN, _CONTROL, _BYTE)
        for token in (tokens[token_id],)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]


def _bpe(tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises plain Exceptions
        raise ValueError(
            f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}"
        ) from error


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: list[str], types: Sequence[int], special: set[int | None]
) -> None:
    """Marks the tokens that are found in text as they stand, before it is split into words."""
    is_special = [
        kind in (_CONTROL, _UNKNOWN) or token_id in special for token_id, kind in enumerate(types)
    ]
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, chosen in zip(tokens, is_special, strict=True)
            if chosen
        ]
    )
    backend.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind, chosen in zip(tokens, types, is_special, strict=True)
            if kind == _USER_DEFINED and not chosen
        ]
    )


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    prefix = "tokenizer.chat_template."
    template = metadata.get("tokenizer.chat_template")
    named = {
        key.removeprefix(prefix): str(value)
        for key, value in metadata.items()
        if key.startswith(prefix)
    }
    if not named:
        return template
    return named if template is None else {"default": template, **named}


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    require(
        value is not None,
        f"tokenizer.ggml.{key} is missing: the file holds no complete tokenizer; use one that does",
    )
    return value


def _per_token(metadata: Mapping[str, Any], key: str, tokens: list[str]) -> list[int]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return [1] * len(tokens)
    require(
        len(values) == len(tokens),
        f"tokenizer.ggml.{key} has {len(values)} values: must have one for each of the "
        f"{len(tokens)} tokens",
    )
    return [int(value) for value in values]


def _token_id(
    metadata: Mapping[str, Any], key: str, default: int | None, tokens: list[str]
) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if value is None:
        return None
    require(
        0 <= int(value) < len(tokens),
        f"tokenizer.ggml.{key}={value}: must be in 0..{len(tokens) - 1}, the ids of the tokens",
    )
    return int(value)


def _first_duplicate(tokens: list[str]) -> tuple[int, int]:
    seen: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if token in seen:
            return seen[token], token_id
        seen[token] = token_id
    raise AssertionError("no token occurs twice")
