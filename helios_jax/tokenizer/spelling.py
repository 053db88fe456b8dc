"""Which bytes does a token string stand for?

Tokenizers hide bytes in strings in two ways. Byte-level BPE (GPT-2) writes each byte as one
printable character. SentencePiece writes text as it is, a space as U+2581, and a byte that no piece
covers as "<0x0A>". Working on bytes, instead of on the strings that a decoder returns, is what
makes decoding exact one token at a time: a character split over tokens is just some bytes.
"""

import json
import re
from typing import NamedTuple

import tokenizers

from helios_jax.config import require

SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte 0..255 (GPT-2's table).

    A byte that is a printable Latin-1 character is written as itself, the others as the characters
    from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTE_OF_CHARACTER = {character: byte for byte, character in enumerate(byte_alphabet())}


class Spelling(NamedTuple):
    """How a vocabulary spells bytes.

    Attributes:
      byte_level: each character is one byte of `byte_alphabet`.
      byte_fallback: "<0x0A>" is one byte.
      replacements: (what, with what) pairs, applied in order to a token's string.
      prefix_spaces: spaces that encoding put in front of the text, to be taken off again.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    prefix_spaces: int = 0

    def to_bytes(self, token: str, is_added: bool) -> bytes:
        """The bytes of one token; an added token (`is_added`) is never in the byte alphabet."""
        if self.byte_level:
            if not is_added and all(character in _BYTE_OF_CHARACTER for character in token):
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            return token.encode()
        if self.byte_fallback and not is_added and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def read_spelling(backend: tokenizers.Tokenizer) -> Spelling:
    """The spelling that the tokenizer's decoder implies; ValueError for another kind of decoder."""
    decoder = backend.decoder
    require(
        decoder is not None,
        "tokenizer decoder=None: must be ByteLevel or of SentencePiece's kind (Replace, "
        "ByteFallback, Fuse, Strip; or Metaspace); without one it is unknown how tokens join to "
        "text",
    )
    assert decoder is not None
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    spelling = Spelling()
    for step in steps:
        spelling = _add_step(spelling, step)
    return spelling


def _add_step(spelling: Spelling, step: dict) -> Spelling:
    match step:
        case {"type": "ByteLevel"}:
            return spelling._replace(byte_level=True)
        case {"type": "ByteFallback"}:
            return spelling._replace(byte_fallback=True)
        case {"type": "Fuse"}:
            return spelling
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return spelling._replace(replacements=(*spelling.replacements, (old, new)))
        case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
            return spelling._replace(prefix_spaces=start)
        case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
            return spelling._replace(
                replacements=(*spelling.replacements, (old, " ")),
                prefix_spaces=0 if scheme == "never" else 1,
            )
    raise ValueError(
        f"tokenizer decoder step {json.dumps(step, ensure_ascii=False)}: not implemented; known "
        "are ByteLevel, ByteFallback, Fuse, Metaspace, Replace of a string, and Strip of leading "
        "spaces"
    )
