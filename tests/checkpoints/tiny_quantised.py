"""How do the tests make small quantised checkpoints, with packing of their own?"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from checkpoints_conv.huggingface import tensor_name
from tests.checkpoints.tiny_checkpoints import (
    huggingface_json,
    random_weights,
    tiny_config,
    write_tokenizer,
)

FIXTURES = Path(__file__).parent.parent / "data" / "quantised"
GROUP = 32
Q_PROJ = ("layers_0", "attention", "q", "kernel")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}


def copy_fixture(name: str, folder: Path) -> Path:
    """A committed fixture without its reference, with a tokenizer (ids beyond 63 are unused)."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / name / file, folder / file)
    write_tokenizer(folder, size=64)
    return folder


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


def words(values, per_word=8, bits=4) -> np.ndarray:
    """[R, C] codes -> int32 [R, C / per_word]: value j of a word at bit j * bits."""
    values = np.asarray(values).astype(np.uint64)
    packed = np.zeros((values.shape[0], values.shape[1] // per_word), np.uint64)
    for j in range(per_word):
        packed |= values[:, j::per_word] << np.uint64(bits * j)
    return packed.astype(np.uint32).view(np.int32)


def awq_tensors(codes_NK, zero_NG, scale_NG) -> dict[str, np.ndarray]:
    order = np.arange(codes_NK.shape[0]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    return {
        "qweight": words(codes_NK[order].T),
        "qzeros": words(zero_NG[order].T),
        "scales": np.ascontiguousarray(scale_NG.T),
    }


def gptq_tensors(codes_NK, stored_zero_NG, scale_NG, g_idx=None) -> dict[str, np.ndarray]:
    """`stored_zero_NG`: as the file holds them, v1's minus one included."""
    tensors = {
        "qweight": np.ascontiguousarray(words(codes_NK).T),
        "qzeros": words(np.asarray(stored_zero_NG).T),
        "scales": np.ascontiguousarray(scale_NG.T),
    }
    return tensors if g_idx is None else tensors | {"g_idx": np.asarray(g_idx, np.int32)}


def random_linear(shape, seed=0, bits=4):
    """Codes uint8 [N, K], zero points [N, G] from 1 on, scales float16 [N, G]."""
    rng = np.random.default_rng(seed)
    num_out, num_in = shape
    codes = rng.integers(0, 1 << bits, shape, np.uint8)
    zero = rng.integers(1, 1 << bits, (num_out, num_in // GROUP), np.uint8)
    scale = rng.uniform(0.01, 0.1, zero.shape).astype(np.float16)
    return codes, zero, scale


def write_quantised(
    folder: Path,
    quantization: dict[str, Any],
    linear: dict[str, np.ndarray],
    path=Q_PROJ,
    config=None,
    **extra: np.ndarray,
) -> Path:
    """A model whose one linear at `path` has the tensors `linear` by suffix; all others dense."""
    config = config or tiny_config(num_layers=1)
    folder.mkdir(parents=True, exist_ok=True)
    values = huggingface_json(config) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values))
    write_tokenizer(folder)
    tensors = {tensor_name(at): array for at, array in random_weights(config).items()}
    module = tensor_name(path).rpartition(".")[0]
    del tensors[f"{module}.weight"]
    tensors |= {f"{module}.{suffix}": array for suffix, array in linear.items()}
    safetensors.numpy.save_file(tensors | extra, folder / "model.safetensors", {"format": "pt"})
    return folder
