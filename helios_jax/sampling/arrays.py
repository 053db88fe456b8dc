"""How are the sampling parameters of a batch held on the device: one array row per request."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from helios_jax.config import require
from helios_jax.sampling.params import SamplingParams

UNLIMITED_TOKENS = np.iinfo(np.int32).max


class MinTokens(NamedTuple):
    """min_tokens_B: int32; suppressed_ids_BE: int32, the ids barred until then (-1 padded):
    end-of-sequence ids, even ignored ones, and stop ids."""

    min_tokens_B: Array
    suppressed_ids_BE: Array


class LogitBias(NamedTuple):
    """ids_BI: int32, -1 padded; values_BI: float32, added to their logits."""

    ids_BI: Array
    values_BI: Array


class Penalties(NamedTuple):
    """repetition_B, presence_B, frequency_B: float32; 1, 0, 0 is none."""

    repetition_B: Array
    presence_B: Array
    frequency_B: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingArrays:
    """The sampling parameters of B rows; ids are padded with -1.

    A part that is None is compiled out. What recompiles a program is a change of B, of which parts
    are None, or of a padded width (E, I, W, X), exactly a change of `SamplingShapes`. Every value
    changes freely.

    Attributes:
      temperature_B: float32; below 1e-5 the row is greedy.
      top_p_B: float32 in (0, 1].
      top_k_B: int32; 0 keeps all.
      min_p_B: float32 in [0, 1].
      max_tokens_B: int32, output tokens at most; 2**31 - 1 is no limit.
      seed_B2: uint32, the row's 64-bit seed, high word first.
      stop_token_ids_BE: int32, ids that end the row: end-of-sequence ids, unless ignored, and stop
        ids.
      min_tokens: None where no row asks for a minimum.
      penalties: None where no row has one; otherwise a history with token counts is needed.
      logit_bias: None where no row has one.
      allowed_BV: bool, the ids that may be drawn; None where every row allows all.
      bad_words_BWX: int32, token sequences flush right (the barred id last), -1 in front and for
        absent words; None where no row has any, otherwise a history of recent tokens is needed.
    """

    temperature_B: Array
    top_p_B: Array
    top_k_B: Array
    min_p_B: Array
    max_tokens_B: Array
    seed_B2: Array
    stop_token_ids_BE: Array
    min_tokens: MinTokens | None = None
    penalties: Penalties | None = None
    logit_bias: LogitBias | None = None
    allowed_BV: Array | None = None
    bad_words_BWX: Array | None = None


@dataclass(frozen=True)
class SamplingShapes:
    """The static half of `SamplingArrays`: programs are compiled per value of this, and per B.

    Widths are rounded up to powers of two so that few values occur; 0 or False leaves the part out.
    `a | b` has room for the rows of both.

    Attributes:
      num_stop_ids: width E of `stop_token_ids_BE`.
      num_suppressed_ids: width E of `min_tokens.suppressed_ids_BE`.
      penalties: whether any row has one.
      num_bias_ids: width I.
      allowed: whether any row restricts its tokens.
      num_bad_words, bad_word_length: widths W and X.
    """

    num_stop_ids: int = 0
    num_suppressed_ids: int = 0
    penalties: bool = False
    num_bias_ids: int = 0
    allowed: bool = False
    num_bad_words: int = 0
    bad_word_length: int = 0

    def __or__(self, other: "SamplingShapes") -> "SamplingShapes":
        return SamplingShapes(
            *(max(a, b) for a, b in zip(_values(self), _values(other), strict=True))
        )


def sampling_shapes(
    params: Sequence[SamplingParams], *, eos_token_ids: Sequence[int] = ()
) -> SamplingShapes:
    """The smallest shapes that hold these rows."""
    words = [row.bad_words_token_ids or () for row in params]
    return SamplingShapes(
        num_stop_ids=_bucket(len(_stop_ids(row, eos_token_ids)) for row in params),
        num_suppressed_ids=_bucket(len(_suppressed_ids(row, eos_token_ids)) for row in params),
        penalties=any(row.has_penalties for row in params),
        num_bias_ids=_bucket(len(row.logit_bias or ()) for row in params),
        allowed=any(row.allowed_token_ids is not None for row in params),
        num_bad_words=_bucket(len(row) for row in words),
        bad_word_length=_bucket(len(word) for row in words for word in row),
    )


def stack_sampling(
    params: Sequence[SamplingParams],
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
    shapes: SamplingShapes | None = None,
    rng: np.random.Generator | None = None,
) -> SamplingArrays:
    """The parameters of one row each, of any mixture, as arrays.

    Args:
      params: one per row, with n = 1 (`SamplingParams.output` splits a larger n).
      vocab_size: the model's (V).
      eos_token_ids: the model's end-of-sequence ids.
      shapes: room to leave, for rows that are written into the arrays later; None for the smallest.
      rng: source of the seeds of unseeded rows; None takes fresh entropy.

    Raises:
      ValueError: no rows, n > 1, an id outside the vocabulary, bad_words without their token ids,
        or rows that exceed `shapes`.
    """
    require(len(params) > 0, "params=[]: must hold the parameters of at least one row")
    for row in params:
        _check_row(row, vocab_size)
    for token in eos_token_ids:
        _check_id("eos_token_ids", token, vocab_size)
    needed = sampling_shapes(params, eos_token_ids=eos_token_ids)
    shapes = needed if shapes is None else shapes
    require(
        shapes | needed == shapes,
        f"shapes={shapes}: too small for rows that need {needed}; use "
        "shapes | sampling_shapes(params)",
    )
    rng = np.random.default_rng() if rng is None else rng

    def numbers(get: Callable[[SamplingParams], float], dtype: type) -> Array:
        return jnp.asarray(np.array([get(row) for row in params], dtype))

    def ids(get: Callable[[SamplingParams], Sequence[int]], width: int) -> Array:
        return _padded([get(row) for row in params], width)

    return SamplingArrays(
        temperature_B=numbers(lambda row: row.temperature, np.float32),
        top_p_B=numbers(lambda row: row.top_p, np.float32),
        top_k_B=numbers(lambda row: min(max(row.top_k, 0), vocab_size), np.int32),
        min_p_B=numbers(lambda row: row.min_p, np.float32),
        max_tokens_B=numbers(lambda row: row.max_tokens or UNLIMITED_TOKENS, np.int32),
        seed_B2=jnp.asarray(np.array([_seed_words(row.seed, rng) for row in params], np.uint32)),
        stop_token_ids_BE=ids(lambda row: _stop_ids(row, eos_token_ids), shapes.num_stop_ids),
        min_tokens=None
        if not shapes.num_suppressed_ids
        else MinTokens(
            numbers(lambda row: row.min_tokens, np.int32),
            ids(lambda row: _suppressed_ids(row, eos_token_ids), shapes.num_suppressed_ids),
        ),
        penalties=None
        if not shapes.penalties
        else Penalties(
            numbers(lambda row: row.repetition_penalty, np.float32),
            numbers(lambda row: row.presence_penalty, np.float32),
            numbers(lambda row: row.frequency_penalty, np.float32),
        ),
        logit_bias=_logit_bias(params, shapes.num_bias_ids) if shapes.num_bias_ids else None,
        allowed_BV=_allowed(params, vocab_size) if shapes.allowed else None,
        bad_words_BWX=_bad_words(params, shapes) if shapes.num_bad_words else None,
    )


def is_stop_token(sampling: SamplingArrays, tokens_B: Array) -> Array:
    """Which rows' tokens end them, bool [B]; a token of -1 ends none."""
    hits_BE = tokens_B[:, None] == sampling.stop_token_ids_BE
    return jnp.any(hits_BE, axis=1) & (tokens_B >= 0)


