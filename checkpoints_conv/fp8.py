"""How are FP8 weights stored (fp8, fbgemm_fp8, modelopt), and which QuantTensor has the same bits?

    weight        float8_e4m3fn [N, K]
    weight_scale  one number, or one per output; w = weight * weight_scale
    weight_scale_inv [ceil(N / n), ceil(K / k)]   or one per block of n outputs and k inputs
                                                  (weight_block_size); it multiplies too

Scales are repeated to one per output and group of inputs, which changes no product. Activations
stay in 16 bits, so their scales (input_scale) are not read. KV scales: `kv_scales`.
"""

from collections.abc import Mapping

import numpy as np

from checkpoints_conv.quant_format import (
    SCALE_DTYPES,
    QuantFields,
    QuantFormat,
    Stored,
    StoredLinear,
    host_weight,
)
from checkpoints_conv.tensor_files import DTYPES, TensorInfo
from helios_jax.quant import QuantTensor

METHODS = ("fp8", "fbgemm_fp8", "modelopt")
IGNORED = (".input_scale", ".input_scale_ub", ".output_scale", ".q_scale", ".prob_scale")


def fp8_format(fields: QuantFields) -> QuantFormat:
    """The format that quantization_config states; a ValueError for what is not implemented."""
    if fields.get("quant_method") == "modelopt" and fields.get("quant_algo") != "FP8":
        raise fields.refused("quant_algo", "'FP8'; anything else is not implemented")
    blocks = fields.get("weight_block_size")
    if blocks is not None:
        check_blocks(fields, "weight_block_size", blocks)
    where = str(fields.path.parent)

    def linear(
        module: str, shape: tuple[int, int], found: Mapping[str, TensorInfo]
    ) -> StoredLinear | None:
        if "weight" not in found or found["weight"].dtype != "F8_E4M3":
            return None
        name = "weight_scale" if blocks is None else "weight_scale_inv"
        return float8_linear(f"{where}: linear {module!r}", shape, found, name, blocks)

    return QuantFormat("fp8", linear, ignored=IGNORED)


def float8_linear(
    named: str,
    shape: tuple[int, int],
    found: Mapping[str, TensorInfo],
    scale_name: str,
    blocks: list[int] | None,
) -> StoredLinear:
    """An FP8 linear with one scale, one per output, or one per block."""
    scales = scale_shapes(named, shape, blocks)
    groups = 1 if blocks is None else shape[1] // blocks[1]

    def build(where: str, arrays: dict[str, np.ndarray]) -> QuantTensor:
        return host_weight(
            packed=arrays["weight"],
            scale=spread_scales(arrays[scale_name], shape, blocks),
            bits=8,
            group_size=shape[1] // groups,
            implicit_zero=0,
        )

    info = found.get(scale_name)
    scale_bytes = DTYPES[info.dtype].itemsize if info is not None else 4
    return StoredLinear(
        tensors={
            "weight": Stored((shape,), ("F8_E4M3",)),
            scale_name: Stored(scales, SCALE_DTYPES),
        },
        build=build,
        nbytes=shape[0] * shape[1] + shape[0] * groups * scale_bytes,
    )


def scale_shapes(
    named: str, shape: tuple[int, int], blocks: list[int] | None
) -> tuple[tuple[int, ...], ...]:
    """The shapes that the scales of an 8-bit linear may have."""
    num_out, num_in = shape
    if blocks is None:
        return (num_out, 1), (num_out,), (1,), ()
    if num_in % blocks[1]:
        raise ValueError(
            f"{named}: blocks of {blocks[1]} inputs do not divide its {num_in}; not implemented"
        )
    return ((-(-num_out // blocks[0]), num_in // blocks[1]),)


def spread_scales(
    scale: np.ndarray, shape: tuple[int, int], blocks: list[int] | None
) -> np.ndarray:
    """Scales of one of `scale_shapes` as [N, G]."""
    num_out = shape[0]
    if blocks is not None:
        return np.repeat(scale, blocks[0], axis=0)[:num_out]
    return np.ascontiguousarray(np.broadcast_to(scale.reshape(-1, 1), (num_out, 1)))


def check_blocks(fields: QuantFields, key: str, blocks: object) -> None:
    if (
        not isinstance(blocks, list)
        or len(blocks) != 2
        or any(type(size) is not int or size < 1 for size in blocks)
    ):
        raise fields.refused(key, "two integers >= 1: outputs and inputs of a block")
