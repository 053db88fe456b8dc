"""How good is a model on given text, and how far is it from another one?

Perplexity is exp of the mean negative log-likelihood per token. A text longer than the context is
cut into windows of `context` tokens that advance by `stride`, and each window scores only tokens
that no earlier one has: every token but the text's first is scored once, with at least
`context - stride` tokens before it (but at the text's beginning). A stride equal to the context is
cheapest, and scores the first tokens of each window with little before them.

Against a reference p, on the same tokens: mean KL divergence sum p (log p - log q) in nats, and the
share of positions at which both have the same likeliest token. The reference's last hidden states
are kept, not its logits, so that several models can be measured against one run of it.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.config import require
from helios_jax.model import Transformer

# Tokens that go through a model together, and through its head.
_BATCH_TOKENS = 2048
_CHUNK_TOKENS = 512


@dataclass(frozen=True)
class Scores:
    """What a model gets on one text.

    Attributes:
      num_tokens: scored ones.
      perplexity: exp of the mean negative log-likelihood.
      kl: mean KL divergence from the reference, nats; None without one.
      top1_agreement: share of positions whose likeliest tokens agree; None without a reference.
    """

    num_tokens: int
    perplexity: float
    kl: float | None = None
    top1_agreement: float | None = None


@dataclass(frozen=True)
class Windows:
    """A text cut for scoring.

    Attributes:
      tokens_BT: int32, padded with token 0 at the end.
      positions_BT: int32, -1 for padding.
      scored_BT: bool, the positions whose *next* token is scored; those tokens stand in targets_BT.
    """

    tokens_BT: np.ndarray
    positions_BT: np.ndarray
    targets_BT: np.ndarray
    scored_BT: np.ndarray


def cut_windows(tokens: Sequence[int], context: int, stride: int) -> Windows:
    """Windows of at most `context` tokens, see the module.

    Raises:
      ValueError: fewer than two tokens, or a stride outside 1..context.
    """
    require(context >= 2, f"context={context}: must be at least 2")
    require(1 <= stride <= context, f"stride={stride}: must be in 1..{context} (context)")
    require(len(tokens) >= 2, f"a text of {len(tokens)} tokens has nothing to score; give more")
    windows = []
    scored_until = 0  # tokens before this index need no score: the first never does
    start = 0
    while scored_until < len(tokens) - 1:
        inputs = np.asarray(tokens[start : start + context], np.int32)
        targets = np.asarray(tokens[start + 1 : start + context + 1], np.int32)
        size = len(targets)
        width = np.arange(context)
        scored = (width < size) & (width + start >= scored_until)
        windows.append(
            (
                np.pad(inputs, (0, context - len(inputs))),
                np.where(width < len(inputs), width, -1),
                np.pad(targets, (0, context - size)),
                scored,
            )
        )
        scored_until = start + size
        start += stride
    tokens_BT, positions_BT, targets_BT, scored_BT = map(np.stack, zip(*windows, strict=True))
    return Windows(tokens_BT, positions_BT.astype(np.int32), targets_BT, scored_BT)


Progress = Callable[[int, int], None]


def _no_progress(done: int, total: int) -> None:
    pass


class Reference:
    """A model whose last hidden states on given windows others are compared with.

    Attributes:
      by_length: its own scores, see `score_by_length`.
    """

    def __init__(
        self,
        model: Transformer,
        params: Any,
        windows: Windows,
        progress: Progress = _no_progress,
        edges: Sequence[int] = (),
    ):
        self.model, self.head = model, _head_params(params)
        self.hidden: list[np.ndarray] = []
        self.by_length = score_by_length(
            model, params, windows, edges, None, progress, keep=self.hidden.append
        )

    @property
    def scores(self) -> Scores:
        """Its own, where lengths were not told apart."""
        (scores,) = self.by_length
        return scores


def score(
    model: Transformer,
    params: Any,
    windows: Windows,
    reference: Reference | None = None,
    progress: Progress = _no_progress,
) -> Scores:
    """The model's scores on the windows of one text.

    Args:
      reference: made of the same windows.
      progress: called with (windows done, windows in all).
    """
    return score_by_length(model, params, windows, (), reference, progress)[0]


def score_by_length(
    model: Transformer,
    params: Any,
    windows: Windows,
    edges: Sequence[int],
    reference: Reference | None = None,
    progress: Progress = _no_progress,
    cache: Any = None,
    keep: Callable[[np.ndarray], None] = lambda hidden_BTD: None,
) -> list[Scores]:
    """`score` once per range of context lengths: below edges[0], from there below edges[1], …

    The context of a scored token is what stands before it in its window. A range without tokens
    has `num_tokens` 0 and a perplexity of NaN.

    Args:
      edges: increasing; () for one range.
      cache: see `helios_jax.cache`; None for one that changes nothing.
      keep: is given the last hidden states of each batch of windows.
    """
    sums = np.zeros((len(edges) + 1, 4), np.float64)
    head = _head_params(params)
    total, done = len(windows.tokens_BT), 0
    for index, batch in enumerate(_batches(windows)):
        hidden_BTD = _hidden(model, params, batch.tokens_BT, batch.positions_BT, cache)
        compared = ()
        if reference is not None:
            compared = reference.model, reference.head, reference.hidden[index]
        per_token = _token_scores(model, head, hidden_BTD, batch.targets_BT, *compared)
        chosen = batch.scored_BT
        ranges = np.searchsorted(edges, batch.positions_BT[chosen] + 1, side="right")
        for column, values in enumerate((np.ones(chosen.shape), *per_token)):
            np.add.at(sums[:, column], ranges, np.asarray(values, np.float64)[chosen])
        keep(np.asarray(hidden_BTD))
        done = min(done + len(batch.tokens_BT), total)
        progress(done, total)
    return [_scores(*row.tolist(), compared=reference is not None) for row in sums]


def _scores(count: float, nll: float, kl: float, agreements: float, *, compared: bool) -> Scores:
    if count == 0:
        return Scores(0, math.nan)
    return Scores(
        num_tokens=int(count),
        perplexity=math.exp(nll / count) if math.isfinite(nll) else math.inf,
        kl=kl / count if compared else None,
        top1_agreement=agreements / count if compared else None,
    )


def mean_scores(by_domain: Mapping[str, Scores]) -> Scores:
    """The average over domains: arithmetic means, each domain counting alike."""
    scores = list(by_domain.values())

    def mean(name: str) -> float | None:
        values = [getattr(one, name) for one in scores]
        return None if None in values else sum(values) / len(values)

    perplexity = mean("perplexity")
    assert perplexity is not None
    return Scores(
        sum(one.num_tokens for one in scores), perplexity, mean("kl"), mean("top1_agreement")
    )


def _batches(windows: Windows):
    """Batches of equal shape: the last is padded with windows that score nothing."""
    count, context = windows.tokens_BT.shape
    size = min(count, max(1, _BATCH_TOKENS // context))
    for first in range(0, count, size):
        pieces = [
            array[first : first + size]
            for array in (
                windows.tokens_BT, windows.positions_BT, windows.targets_BT, windows.scored_BT,
            )
        ]  # fmt: skip
        missing = size - len(pieces[0])
        yield Windows(*(np.pad(piece, ((0, missing), (0, 0))) for piece in pieces))


@functools.partial(jax.jit, static_argnums=0)
def _hidden(model, params, tokens_BT, positions_BT, cache):
    return model.apply(params, tokens_BT, positions_BT, cache, method="hidden")[0]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _token_scores(
    model, head, hidden_BTD, targets_BT,
    reference_model=None, reference_head=None, reference_BTD=None,
):  # fmt: skip
    """Negative log-likelihood, KL and agreement of every token, float32 [B, T] each.

    A few hundred tokens at a time, so that few logits exist at once.
    """

    def chunk(item):
        hidden_TD, targets_T, reference_TD = item
        logits_TV = model.apply(head, hidden_TD, method="logits")
        logq_TV = jax.nn.log_softmax(logits_TV)
        nll_T = -jnp.take_along_axis(logq_TV, targets_T[:, None], axis=-1)[:, 0]
        if reference_model is None:
            return nll_T, jnp.zeros_like(nll_T), jnp.zeros_like(nll_T)
        other_TV = reference_model.apply(reference_head, reference_TD, method="logits")
        logp_TV = jax.nn.log_softmax(other_TV)
        kl_T = jnp.sum(jnp.exp(logp_TV) * (logp_TV - logq_TV), axis=-1)
        same_T = jnp.argmax(logits_TV, axis=-1) == jnp.argmax(other_TV, axis=-1)
        return nll_T, kl_T, same_T.astype(jnp.float32)

    count = targets_BT.size
    size = min(_CHUNK_TOKENS, count)

    def chunks(array):
        """[B, T, ...] -> [chunks, size, ...], padded with zeros."""
        flat = array.reshape(count, *array.shape[2:])
        padding = [(0, -count % size)] + [(0, 0)] * (flat.ndim - 1)
        return jnp.pad(flat, padding).reshape(-1, size, *flat.shape[1:])

    reference_BTD = hidden_BTD if reference_BTD is None else reference_BTD
    per_chunk = jax.lax.map(chunk, tuple(map(chunks, (hidden_BTD, targets_BT, reference_BTD))))
    return tuple(values.reshape(-1)[:count].reshape(targets_BT.shape) for values in per_chunk)


def _head_params(params: Any) -> Any:
    """What `Transformer.logits` needs, so that a reference keeps no more."""
    tree = params["params"]
    return {"params": {name: tree[name] for name in ("lm_head", "embed") if name in tree}}
