"""Which scales do an FP8 key and value cache need, as a checkpoint states them?"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from checkpoints_conv.json_files import read_json
from helios_jax.config import ModelConfig

# Names within model.layers.{i}.self_attn: compressed-tensors and vLLM; AutoFP8; ModelOpt; one scale
# for both.
_NAMES = {
    "k_scale": "k",
    "v_scale": "v",
    "k_proj.output_scale": "k",
    "v_proj.output_scale": "v",
    "k_proj.k_scale": "k",
    "v_proj.v_scale": "v",
    "kv_scale": "kv",
}


@dataclass(frozen=True)
class KvScales:
    """Scales of a quantised KV cache: a stored value q stands for q * scale.

    Attributes:
      k_LK, v_LK: float32 [L, K], one per layer and KV head, finite and greater than 0. A source
        with one scale per layer has it repeated for every head.
    """

    k_LK: np.ndarray
    v_LK: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Exact: every float32 is a float64, and JSON keeps those."""
        return {"k": self.k_LK.tolist(), "v": self.v_LK.tolist()}


def load_kv_scales(path: FilePath, config: ModelConfig) -> KvScales:
    """What `KvScales.to_json` gave, from a JSON file; a ValueError that names it."""
    content = read_json(path)
    try:
        scales = [np.asarray(content[name], np.float32) for name in ("k", "v")]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: must hold k and v, lists of numbers per layer and KV head: {error}"
        ) from None
    expected = (config.num_layers, config.num_kv_heads)
    for name, array in zip(("k", "v"), scales, strict=True):
        if array.shape != expected:
            raise ValueError(f"{path}: {name} has shape {array.shape}: expected {expected}")
        _check_values(f"{path}: {name}", array)
    return KvScales(*scales)


def kv_scale_tensors(names: Iterable[str], num_layers: int) -> dict[str, tuple[int, str]]:
    """The tensors among `names` that hold KV scales: (layer, "k", "v" or "kv") by name."""
    found = {}
    for name in names:
        parts = name.split(".", 4)
        if len(parts) < 5 or parts[:2] != ["model", "layers"] or parts[3] != "self_attn":
            continue
        if parts[4] in _NAMES and parts[2].isdecimal() and int(parts[2]) < num_layers:
            found[name] = int(parts[2]), _NAMES[parts[4]]
    return found


def read_kv_scales(
    where: str,
    tensors: dict[str, tuple[int, str]],
    read: Callable[[str], np.ndarray],
    config: ModelConfig,
) -> KvScales | None:
    """The scales in `tensors` (see `kv_scale_tensors`); None without any.

    Raises:
      ValueError: naming `where` and the tensor that is missing, there twice, wrongly shaped or not
        a positive number.
    """
    if not tensors:
        return None
    heads = config.num_kv_heads
    scales = {kind: np.zeros((config.num_layers, heads), np.float32) for kind in ("k", "v")}
    for name, (layer, stated) in tensors.items():
        value = np.asarray(read(name)).astype(np.float32).reshape(-1)
        if value.size not in (1, heads):
            raise ValueError(
                f"{where}: tensor {name!r} has {value.size} values: expected 1, or one for each of "
                f"the {heads} KV heads"
            )
        _check_values(f"{where}: tensor {name!r}", value)
        for kind in stated:
            if scales[kind][layer].any():
                raise ValueError(f"{where}: tensor {name!r}: a second {kind} scale of its layer")
            scales[kind][layer] = value
    for kind, array in scales.items():
        for layer in np.flatnonzero(array[:, 0] == 0):
            raise ValueError(
                f"{where}: layer {layer} has no {kind}_scale, but other KV scales are there"
            )
    return KvScales(scales["k"], scales["v"])


def write_kv_scales(path: FilePath, scales: KvScales) -> None:
    path.write_text(json.dumps(scales.to_json()) + "\n", encoding="utf-8")


def _check_values(where: str, array: np.ndarray) -> None:
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError(f"{where} holds {array.tolist()}: scales must be finite and above 0")
