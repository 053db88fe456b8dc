"""How does AutoAWQ store a linear (version gemm), and which QuantTensor has the same bits?

    qweight  int32 [K, N / 8]   eight 4-bit codes of neighbouring outputs in a word
    qzeros   int32 [G, N / 8]   zero points alike
    scales   float16 [G, N]

Nibble i of a word holds output AWQ_ORDER[i] of its eight; w = scale * (code - zero). Format and
method: arXiv 2306.00978, AutoAWQ 0.2.9.
"""

from collections.abc import Mapping

import numpy as np

from checkpoints_conv.quant_format import (
    AWQ_ORDER,
    SCALE_DTYPES,
    QuantFields,
    QuantFormat,
    Stored,
    StoredLinear,
    check_group_size,
    integer_nbytes,
    integer_weight,
    unpack_words,
)
from checkpoints_conv.tensor_files import TensorInfo
from helios_jax.quant import QuantTensor

_BITS = 4
_PER_WORD = 8
_SUFFIXES = ("qweight", "qzeros", "scales")


def awq_format(fields: QuantFields) -> QuantFormat:
    """The format that quantization_config states; a ValueError for what is not implemented."""
    version = fields.text("version", "gemm").lower()
    if version != "gemm":
        raise fields.refused(
            "version", "'gemm'; other layouts are not implemented: write the model with AutoAWQ's "
            "version='GEMM'"
        )  # fmt: skip
    bits = fields.integer("bits", "w_bit", default=_BITS)
    if bits != _BITS:
        raise fields.refused("bits" if "bits" in fields.values else "w_bit", f"{_BITS}")
    group_size = fields.integer("group_size", "q_group_size", default=128)
    where = str(fields.path.parent)

    def linear(
        module: str, shape: tuple[int, int], found: Mapping[str, TensorInfo]
    ) -> StoredLinear | None:
        if not any(suffix in found for suffix in _SUFFIXES):
            return None
        num_out, num_in = shape
        named = f"{where}: linear {module!r}"
        if num_out % _PER_WORD:
            raise ValueError(f"{named}: has {num_out} outputs: AWQ packs {_PER_WORD} into a word")
        groups = num_in // check_group_size(named, group_size, num_in)
        return StoredLinear(
            tensors={
                "qweight": Stored(((num_in, num_out // _PER_WORD),), ("I32",)),
                "qzeros": Stored(((groups, num_out // _PER_WORD),), ("I32",)),
                "scales": Stored(((groups, num_out),), SCALE_DTYPES),
            },
            build=_build,
            nbytes=integer_nbytes(shape, _BITS, groups, found.get("scales"), zeros=True),
        )

    return QuantFormat("awq", linear, marker="qweight")


def _build(where: str, arrays: dict[str, np.ndarray]) -> QuantTensor:
    return integer_weight(
        where,
        codes_NK=unpack_awq(arrays["qweight"]).T,
        scale_NG=arrays["scales"].T,
        zero_NG=unpack_awq(arrays["qzeros"]).T,
        bits=_BITS,
    )


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """Codes uint8 [R, N] from words int32 [R, N / 8]."""
    count = words.shape[1] * _PER_WORD
    nibbles = unpack_words(words, _BITS, count).reshape(-1, words.shape[1], _PER_WORD)
    return nibbles[..., np.argsort(AWQ_ORDER)].reshape(-1, count)
