"""How are torch's own weight files (pytorch_model.bin) read without running what is in them?"""

from pathlib import Path as FilePath
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints_conv.tensor_files import (
    TORCH_INDEX,
    TORCH_SINGLE,
    TensorInfo,
    shards,
)


class TorchFiles:
    """Tensors in torch's files, memory-mapped; needs torch, and accepts nothing but tensors."""

    def __init__(self, folder: FilePath):
        self._loaded: dict[FilePath, dict[str, Any]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for name, path in shards(folder, TORCH_SINGLE, TORCH_INDEX, self._names).items():
            tensor = self._loaded[path][name]
            dtype = _dtype_name(tensor)
            if dtype is None:
                raise ValueError(
                    f"{path}: tensor {name!r} has dtype {tensor.dtype}: must be one of "
                    f"{tuple(_TORCH_DTYPES.values())}"
                )
            self.tensors[name] = TensorInfo(tuple(tensor.shape), dtype, path)

    def read(self, name: str) -> np.ndarray:
        info = self.tensors[name]
        tensor = self._loaded[info.file][name].detach().contiguous()
        if info.dtype == "BF16":
            import torch

            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return tensor.numpy().copy()

    def same_bytes(self, first: str, second: str) -> bool:
        return self.read(first).tobytes() == self.read(second).tobytes()

    def _names(self, path: FilePath) -> list[str]:
        self._loaded[path] = _load(path)
        return list(self._loaded[path])


_TORCH_DTYPES = {
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int8": "I8",
    "torch.uint8": "U8",
}


def _dtype_name(tensor: Any) -> str | None:
    return _TORCH_DTYPES.get(str(tensor.dtype))


def _load(path: FilePath) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{path}: is a pickle, which only torch reads, and torch is not installed; install "
            "torch, or write the weights as safetensors with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        ) from None
    try:
        # weights_only refuses every pickle that would call code; old files cannot be mapped.
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle and zip errors of many kinds
        first_line = str(error).strip().splitlines()[:1]
        raise ValueError(
            f"{path}: torch cannot read it as weights alone: {' '.join(first_line)}"
        ) from None
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()
    ):
        raise ValueError(f"{path}: must hold a dict of named tensors")
    return loaded