def _values(shapes: SamplingShapes) -> tuple:
    return dataclasses.astuple(shapes)


def _bucket(sizes) -> int:
    largest = max(sizes, default=0)
    return 0 if largest == 0 else 1 << (largest - 1).bit_length()


def _stop_ids(row: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    eos = () if row.ignore_eos else tuple(eos_token_ids)
    return tuple(dict.fromkeys(eos + tuple(row.stop_token_ids)))


def _suppressed_ids(row: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    if row.min_tokens == 0:
        return ()
    return tuple(dict.fromkeys(tuple(eos_token_ids) + tuple(row.stop_token_ids)))


def _padded(rows: Sequence[Sequence[int]], width: int) -> Array:
    padded = np.full((len(rows), width), -1, np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return jnp.asarray(padded)


def _logit_bias(params: Sequence[SamplingParams], width: int) -> LogitBias:
    values = np.zeros((len(params), width), np.float32)
    for i, row in enumerate(params):
        values[i, : len(row.logit_bias or {})] = list((row.logit_bias or {}).values())
    ids_BI = _padded([tuple(row.logit_bias or ()) for row in params], width)
    return LogitBias(ids_BI, jnp.asarray(values))


def _allowed(params: Sequence[SamplingParams], vocab_size: int) -> Array:
    allowed = np.ones((len(params), vocab_size), bool)
    for i, row in enumerate(params):
        if row.allowed_token_ids is not None:
            allowed[i] = False
            allowed[i, list(row.allowed_token_ids)] = True
    return jnp.asarray(allowed)


def _bad_words(params: Sequence[SamplingParams], shapes: SamplingShapes) -> Array:
    words = np.full((len(params), shapes.num_bad_words, shapes.bad_word_length), -1, np.int32)
    for i, row in enumerate(params):
        for j, word in enumerate(row.bad_words_token_ids or ()):
            words[i, j, -len(word) :] = word
    return jnp.asarray(words)


def _seed_words(seed: int | None, rng: np.random.Generator) -> tuple[int, int]:
    bits = int(rng.integers(2**64, dtype=np.uint64)) if seed is None else seed % 2**64
    return bits >> 32, bits & 0xFFFFFFFF


def _check_row(row: SamplingParams, vocab_size: int) -> None:
    require(
        row.n == 1,
        f"n={row.n}: a row is one output; use SamplingParams.output(i) for each, or to_arrays",
    )
    require(
        not row.bad_words or row.bad_words_token_ids is not None,
        f"bad_words={list(row.bad_words)}: their token ids are missing; call "
        "SamplingParams.tokenize_bad_words(encode) first",
    )
    named = {
        "stop_token_ids": row.stop_token_ids,
        "allowed_token_ids": row.allowed_token_ids or (),
        "logit_bias": row.logit_bias or (),
        "bad_words_token_ids": [t for word in row.bad_words_token_ids or () for t in word],
    }
    for name, tokens in named.items():
        for token in tokens:
            _check_id(name, token, vocab_size)


def _check_id(name: str, token: int, vocab_size: int) -> None:
    require(
        0 <= token < vocab_size,
        f"{name} contains {token}: must be in 0..{vocab_size - 1} (vocab_size); remove it",
    )
