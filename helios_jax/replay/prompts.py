"""What is asked, where a trace says only how long it was? Prompts of given lengths from real text.

Without a text of the caller's, Python's own reference serves (`pydoc_data.topics`, 0.7 MB of
English prose and code under the PSF licence), which every Python carries.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from helios_jax.config import require
from helios_jax.replay.traces import Trace
from helios_jax.tokenizer import Tokenizer

DEFAULT_TEXT = "Python's language reference (pydoc_data.topics), PSF licence"


def read_text(path: str | os.PathLike | None = None) -> str:
    """The text of a file, or the default one.

    Raises:
      ValueError: there is none, or it is empty.
    """
    if path is not None:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        require(bool(text.strip()), f"text={os.fspath(path)!r}: is empty")
        return text
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "this Python comes without its reference (pydoc_data), which prompts are cut from; "
            "give a text with --text FILE"
        ) from error
    return "\n\n".join(topics[name] for name in sorted(topics))


def make_prompts(trace: Trace, text: str, tokenizer: Tokenizer, seed: int = 0) -> list[list[int]]:
    """Token ids of as many prompts as the trace has requests, of its lengths.

    A recording's own prompts are taken as they are. Elsewhere prompts are pieces of the text from
    random places; of a trace with prefix ids each id stands for a piece of its own, so that
    prompts share what they shared.

    Args:
      seed: of the places.
    """
    if trace.prompt_token_ids is not None:
        return [list(ids) for ids in trace.prompt_token_ids]
    tokens = np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)
    require(len(tokens) > 0, "text: holds no tokens")

    def piece(key: Sequence[int], length: int) -> np.ndarray:
        start = int(np.random.default_rng((seed, *key)).integers(len(tokens)))
        return tokens[(start + np.arange(length)) % len(tokens)]

    prompts = []
    for index, num_prompt in enumerate(trace.num_prompt.tolist()):
        if trace.prefix_ids_NI is None:
            prompts.append(piece((0, index), num_prompt).tolist())
            continue
        ids = [int(i) for i in trace.prefix_ids_NI[index] if i >= 0]
        pieces = [piece((1, i), trace.prefix_tokens) for i in ids]
        # Scaling rounds: what the ids do not reach is the request's own.
        pieces.append(piece((0, index), max(0, num_prompt - len(ids) * trace.prefix_tokens)))
        prompts.append(np.concatenate(pieces)[:num_prompt].tolist())
    return prompts
