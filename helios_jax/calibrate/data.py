"""Which tokens does calibration see, and which does it never see?

A unit is one request of a JSONL file, or one window of a text file. Units are told apart, shuffled
with a seed and split: the held-out ones are for measuring, the others are packed into sequences of
equal length, end to end. The same files, options and tokenizer give the same tokens everywhere.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helios_jax.config import require
from helios_jax.tokenizer import Tokenizer


class Calibration(NamedTuple):
    """Attributes:
    tokens_BT: int32, sequences without padding.
    held_out: token ids of the units that were set aside.
    description: JSON-ready, where the tokens came from.
    """

    tokens_BT: np.ndarray
    held_out: list[list[int]]
    description: dict[str, Any]


def load_calibration(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    num_sequences: int = 128,
    sequence_length: int = 512,
    held_out: float = 0.1,
    seed: int = 0,
) -> Calibration:
    """Reads calibration files and draws sequences from them.

    Args:
      paths: `.jsonl` files hold one request a line, see `conversation_of`; anything else is UTF-8
        text.
      num_sequences: how many sequences; fewer where the files hold no more.
      held_out: the share of units set aside, 0 to less than 1; rounded up to at least one unit
        unless 0.

    Raises:
      ValueError: naming the file (and line) that cannot be used, or a count out of range.
    """
    require(num_sequences >= 1, f"num_sequences={num_sequences}: must be at least 1")
    require(sequence_length >= 2, f"sequence_length={sequence_length}: must be at least 2")
    require(0 <= held_out < 1, f"held_out={held_out}: must be at least 0 and less than 1")
    require(bool(paths), "calibration: no file given")
    units = [unit for path in paths for unit in read_units(path, tokenizer, sequence_length)]
    distinct = [list(unit) for unit in dict.fromkeys(map(tuple, units))]
    order = np.random.default_rng(seed).permutation(len(distinct))
    num_held_out = min(int(np.ceil(held_out * len(distinct))), len(distinct) - 1)
    shuffled = [distinct[i] for i in order]
    stream = np.array(
        [token for unit in shuffled[num_held_out:] for token in unit][
            : num_sequences * sequence_length
        ],
        np.int32,
    )
    found = len(stream) // sequence_length
    names = [str(path) for path in paths]
    require(
        found >= 1,
        f"calibration {names}: holds {len(stream)} tokens beside the held-out ones: one sequence "
        f"takes {sequence_length}; give more text or shorter sequences",
    )
    tokens_BT = stream[: found * sequence_length].reshape(found, sequence_length)
    description = {
        "files": [path.name for path in paths],
        "num_sequences": found,
        "sequence_length": sequence_length,
        "held_out": held_out,
        "seed": seed,
    }
    return Calibration(tokens_BT, shuffled[:num_held_out], description)


def read_units(path: Path, tokenizer: Tokenizer, window: int) -> list[list[int]]:
    """Token ids of every request of a JSONL file, or of every `window` tokens of a text file.

    Raises:
      ValueError: naming the file, and the line of a request.
    """
    if path.suffix == ".jsonl":
        units = [
            tokenizer.encode(render(where, fields, tokenizer))
            for where, fields in read_objects(path)
        ]
    else:
        text = _read_text(path)
        tokens = tokenizer.encode(text) if text else []
        units = [tokens[i : i + window] for i in range(0, len(tokens), window)]
    units = [unit for unit in units if unit]
    require(bool(units), f"{path}: holds no text")
    return units


def read_objects(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(where, fields) of every line of a JSONL file but empty ones; where is "FILE:LINE".

    Raises:
      ValueError: naming the file, and the line that is no JSON object.
    """
    found = []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: is not JSON: {error}") from None
        require(isinstance(fields, dict), f"{where}: must be a JSON object, not {line[:40]!r}")
        found.append((where, fields))
    return found


def conversation_of(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of prompts asks: {"messages": list} or {"prompt": text}.

    A line has one of `messages`, `turns` (texts of a user, of which the first is asked) and
    `prompt`; of several the first of these counts.

    Raises:
      ValueError: naming `where`, which has none of them in its form.
    """
    messages, turns, prompt = (fields.get(name) for name in ("messages", "turns", "prompt"))
    if isinstance(messages, list):
        return {"messages": messages}
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return {"messages": [{"role": "user", "content": turns[0]}]}
    if isinstance(prompt, str):
        return {"prompt": prompt}
    raise ValueError(
        f"{where}: must have `prompt` (text), `messages` (a list) or `turns` (a list of texts)"
    )


def render(where: str, fields: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The text of a line of prompts, conversations by the chat template; see `conversation_of`.

    Raises:
      ValueError: naming `where`.
    """
    conversation = conversation_of(where, fields)
    if "prompt" in conversation:
        return conversation["prompt"]
    messages = conversation["messages"]
    try:
        # A conversation that ends with a question ends where the answer would begin.
        open_ended = bool(messages) and messages[-1]["role"] != "assistant"
        return tokenizer.apply_chat_template(messages, add_generation_prompt=open_ended)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: messages cannot be rendered: {error}") from None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text: {error}") from None
