"""Which leaves the parameters tree of a ModelConfig has, and whether a given leaf is right.

The tree (the Linen variables' "params"; F stands for intermediate_size, H for head_dim):

    embed/embedding                         [V, D]
    layers_{i}/attention_norm/scale         [D]
    layers_{i}/attention/{q,k,v,o}/kernel   [in, out], bias [out] where the config has one
    layers_{i}/attention/{q,k}_norm/scale   [H], with qk_norm
    layers_{i}/ffn_norm/scale               [D]
    layers_{i}/ffn/{gate,up,down}/kernel    [in, out], bias [out] where the config has one
    final_norm/scale                        [D]
    lm_head/kernel                          [D, V], absent when tie_word_embeddings

A draft head (`is_draft_head`) has no attention, `gate` and `up` of 2 * D inputs, and

    token_norm/scale                        [D]

A kernel or the embedding may be a QuantTensor, whose axes are always (out, in): for the embedding
that is (V, D). RoPE is the rotate-half convention. Dense leaves keep the dtype of their source.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax
import ml_dtypes
import numpy as np

from helios_jax.config import ModelConfig
from helios_jax.quant import QuantTensor

Path = tuple[str, ...]
Leaf = np.ndarray | QuantTensor

DENSE_DTYPES = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class LeafSpec:
    """What one leaf must be.

    Attributes:
      shape: as every source format states it: (out, in) of a linear, (V, D) of the embedding, (n,)
        of a bias or a norm.
      kind: "linear" (the dense leaf is the transposed matrix), "embedding" or "vector".
    """

    shape: tuple[int, ...]
    kind: str

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of the leaf when it is a dense array."""
        return self.shape[::-1] if self.kind == "linear" else self.shape


def expected_leaves(config: ModelConfig) -> dict[Path, LeafSpec]:
    """Every leaf of the tree, in the order in which checkpoints are read and written."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    leaves: dict[Path, LeafSpec] = {}

    def vector(path: Path, size: int) -> None:
        leaves[path] = LeafSpec((size,), "vector")

    def linear(path: Path, num_out: int, num_in: int, bias: bool) -> None:
        leaves[*path, "kernel"] = LeafSpec((num_out, num_in), "linear")
        if bias:
            vector((*path, "bias"), num_out)

    def attention(layer: str) -> None:
        vector((layer, "attention_norm", "scale"), hidden)
        linear((layer, "attention", "q"), q_size, hidden, config.qkv_bias)
        linear((layer, "attention", "k"), kv_size, hidden, config.qkv_bias)
        linear((layer, "attention", "v"), kv_size, hidden, config.qkv_bias)
        linear((layer, "attention", "o"), hidden, q_size, config.attention_output_bias)
        if config.qk_norm:
            vector((layer, "attention", "q_norm", "scale"), config.head_dim)
            vector((layer, "attention", "k_norm", "scale"), config.head_dim)

    leaves["embed", "embedding"] = LeafSpec((config.vocab_size, hidden), "embedding")
    num_inputs = 2 * hidden if config.is_draft_head else hidden
    for i in range(config.num_layers):
        layer = f"layers_{i}"
        if not config.is_draft_head:
            attention(layer)
        vector((layer, "ffn_norm", "scale"), hidden)
        linear((layer, "ffn", "gate"), ffn, num_inputs, config.mlp_bias)
        linear((layer, "ffn", "up"), ffn, num_inputs, config.mlp_bias)
        linear((layer, "ffn", "down"), hidden, ffn, config.mlp_bias)
    if config.is_draft_head:
        vector(("token_norm", "scale"), hidden)
    vector(("final_norm", "scale"), hidden)
    if not config.tie_word_embeddings:
        linear(("lm_head",), config.vocab_size, hidden, False)
    return leaves


def check_num_layers(where: str, config: ModelConfig, num_tensors: int) -> None:
    """Raises ValueError where `config` asks for more layers than the source can hold.

    Run before `expected_leaves`, whose cost grows with the number of layers: a damaged header may
    claim billions.
    """
    if config.num_layers > num_tensors:
        raise ValueError(
            f"{where}: the configuration has {config.num_layers} layers, but there are only "
            f"{num_tensors} tensors; the file is incomplete or its header damaged"
        )


def check_tensors(
    where: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ValueError naming `where` and every tensor missing, unexpected or wrongly shaped.

    Both mappings go from the source's tensor names to shapes.
    """
    problems = [
        f"tensor {name!r} is missing: expected shape {expected[name]}"
        for name in expected
        if name not in found
    ]
    problems += [
        f"tensor {name!r} has shape {found[name]}: the configuration needs {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    problems += [
        f"unexpected tensor {name!r} of shape {found[name]}: this architecture has no place for it"
        for name in found
        if name not in expected
    ]
    if problems:
        shown = "; ".join(problems[:_NAMES_SHOWN])
        hidden = len(problems) - _NAMES_SHOWN
        raise ValueError(f"{where}: {shown}" + (f"; and {hidden} more" if hidden > 0 else ""))


def checked_leaves(
    where: str, leaves: Iterable[tuple[Path, Leaf]], config: ModelConfig
) -> Iterator[tuple[Path, Leaf]]:
    """Passes `leaves` on, raising ValueError unless they are exactly the tree of `config`."""
    missing = expected_leaves(config)
    for path, leaf in leaves:
        name = "/".join(path)
        if path not in missing:
            raise ValueError(f"{where}: parameter {name!r} is unexpected or there twice")
        check_leaf(f"{where}: parameter {name!r}", leaf, missing.pop(path))
        yield path, leaf
    if missing:
        names = ["/".join(path) for path in missing]
        raise ValueError(f"{where}: parameters are missing: {', '.join(names[:_NAMES_SHOWN])}")


def check_leaf(where: str, leaf: Leaf, spec: LeafSpec) -> None:
    """Raises ValueError naming `where` unless `leaf` has the kind, shape and dtypes of `spec`."""
    if not isinstance(leaf, QuantTensor):
        if leaf.dtype not in DENSE_DTYPES:
            names = [dtype.name for dtype in DENSE_DTYPES]
            raise ValueError(f"{where} has dtype {leaf.dtype}: must be one of {names}")
        if leaf.shape != spec.dense_shape:
            raise ValueError(f"{where} has shape {leaf.shape}: expected {spec.dense_shape}")
        return
    if spec.kind == "vector":
        raise ValueError(f"{where} is quantised: norms and biases must be dense")
    if spec.kind == "embedding" and leaf.perm is not None:
        raise ValueError(f"{where} has an act-order permutation: an embedding has no inputs")
    leaf.validate(where)
    shape = (*leaf.packed.shape[:-2], leaf.out_features, leaf.in_features)
    if shape != spec.shape:
        raise ValueError(f"{where} has (out, in) shape {shape}: expected {spec.shape}")
    for field, dtypes in (
        ("scale", DENSE_DTYPES),
        ("offset", DENSE_DTYPES),
        ("zero", (np.dtype(np.int16),)),
        ("perm", (np.dtype(np.int32),)),
    ):
        array = getattr(leaf, field)
        if array is not None and array.dtype not in dtypes:
            names = [dtype.name for dtype in dtypes]
            raise ValueError(f"{where}: {field} has dtype {array.dtype}: must be one of {names}")


def leaf_nbytes(leaf: Leaf) -> int:
    """Bytes of a leaf's arrays."""
    return sum(array.nbytes for array in jax.tree.leaves(leaf))
