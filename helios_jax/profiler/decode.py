"""What does a decode round move by part, of parameters as they lie in memory or of a format?

Every array is counted once a pass: the floor of device memory traffic where caches hold nothing
from pass to pass. Activations count too here (each linear's inputs and outputs, 0.1% of Llama 3 8B
at one row): a kernel keeps some of them on chip, XLA on a CPU few.
"""

from typing import Any, NamedTuple

import jax

from helios_jax.config import ModelConfig, require
from helios_jax.profiler.bytes import (
    Formats,
    kv_bytes_per_token,
    linear_bytes,
    linear_shapes,
    num_matmul_weights,
    vector_bytes,
)
from helios_jax.quant import QuantTensor
from helios_jax.quant.expanded import ExpandedWeight

PARTS = {
    "target_weights": "target weights",
    "kv_read": "KV read",
    "kv_write": "KV write",
    "draft": "draft",
    "activations": "activations",
    "logits": "logits",
    "sampler": "sampler",
}


class Weights(NamedTuple):
    """Bytes of a model's weights that a pass reads: all but the embedding once, and of the
    embedding a row per token."""

    once: float
    per_token: float


class DecodeBytes(NamedTuple):
    """Bytes of one round by part, see `PARTS`.

    A round drafts, then verifies; without drafts it is one pass of one token per row. `draft` is
    all that drafting moves.
    """

    target_weights: float
    kv_read: float
    kv_write: float
    draft: float
    activations: float
    logits: float
    sampler: float

    @property
    def total(self) -> float:
        return sum(self)


def weights_of_params(params: Any, num_rows: int) -> Weights:
    """Counts arrays, or `ShapeDtypeStruct`s, as a model reads them for `num_rows` tokens a pass.

    A CPU's weights lie in two forms, of which the number of rows chooses one.
    """
    tree = dict(params["params"])
    table = tree.pop("embed")["embedding"]
    table_bytes = _nbytes(table)
    rows = _leading(table)

    def read(weight: Any) -> float:
        if isinstance(weight, ExpandedWeight):
            if weight.serves_rows(num_rows):
                return _nbytes((weight.int8_KN, weight.scale_N))
            return _nbytes(weight.dense_KN)
        return _nbytes(weight)

    is_weight = {"is_leaf": lambda leaf: isinstance(leaf, ExpandedWeight)}
    once = sum(map(read, jax.tree.leaves(tree, **is_weight)))
    if "lm_head" not in tree:
        once += table_bytes
    return Weights(once, table_bytes / rows)


def weights_as_stored(params: Any) -> Weights:
    """Counts a checkpoint's parameters as a GPU reads them by default.

    Quantised leaves stay as they are; dense matrices become bfloat16, vectors float32.
    """

    def read(leaf: Any) -> float:
        if _is_quant(leaf):
            return _nbytes(leaf)
        return float(leaf.size) * (4 if leaf.ndim == 1 else 2)

    tree = dict(params["params"])
    table = tree.pop("embed")["embedding"]
    leaves = jax.tree.leaves(tree, is_leaf=_is_quant)
    once = sum(map(read, leaves))
    if "lm_head" not in tree:
        once += read(table)
    return Weights(once, read(table) / _leading(table))


def formats_as_stored(params: Any) -> Formats:
    """Of a checkpoint's parameters, by its first quantised linear and its embedding."""
    tree = dict(params["params"])
    table = tree.pop("embed")["embedding"]
    head_bits = (
        8 * _nbytes(table) / (table.out_features * table.in_features) if _is_quant(table) else 16
    )
    tree.pop("lm_head", None)
    linears = filter(_is_quant, jax.tree.leaves(tree, is_leaf=_is_quant))
    first = next(linears, None)
    if first is None:
        return Formats(weight_bits=16, head_bits=head_bits)
    zero_bits = 16 if first.offset is not None else first.bits if first.zero is not None else 0
    return Formats(first.bits, first.group_size, zero_bits=zero_bits, head_bits=head_bits)


def _is_quant(leaf: Any) -> bool:
    return isinstance(leaf, QuantTensor)


def weights_of_formats(config: ModelConfig, formats: Formats) -> Weights:
    """The same, predicted from a configuration."""
    head = num_matmul_weights(config)[1] * formats.head_bits / 8
    once = linear_bytes(config, formats) + head + vector_bytes(config)
    return Weights(once, config.hidden_size * formats.head_bits / 8)


def decode_bytes(
    config: ModelConfig,
    weights: Weights,
    *,
    num_rows: int,
    context_tokens: int,
    kv_bits: int,
    activation_bits: int = 16,
    num_draft_tokens: int = 0,
    draft: tuple[ModelConfig, Weights] | None = None,
) -> DecodeBytes:
    """One round of `num_rows` rows with `context_tokens` cached tokens each.

    Args:
      weights: of the target.
      activation_bits: between layers.
      num_draft_tokens: gamma, of every row; the target's pass then has 1 + gamma tokens a row.
      draft: the draft model, whose keys and values have `kv_bits` too, or a draft head, without
        any; None where drafting reads no weights (prompt lookup).
    """
    for name, value, least in (
        ("num_rows", num_rows, 1),
        ("context_tokens", context_tokens, 0),
        ("num_draft_tokens", num_draft_tokens, 0),
    ):
        require(value >= least, f"{name}={value}: must be at least {least}")
    num_tokens = num_rows * (1 + num_draft_tokens)
    drafted = 0.0
    if draft is not None:
        alone = decode_bytes(
            *draft, num_rows=num_rows, context_tokens=context_tokens, kv_bits=kv_bits,
            activation_bits=activation_bits,
        )  # fmt: skip
        drafted = num_draft_tokens * alone.total
    kv_token = kv_bytes_per_token(config, kv_bits)
    logits = num_tokens * config.vocab_size * 4.0
    between = sum(sum(shape) for shape in linear_shapes(config)) * config.num_layers
    return DecodeBytes(
        target_weights=weights.once + num_tokens * weights.per_token,
        kv_read=float(num_rows * context_tokens * kv_token),
        kv_write=float(num_tokens * kv_token),
        draft=drafted,
        activations=num_tokens * between * activation_bits / 8,
        # Written once in float32, and read once by an argmax; other sampling reads more.
        logits=logits,
        sampler=logits,
    )


def _nbytes(tree: Any) -> float:
    return float(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)))


def _leading(table: Any) -> int:
    """Rows of an embedding: of an array [V, D], or of a QuantTensor's codes."""
    return jax.tree.leaves(table)[0].shape[0]
