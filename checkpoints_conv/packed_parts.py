"""Which leaves of a checkpoint can AWQ and GPTQ files hold packed, and in which common form?"""

import ml_dtypes
import numpy as np

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.dense_rows import dense_chunks, exact_chunks
from checkpoints_conv.huggingface import module_name, tensor_name
from checkpoints_conv.quant_format import unsigned_zeros
from checkpoints_conv.safetensors_writer import SafetensorsWriter
from checkpoints_conv.tree import Leaf, LeafSpec, Path
from helios_jax.quant import FLOAT8, QuantTensor

_16_BITS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


class CommonForm:
    """Bits and group size that all packed linears of a file share.

    Attributes:
      bits: None until the first linear.
      dense_modules: linears within layers that are dense, by Hugging Face's names.
    """

    def __init__(self, method: str, allowed_bits: tuple[int, ...]):
        self.bits: int | None = None
        self.dense_modules: list[str] = []
        self._method = method
        self._allowed_bits = allowed_bits
        self._group_sizes: set[int] = set()

    @property
    def group_size(self) -> int:
        """Channels, or -1 for one group per output."""
        return max(self._group_sizes)

    def why_not(self, weight: QuantTensor) -> str | None:
        """Why the weight cannot be packed like those before it; None where it can."""
        if weight.packed.dtype == FLOAT8 or weight.bits not in self._allowed_bits:
            kind = "FP8" if weight.packed.dtype == FLOAT8 else f"{weight.bits}-bit"
            return f"holds {kind} codes: {self._method} has {self._allowed_bits} bits"
        if weight.offset is not None:
            return "has float offsets (GGUF Q4_1), which are no integer zero points"
        zeros = unsigned_zeros(weight)
        if zeros.min() < 0 or zeros.max() >= 1 << weight.bits:
            return f"has zero points {zeros.min()}..{zeros.max()}, beyond its codes"
        sizes = _group_sizes(weight)
        if self.bits is not None and (weight.bits != self.bits or not sizes & self._group_sizes):
            return (
                f"has {weight.bits} bits and group size {weight.group_size}, but those before it "
                f"{self.bits} and {self.group_size}"
            )
        return None

    def include(self, where: str, weight: QuantTensor) -> None:
        """Counts the weight in; a ValueError that names it where it does not fit."""
        problem = self.why_not(weight)
        if problem is not None:
            raise ValueError(f"{where} {problem}; requantise the model, or write another format")
        sizes = _group_sizes(weight)
        self._group_sizes = sizes if self.bits is None else sizes & self._group_sizes
        self.bits = weight.bits

    def check_used(self, where: str) -> None:
        if self.bits is None:
            raise ValueError(
                f"{where}: has no quantised linear that {self._method} could hold; quantise it "
                "first, or write huggingface"
            )


def _group_sizes(weight: QuantTensor) -> set[int]:
    return {weight.group_size} | ({-1} if weight.group_size == weight.in_features else set())


def is_packed_part(path: Path, leaf: Leaf) -> bool:
    """Whether the leaf is a quantised linear of a layer."""
    return path[0].startswith("layers_") and isinstance(leaf, QuantTensor)


def add_dense(writer: SafetensorsWriter, path: Path, leaf: Leaf, spec: LeafSpec) -> str:
    """Writes a leaf dense: as it is, or a quantised one (embedding, head) in float16.

    Returns:
      "exact" or "float16".
    """
    if isinstance(leaf, QuantTensor):
        half = np.dtype(np.float16)
        writer.add(tensor_name(path), spec.shape, half, dense_chunks(leaf, spec, half))
        return "float16"
    writer.add(tensor_name(path), spec.shape, leaf.dtype, exact_chunks(leaf, spec))
    return "exact"


def engine_scale(where: str, scale: np.ndarray) -> np.ndarray:
    """The scales in 16 bits, which engines load; a ValueError where that would round them."""
    if scale.dtype in _16_BITS:
        return scale
    for dtype in _16_BITS:
        with np.errstate(over="ignore"):
            narrow = scale.astype(dtype)
        if np.array_equal(narrow.astype(np.float32), scale):
            return narrow
    raise ValueError(
        f"{where}: its {scale.dtype} scales fit neither float16 nor bfloat16; requantise the model"
    )


def packed_names(checkpoint: Checkpoint, path: Path) -> tuple[str, str]:
    """How errors name the leaf, and its module's Hugging Face name."""
    return f"{checkpoint.path}: parameter {'/'.join(path)!r}", module_name(path)


def dtype_name(scale_dtypes: set[np.dtype]) -> str:
    """torch_dtype of a packed model: bfloat16 where its scales are, else float16."""
    return "bfloat16" if _16_BITS[1] in scale_dtypes else "float16"
