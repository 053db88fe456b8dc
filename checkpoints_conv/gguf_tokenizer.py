"""Which `tokenizer.*` values of a GGUF file describe a tokenizer?

The inverse of `helios_jax.tokenizer.gguf_metadata`. GGUF names pre-tokenizers instead of describing
them; the name is found by splitting a text with each of the known ones.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from gguf.constants import TokenType

from helios_jax.tokenizer import Tokenizer
from helios_jax.tokenizer.gguf_metadata import PRE_TOKENIZERS

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMES = ("gpt-2", "smollm", "llama-bpe", "qwen2")
_NORMALIZERS = {"qwen2": "NFC"}
_IGNORES_MERGES = ("llama-bpe",)
_PROBE = (
    "Don't we'LL 'Re x's a1b22c333d4444 12345678 3.14\n\n  \n\tif (a != b) {\r\n  return\t!;\n} "
    "  end naïve Ωmega 你好世界 مرحبا 😀😀 ²³ ½ __init__ #$%&... a.b/c?d=e  \n   trailing   "
)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def gguf_tokenizer(tokenizer: Tokenizer, num_tokens: int) -> dict[str, Any]:
    """The metadata of `tokenizer`, its tokens padded to the model's `num_tokens` rows.

    Raises:
      ValueError: GGUF has no name for one of its parts, or it has more tokens than the model.
    """
    if tokenizer.vocab_size > num_tokens:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {num_tokens} rows"
        )
    if len(tokenizer.eos_token_ids) > len(_EOS_KEYS):
        raise ValueError(
            f"eos_token_ids={tokenizer.eos_token_ids}: GGUF has places for {len(_EOS_KEYS)}"
        )
    state = json.loads(tokenizer.backend.to_str())
    model = state["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"the tokenizer is {model.get('type')}: GGUF is written for BPE alone")
    byte_level = tokenizer.spelling.byte_level
    tokens, types = _tokens(tokenizer, model, num_tokens)
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    values: dict[str, Any] = {
        "ggml.model": "gpt2" if byte_level else "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.add_bos_token": tokenizer.add_bos,
        "ggml.add_eos_token": tokenizer.add_eos,
    }
    if byte_level:
        values["ggml.pre"] = _pre_tokenizer_name(tokenizer, state)
        values["ggml.merges"] = [" ".join(pair) for pair in merges]
    else:
        values["ggml.scores"] = _scores(tokens, merges)
        values["ggml.add_space_prefix"] = tokenizer.spelling.prefix_spaces > 0
        unknown = tokenizer.token_to_id(model["unk_token"]) if model.get("unk_token") else None
        values |= {} if unknown is None else {"ggml.unknown_token_id": unknown}
    if tokenizer.bos_token_id is not None:
        values["ggml.bos_token_id"] = tokenizer.bos_token_id
    for key, token_id in zip(_EOS_KEYS, tokenizer.eos_token_ids, strict=False):
        values[f"ggml.{key}"] = token_id
    template = tokenizer.chat_template
    if isinstance(template, str):
        values["chat_template"] = template
    elif isinstance(template, Mapping):
        for name, source in template.items():
            values["chat_template" if name == "default" else f"chat_template.{name}"] = source
    return {f"tokenizer.{key}": value for key, value in values.items()}


def _tokens(
    tokenizer: Tokenizer, model: Mapping[str, Any], num_tokens: int
) -> tuple[list[str], list[int]]:
    """Token strings and their GGUF types; ids without a token get one of their own."""
    added = tokenizer.backend.get_added_tokens_decoder()
    tokens, types = [], []
    for token_id in range(num_tokens):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            token, kind = f"[PAD{token_id}]", TokenType.UNUSED
        elif token == model.get("unk_token"):
            kind = TokenType.UNKNOWN
        elif token_id in tokenizer.special_token_ids:
            kind = TokenType.CONTROL
        elif token_id in added:
            kind = TokenType.USER_DEFINED
        elif model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(token):
            kind = TokenType.BYTE
        else:
            kind = TokenType.NORMAL
        tokens.append(token)
        types.append(int(kind))
    return tokens, types


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """SentencePiece's scores: minus the rank of the first merge that makes the piece."""
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault(left + right, i)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _pre_tokenizer_name(tokenizer: Tokenizer, state: Mapping[str, Any]) -> str:
    splitter = tokenizer.backend.pre_tokenizer
    found = None if splitter is None else splitter.pre_tokenize_str(_PROBE)
    normalizer = (state.get("normalizer") or {}).get("type")
    ignores_merges = bool(state["model"].get("ignore_merges", False))
    for name in _NAMES:
        if (
            found == PRE_TOKENIZERS[name]().pre_tokenize_str(_PROBE)
            and normalizer == _NORMALIZERS.get(name)
            and ignores_merges is (name in _IGNORES_MERGES)
        ):
            return name
    raise ValueError(
        f"the tokenizer splits text in a way that GGUF has no known name for (known: {_NAMES})"
    )
