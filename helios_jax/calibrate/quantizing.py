"""How is a whole model quantised, layer by layer, and interrupted at any time?

Memory holds one layer, the activations of the calibration tokens that enter it, and one batch of
what happens inside it. After each layer both are on the disk (`helios_jax.calibrate.workspace`).
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from helios_jax.calibrate.data import Calibration
from helios_jax.calibrate.layerwise import STAGES, advance, quantize_layer
from helios_jax.calibrate.recipe import Recipe
from helios_jax.calibrate.workspace import Tree, Workspace, flatten, workspace
from helios_jax.config import ModelConfig, require
from helios_jax.model.forms import require_whole_model
from helios_jax.quant import QuantTensor, embedding_lookup, rtn

# Tokens that go through a layer together: enough for fast products, and so few that their arrays
# come from the heap. Larger ones are mapped and zeroed each time (4,096: 45% more CPU time).
BATCH_TOKENS = 512

Progress = Callable[[str, int, int], None]


class LayerReport(NamedTuple):
    """name, seconds, and LayerResult's errors and alphas of one layer."""

    name: str
    seconds: float
    errors: dict[str, float]
    alphas: dict[str, float]


def quantize(
    checkpoint: Any,
    recipe: Recipe,
    calibration: Calibration | None,
    folder: Path,
    progress: Progress = lambda stage, done, total: None,
    note_layer: Callable[[LayerReport], None] = lambda report: None,
) -> Callable[[], Iterator[tuple[tuple[str, ...], Any]]]:
    """Quantises every layer of a checkpoint into the workspace `folder`.

    Args:
      checkpoint: an opened one (`checkpoints_conv.open_checkpoint`).
      calibration: None is enough for method "rtn".
      folder: finished layers found there, of the same recipe, source and calibration, are not made
        again; the result is the same to the bit.
      progress: called with (layer name, stages done, stages in all).
      note_layer: called with each layer's report.

    Returns:
      What yields the leaves of the quantised model from `folder`, with their paths.

    Raises:
      ValueError: the recipe does not fit the model, or the calibration is missing.
    """
    config = checkpoint.config
    require_whole_model(config)
    require(
        recipe.method == "rtn" or calibration is not None,
        f"method={recipe.method!r}: needs calibration text (--calibration)",
    )
    recipe.check(in_features(config))
    tokens_BT = None if recipe.method == "rtn" or calibration is None else calibration.tokens_BT
    with workspace(folder, _identity(checkpoint, recipe, tokens_BT)) as work:
        _Walk(config, recipe, tokens_BT, work, progress, note_layer).run(checkpoint)
    return lambda: _stored_leaves(folder, config)


def in_features(config: ModelConfig) -> dict[str, int]:
    """Input channels of every linear of the model, the embedding's width for it, by name."""
    hidden = config.hidden_size
    channels = {"embed": hidden}
    for i in range(config.num_layers):
        for linear in ("attention/q", "attention/k", "attention/v", "ffn/gate", "ffn/up"):
            channels[f"layers_{i}/{linear}"] = hidden
        channels[f"layers_{i}/attention/o"] = config.num_heads * config.head_dim
        channels[f"layers_{i}/ffn/down"] = config.intermediate_size
    if not config.tie_word_embeddings:
        channels["lm_head"] = hidden
    return channels


