"""Which models can be drafts, and what do they begin with?

    reduce_vocabulary(counts, table, num_tokens)   a `DraftVocabulary`: the most frequent ids
    prune(config, params, shape, vocabulary)       chosen layers of the target, narrowed
    initialise(config, key, target)                a configuration's own shape; equal leaves copied

All of them are ordinary `Transformer`s, or, by `is_draft_head`, `DraftHead`s.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.config import ModelConfig, require
from helios_jax.model import init_params
from helios_jax.model.params import Params
from helios_jax.quant import QuantTensor
from helios_jax.speculative import DraftVocabulary


@dataclass(frozen=True)
class PrunedShape:
    """What is kept of the target.

    Attributes:
      layers: the target's, in the order they run.
      intermediate_size: of the MLPs, the channels of the largest weights; None for all.
      hidden_size: of the residual stream, the channels of the largest embedding; None for all.
    """

    layers: tuple[int, ...]
    intermediate_size: int | None = None
    hidden_size: int | None = None

    def check(self, target: ModelConfig) -> None:
        """Raises ValueError for a layer or size that the target does not have."""
        require(
            bool(self.layers) and all(0 <= layer < target.num_layers for layer in self.layers),
            f"layers={self.layers}: must be one or more of 0..{target.num_layers - 1}",
        )
        for name in ("intermediate_size", "hidden_size"):
            value, most = getattr(self, name), getattr(target, name)
            require(
                value is None or 1 <= value <= most,
                f"{name}={value}: must be in 1..{most} (target)",
            )


def reduce_vocabulary(
    counts_V: np.ndarray, table_VD: np.ndarray, num_tokens: int, always: Sequence[int] = ()
) -> DraftVocabulary:
    """The `num_tokens` most frequent of the target's tokens; equally frequent ones by id.

    Args:
      counts_V: how often the target drew each.
      table_VD: its embedding: a token outside is read as the one inside with the nearest direction.
      always: ids that are in it whatever their counts: beginning and end of a sequence.
    """
    V = len(counts_V)
    check_vocab_tokens(num_tokens, V, always)
    counts = np.asarray(counts_V, np.int64).copy()
    counts[list(always)] = counts.max() + 1
    ids_U = np.sort(np.argsort(-counts, kind="stable")[:num_tokens]).astype(np.int32)
    table = np.asarray(table_VD, np.float32)
    table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-9)
    nearest_V = np.empty(V, np.int32)
    for first in range(0, V, 4096):
        nearest_V[first : first + 4096] = np.argmax(table[first : first + 4096] @ table[ids_U].T, 1)
    nearest_V[ids_U] = np.arange(num_tokens)
    return DraftVocabulary(ids_U, nearest_V)


def check_vocab_tokens(num_tokens: int, vocab_size: int, always: Sequence[int]) -> None:
    """Raises ValueError where a target's vocabulary cannot be reduced to so many tokens."""
    least = max(1, len(set(always)))
    require(
        least <= num_tokens <= vocab_size,
        f"vocab_tokens={num_tokens}: a draft's vocabulary must be of {least}..{vocab_size} tokens",
    )


def prune(
    config: ModelConfig,
    params: Params,
    shape: PrunedShape,
    vocabulary: DraftVocabulary | None = None,
) -> tuple[ModelConfig, Params]:
    """Some layers of a model, of some of its channels and tokens, float32.

    Heads stay: they are what a layer does. A narrowed residual stream needs no factor: RMS norms
    take the mean square over the channels that are there.

    Args:
      params: a checkpoint's, not fused; QuantTensors are dequantised.

    Raises:
      ValueError: a layer or size that the model does not have.
    """
    shape.check(config)
    tree = dense(params)["params"]
    table_VD = tree["embed"]["embedding"]
    kept_D = _largest(np.linalg.norm(table_VD, axis=0), shape.hidden_size)
    pruned: dict[str, Any] = {
        "embed": {"embedding": _of_tokens(table_VD[:, kept_D], 0, vocabulary)},
        "final_norm": {"scale": tree["final_norm"]["scale"][kept_D]},
    }
    if not config.tie_word_embeddings:
        head_DV = tree["lm_head"]["kernel"][kept_D]
        pruned["lm_head"] = {"kernel": _of_tokens(head_DV, 1, vocabulary)}
    for number, layer in enumerate(shape.layers):
        pruned[f"layers_{number}"] = _prune_layer(
            tree[f"layers_{layer}"], kept_D, shape.intermediate_size
        )
    narrowed = dataclasses.replace(
        config,
        num_layers=len(shape.layers),
        hidden_size=len(kept_D),
        intermediate_size=shape.intermediate_size or config.intermediate_size,
        **_special_tokens(config, vocabulary),
    )
    return narrowed, {"params": jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), pruned)}


