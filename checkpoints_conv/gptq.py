"""How does GPTQ store a linear (AutoGPTQ, GPTQModel), and which QuantTensor has the same bits?

    qweight  int32 [K * bits / 32, N]   codes packed along the inputs, lowest bits first
    qzeros   int32 [G, N * bits / 32]   zero points packed along the outputs
    scales   float16 [G, N]
    g_idx    int32 [K]                  the group of each input channel

w[n, k] = scales[g_idx[k], n] * (code - zero). Zero points are stored minus one in v1
(checkpoint_format "gptq") and as they are in v2 ("gptq_v2"). Method: arXiv 2210.17323; format:
AutoGPTQ 0.7.1, GPTQModel 7.7.0.

What the metadata says is not always so:
- A v1 file and a v2 file of a symmetric model differ in their zero points alone, 2**(bits - 1) - 1
  or 2**(bits - 1) everywhere; where sym is stated and one of the two stands in a whole linear, that
  decides, not checkpoint_format. Other zero points mean that sym is not true: they are used.
- g_idx counts, not desc_act. Zeros throughout mean that nobody filled it in: groups in order.
- Zero point 0 is -1 in v1, which no code can hold. It wraps to 2**bits - 1. GPTQModel subtracts
  from whole words, so that the neighbour loses one too; its files are undone in the same way.
"""

from collections.abc import Mapping

import numpy as np

from checkpoints_conv.quant_format import (
    MIDDLE,
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

BITS = (3, 4, 8)
FORMATS = ("gptq", "gptq_v2")
_SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
_WORD_ONES = {4: 0x11111111, 8: 0x01010101}


def gptq_format(fields: QuantFields) -> QuantFormat:
    """The format that quantization_config states; a ValueError for what is not implemented."""
    bits = fields.integer("bits")
    if bits not in BITS:
        raise fields.refused("bits", f"one of {BITS}")
    key = "checkpoint_format" if "checkpoint_format" in fields.values else "format"
    stated = fields.text(key, "gptq").lower()
    if stated not in FORMATS or fields.get("is_marlin_format", False):
        key = key if stated not in FORMATS else "is_marlin_format"
        raise fields.refused(
            key, f"one of {FORMATS}; other layouts are not implemented: write the model in one of "
            "these"
        )  # fmt: skip
    if fields.text("pack_dtype", "int32") != "int32":
        raise fields.refused("pack_dtype", "'int32'")
    group_size = fields.integer("group_size")
    desc_act = fields.boolean("desc_act", False)
    symmetric = fields.boolean("sym", True)
    varied = bool(fields.get("dynamic", {}))  # some linears have bits and groups of their own
    by_words = _writer(fields).startswith("gptqmodel")
    where = str(fields.path.parent)

    def linear(
        module: str, shape: tuple[int, int], found: Mapping[str, TensorInfo]
    ) -> StoredLinear | None:
        if not any(suffix in found for suffix in _SUFFIXES):
            return None
        num_out, num_in = shape
        named = f"{where}: linear {module!r}"
        width, size = bits, group_size
        if varied:
            width, size = _own_form(shape, found, bits, group_size)
        groups = num_in // check_group_size(named, size, num_in)
        for axis, count in (("inputs", num_in), ("outputs", num_out)):
            if count * width % 32:
                raise ValueError(
                    f"{named}: has {count} {axis}: must fill whole words of 32 bits with "
                    f"{width}-bit codes"
                )

        def build(where: str, arrays: dict[str, np.ndarray]) -> QuantTensor:
            zero_NG = _zeros(arrays["qzeros"], width, num_out, stated, symmetric, by_words)
            perm = _perm(where, arrays.get("g_idx"), groups, num_in, desc_act)
            codes_NK = unpack_words(arrays["qweight"].T, width, num_in)
            return integer_weight(
                where,
                codes_NK=codes_NK if perm is None else codes_NK[:, perm],
                scale_NG=arrays["scales"].T,
                zero_NG=zero_NG,
                bits=width,
                perm=perm,
            )

        return StoredLinear(
            tensors={
                "qweight": Stored(((num_in * width // 32, num_out),), ("I32",)),
                "qzeros": Stored(((groups, num_out * width // 32),), ("I32",)),
                "scales": Stored(((groups, num_out),), SCALE_DTYPES),
                "g_idx": Stored(((num_in,),), ("I32",), optional=True),
            },
            build=build,
            nbytes=integer_nbytes(
                shape, width, groups, found.get("scales"), not symmetric, desc_act
            ),
        )

    return QuantFormat("gptq", linear, marker="qweight", zero_biases=True)


def _writer(fields: QuantFields) -> str:
    """The tool that wrote the file, as it names itself: "gptqmodel:7.7.0", or ""."""
    meta = fields.get("meta", {})
    names = meta.get("quantizer", "") if isinstance(meta, dict) else ""
    name = names[0] if isinstance(names, list) and names else names
    return name.lower() if isinstance(name, str) else ""


def _own_form(
    shape: tuple[int, int], found: Mapping[str, TensorInfo], bits: int, group_size: int
) -> tuple[int, int]:
    """Bits and group size of one linear, from the shapes of its tensors; else the stated ones."""
    num_in = shape[1]
    if "qweight" in found and found["qweight"].shape:
        own = found["qweight"].shape[0] * 32 / num_in
        bits = int(own) if own in BITS else bits
    if "scales" in found and found["scales"].shape:
        groups = found["scales"].shape[0]
        group_size = num_in // groups if groups and num_in % groups == 0 else group_size
    return bits, group_size


def _zeros(
    words: np.ndarray, bits: int, num_out: int, stated: str, symmetric: bool, by_words: bool
) -> np.ndarray | None:
    """The zero points [N, G] as codes; None for the middle of the range everywhere."""
    raw = unpack_words(words, bits, num_out)
    middle = MIDDLE[bits]
    if symmetric and raw.size and (raw == raw[0, 0]).all() and raw[0, 0] in (middle - 1, middle):
        return None
    if stated == "gptq_v2":
        return raw.T
    if by_words and bits in _WORD_ONES:
        with np.errstate(over="ignore"):
            words = words.view(np.uint32) + np.uint32(_WORD_ONES[bits])
        return unpack_words(words, bits, num_out).T
    return ((raw.astype(np.int16) + 1) % (1 << bits)).T


def _perm(
    where: str, g_idx: np.ndarray | None, groups: int, num_in: int, desc_act: bool
) -> np.ndarray | None:
    if g_idx is None:
        if desc_act and groups > 1:
            raise ValueError(f"{where}: desc_act=true, but tensor g_idx is missing")
        return None
    if not desc_act and not g_idx.any():
        return None
    return group_order(where, g_idx, groups, num_in)


def group_order(where: str, g_idx: np.ndarray, groups: int, num_in: int) -> np.ndarray | None:
    """The input channels [K] sorted by group, ascending within one; None where they are sorted.

    Raises:
      ValueError: naming `where`, unless `g_idx` [K] gives every group equally many channels.
    """
    size = num_in // groups
    if np.array_equal(g_idx, np.arange(num_in) // size):
        return None
    if g_idx.min() < 0 or g_idx.max() >= groups or (np.bincount(g_idx) != size).any():
        counts = sorted(set(np.unique(g_idx, return_counts=True)[1].tolist()))
        raise ValueError(
            f"{where}: g_idx must give each of its {groups} groups {size} input channels; found "
            f"values {g_idx.min()}..{g_idx.max()}, in counts of {counts[:8]}"
        )
    return np.argsort(g_idx, kind="stable")