class _Walk:
    """One pass over a checkpoint's groups of parameters: embed, each layer, what is behind."""

    def __init__(self, config, recipe, tokens_BT, work: Workspace, progress, note_layer):
        self.config, self.recipe, self.tokens_BT = config, recipe, tokens_BT
        self.work, self.progress, self.note_layer = work, progress, note_layer
        self.num_stages = len(STAGES) * config.num_layers
        self.num_done = 0
        # Layers before `first` are finished, and `hidden_BTD` is what enters that one.
        self.first, self.hidden_BTD = 0, None
        if work.resumed and tokens_BT is not None and (stored := work.load_hidden()) is not None:
            self.first, self.hidden_BTD = stored

    def run(self, checkpoint: Any) -> None:
        leaves = checkpoint.tensors()
        for group, items in groupby(leaves, key=lambda item: item[0][0]):
            if group.startswith("layers_"):
                self._layer(group, items)
            elif group == "embed":
                self._embed(_tree(items))
            else:
                self._behind(group, _tree(items))

    def _embed(self, tree: Tree) -> None:
        if self.tokens_BT is not None and self.hidden_BTD is None:
            table, tokens_BT = tree["embedding"], self.tokens_BT
            hidden_BTD = [embedding_lookup(table, row_T, jnp.float32) for row_T in tokens_BT]
            self.hidden_BTD = np.array(hidden_BTD)
        scheme = self.recipe.scheme_of("embed")
        if scheme is not None and not self.work.has_group("embed"):
            tree["embedding"] = rtn(_out_in(tree["embedding"], transposed=False), scheme)
        self.work.save_group("embed", tree)

    def _behind(self, group: str, tree: Tree) -> None:
        scheme = self.recipe.scheme_of(group) if group == "lm_head" else None
        if scheme is not None:
            tree["kernel"] = rtn(_out_in(tree["kernel"], transposed=True), scheme)
        self.work.save_group(group, tree)

    def _layer(self, name: str, items) -> None:
        index = int(name.removeprefix("layers_"))
        if index < self.first or (self.tokens_BT is None and self.work.has_group(name)):
            for _ in items:  # read past, one leaf at a time
                pass
            self.num_done += len(STAGES)
            self.progress(name, self.num_done, self.num_stages)
            return
        started = time.perf_counter()
        self.progress(name, self.num_done, self.num_stages)

        def note() -> None:
            self.num_done += 1
            self.progress(name, self.num_done, self.num_stages)

        batches = self._batches()
        result = quantize_layer(name, self.config, _tree(items), self.recipe, batches, note)
        self.work.save_group(name, result.params)
        if self.hidden_BTD is not None and index + 1 < self.config.num_layers:
            advance(self.config, result.params, batches)
            self.work.save_hidden(index + 1, self.hidden_BTD)
        seconds = time.perf_counter() - started
        self.note_layer(LayerReport(name, seconds, result.errors, result.alphas))

    def _batches(self) -> list[np.ndarray]:
        """Views of the activations, equally large but for the last."""
        if self.hidden_BTD is None:
            return []
        size = max(1, BATCH_TOKENS // self.hidden_BTD.shape[1])
        return [self.hidden_BTD[i : i + size] for i in range(0, len(self.hidden_BTD), size)]


def _identity(checkpoint: Any, recipe: Recipe, tokens_BT: np.ndarray | None) -> dict[str, Any]:
    """What a workspace belongs to: model, recipe and tokens."""
    manifest = Path(checkpoint.path) / "manifest.json"
    # A native manifest holds the sums of all leaves.
    source = manifest.read_bytes() if manifest.is_file() else _json(checkpoint.describe_source())
    return {
        "source": hashlib.sha256(source).hexdigest(),
        "config": checkpoint.config.to_dict()
        | {"eos_token_ids": [*checkpoint.config.eos_token_ids]},
        "recipe": recipe.to_dict(),
        "tokens": None if tokens_BT is None else hashlib.sha256(tokens_BT.tobytes()).hexdigest(),
        "shape": None if tokens_BT is None else list(tokens_BT.shape),
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _group_names(config: ModelConfig) -> Iterator[str]:
    yield "embed"
    yield from (f"layers_{i}" for i in range(config.num_layers))
    yield "final_norm"
    if not config.tie_word_embeddings:
        yield "lm_head"


def _stored_leaves(folder: Path, config: ModelConfig):
    work = Workspace(folder, fresh=False)
    for group in _group_names(config):
        for name, leaf in flatten(work.load_group(group)):
            yield (group, *name.split("/")), leaf


def _tree(items) -> Tree:
    """Leaves with paths that begin with one group, as the tree below it."""
    tree: Tree = {}
    for path, leaf in items:
        node = tree
        for part in path[1:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    return tree


def _out_in(weight: Any, transposed: bool):
    """float32 [out, in] of a dense or quantised leaf."""
    if isinstance(weight, QuantTensor):
        return weight.dequantize()
    weight = jnp.asarray(weight, jnp.float32)
    return weight.T if transposed else weight