def initialise(
    config: ModelConfig, key: jax.Array, target: Params, vocabulary: DraftVocabulary | None = None
) -> Params:
    """Random parameters of `config`, but those of the target's where path and shape agree.

    Of a draft head the embedding and the output head: its norms see other states. Its logits begin
    as large as the target's.
    """
    fresh = init_params(config, key)
    tree = dense(target)
    embedded = _of_tokens(tree["params"]["embed"]["embedding"], 0, vocabulary)
    tree["params"]["embed"] = {"embedding": embedded}
    if "lm_head" in tree["params"]:
        head = _of_tokens(tree["params"]["lm_head"]["kernel"], 1, vocabulary)
        tree["params"]["lm_head"] = {"kernel": head}
    if config.is_draft_head:
        scale_D = tree["params"]["final_norm"]["scale"]
        even_D = np.full_like(scale_D, np.sqrt(np.mean(scale_D**2)))
        tables = {
            name: tree["params"][name] for name in ("embed", "lm_head") if name in tree["params"]
        }
        tree["params"] = tables | {"final_norm": {"scale": even_D}}
    theirs = {jax.tree_util.keystr(path): leaf for path, leaf in _leaves(tree)}

    def choose(path, leaf):
        found = theirs.get(jax.tree_util.keystr(path))
        same = found is not None and found.shape == leaf.shape
        return jnp.asarray(found, jnp.float32) if same else leaf

    return jax.tree_util.tree_map_with_path(choose, fresh)


def draft_config(
    config: ModelConfig, vocabulary: DraftVocabulary | None = None, **changes: Any
) -> ModelConfig:
    """The target's configuration with some fields changed, as JSON gives them.

    Raises:
      ValueError: a field that there is not, or a value that breaks its rule.
    """
    require(
        "vocab_size" not in changes,
        f"vocab_size={changes.get('vocab_size')}: a draft's tokens are the target's, or the most "
        "frequent ones of them; give vocab_tokens instead",
    )
    require(
        not changes.get("is_draft_head")
        or changes.get("hidden_size", config.hidden_size) == config.hidden_size,
        f"hidden_size={changes.get('hidden_size')}: a draft head's is its target's, "
        f"{config.hidden_size}; leave it out",
    )
    fields = config.to_dict() | changes
    special = _special_tokens(config, vocabulary)
    return ModelConfig.from_dict(fields | special)


def dense(params: Params) -> dict[str, Any]:
    """Every leaf as a numpy array in float32, [in, out] for a linear's kernel."""

    def convert(path, leaf):
        if isinstance(leaf, QuantTensor):
            leaf = leaf.dequantize()
            leaf = leaf if path[-1].key == "embedding" else leaf.T
        return np.asarray(leaf, np.float32)

    return jax.tree_util.tree_map_with_path(
        convert, params, is_leaf=lambda leaf: isinstance(leaf, QuantTensor)
    )


def _prune_layer(layer: Params, kept_D: np.ndarray, intermediate_size: int | None) -> Params:
    ffn = layer["ffn"]
    # A channel of the MLP counts for what it can add: the size of what enters times what leaves.
    size_F = (
        np.linalg.norm(ffn["gate"]["kernel"], axis=0)
        * np.linalg.norm(ffn["up"]["kernel"], axis=0)
        * np.linalg.norm(ffn["down"]["kernel"], axis=1)
    )
    kept_F = _largest(size_F, intermediate_size)
    attention = layer["attention"]
    pruned_attention = {
        name: {
            field: (leaf[kept_D] if field == "kernel" else leaf)
            for field, leaf in attention[name].items()
        }
        for name in ("q", "k", "v")
    }
    pruned_attention["o"] = {field: leaf[..., kept_D] for field, leaf in attention["o"].items()}
    for name in ("q_norm", "k_norm"):
        if name in attention:
            pruned_attention[name] = attention[name]
    pruned_ffn = {
        name: {
            field: (leaf[kept_D][:, kept_F] if field == "kernel" else leaf[kept_F])
            for field, leaf in ffn[name].items()
        }
        for name in ("gate", "up")
    }
    pruned_ffn["down"] = {
        field: (leaf[kept_F][:, kept_D] if field == "kernel" else leaf[kept_D])
        for field, leaf in ffn["down"].items()
    }
    return {
        "attention_norm": {"scale": layer["attention_norm"]["scale"][kept_D]},
        "attention": pruned_attention,
        "ffn_norm": {"scale": layer["ffn_norm"]["scale"][kept_D]},
        "ffn": pruned_ffn,
    }


def _largest(size: np.ndarray, number: int | None) -> np.ndarray:
    """The indices of the `number` largest, ascending; all for None."""
    if number is None:
        return np.arange(len(size))
    return np.sort(np.argsort(-size, kind="stable")[:number])


def _of_tokens(table: np.ndarray, axis: int, vocabulary: DraftVocabulary | None) -> np.ndarray:
    return table if vocabulary is None else np.take(table, vocabulary.ids_U, axis=axis)


def _special_tokens(config: ModelConfig, vocabulary: DraftVocabulary | None) -> dict[str, Any]:
    """Configuration fields of a vocabulary, in the draft's ids; those it lacks are left out."""
    if vocabulary is None:
        return {}
    ids = vocabulary.draft_ids_V
    bos = config.bos_token_id
    known = [int(ids[token]) for token in config.eos_token_ids if ids[token] >= 0]
    return {
        "vocab_size": len(vocabulary.ids_U),
        "bos_token_id": int(ids[bos]) if bos is not None and ids[bos] >= 0 else None,
        "eos_token_ids": tuple(known),
    }


def num_params(params: Params) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def _leaves(tree: Params):
    return jax.tree_util.tree_flatten_with_path(tree)[0]
