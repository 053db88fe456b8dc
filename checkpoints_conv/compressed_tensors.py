"""How does compressed-tensors store a linear, and which QuantTensor has the same bits?

pack-quantized (integers of 3, 4 or 8 bits, weights only):

    weight_packed      int32 [N, ceil(K * bits / 32)]   value + 2**(bits - 1), lowest bits first
    weight_scale       [N, G]
    weight_zero_point  int32 [ceil(N * bits / 32), G]   packed along the outputs alike; asymmetric
    weight_shape       int64 [2]                        N, K
    weight_g_idx       int32 [K]                        the group of each input (actorder group)

int-quantized and float-quantized: weight int8 or float8_e4m3fn [N, K] with weight_scale, and
weight_zero_point int8 where asymmetric. naive-quantized is either. w = scale * (value - zero).
Activations stay in 16 bits, whatever input_activations says, so their scales are not read. Format:
compressed-tensors 0.20.1.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints_conv.fp8 import (
    IGNORED,
    check_blocks,
    float8_linear,
    scale_shapes,
    spread_scales,
)
from checkpoints_conv.gptq import group_order
from checkpoints_conv.quant_format import (
    SCALE_DTYPES,
    QuantFields,
    QuantFormat,
    Stored,
    StoredLinear,
    check_group_size,
    host_weight,
    integer_nbytes,
    integer_weight,
    unpack_words,
)
from checkpoints_conv.tensor_files import TensorInfo
from helios_jax.quant import QuantTensor

_BITS = (3, 4, 8)
_PACKED, _INT, _FLOAT, _NAIVE = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
)  # fmt: skip
FORMATS = (_PACKED, _INT, _FLOAT, _NAIVE)
_MIXED = "mixed-precision"
_DENSE = "dense"


def compressed_tensors_format(fields: QuantFields) -> QuantFormat:
    """The format that quantization_config states; a ValueError for what is not implemented."""
    stated = fields.text("format", _DENSE)
    if stated not in (*FORMATS, _MIXED, _DENSE):
        raise fields.refused("format", f"one of {FORMATS}; anything else is not implemented")
    status = fields.text("quantization_status", "compressed")
    if status != "compressed":
        raise fields.refused("quantization_status", "'compressed': save the model compressed")
    sparsity = fields.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", _DENSE) != _DENSE:
        raise fields.refused("sparsity_config", "absent: sparse weights are not implemented")
    if fields.get("transform_config"):
        raise fields.refused("transform_config", "absent: transforms are not implemented")
    groups = fields.nested("config_groups") if fields.get("config_groups") else fields
    schemes = [groups.nested(name) for name in groups.values]
    where = str(fields.path.parent)

    def linear(
        module: str, shape: tuple[int, int], found: Mapping[str, TensorInfo]
    ) -> StoredLinear | None:
        packed = "weight_packed" in found
        dtype = found["weight"].dtype if "weight" in found else ""
        if not packed and dtype not in ("I8", "F8_E4M3"):
            return None
        named = f"{where}: linear {module!r}"
        scheme = _scheme(schemes, module)
        if scheme is None:
            raise ValueError(f"{named}: is quantised, but no group of config_groups has it")
        weights = scheme.nested("weights")
        if packed:
            return _packed_linear(named, shape, found, weights)
        if dtype == "F8_E4M3":
            return float8_linear(named, shape, found, "weight_scale", _blocks(weights))
        return _int8_linear(named, shape, found, weights)

    ignored = (*IGNORED, ".input_zero_point", ".output_zero_point")
    return QuantFormat("compressed-tensors", linear, ignored=ignored)


def _scheme(schemes: list[QuantFields], module: str) -> QuantFields | None:
    """The group whose targets name the module, or else all linears."""
    by_name, by_class = None, None
    for scheme in schemes:
        targets = scheme.get("targets", ["Linear"])
        if not isinstance(targets, list) or not all(isinstance(text, str) for text in targets):
            raise scheme.refused("targets", "a list of names")
        for target in targets:
            if target == "Linear":
                by_class = by_class or scheme
            elif _matches(scheme, target, module):
                by_name = by_name or scheme
    return by_name or by_class


def _matches(scheme: QuantFields, target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error as error:
        raise scheme.refused("targets", f"regular expressions: {error}") from None


def _strategy(weights: QuantFields) -> str:
    default = "tensor" if weights.get("group_size") is None else "group"
    return weights.text("strategy", default)


def _blocks(weights: QuantFields) -> list[int] | None:
    """The block of one scale; None for one scale per tensor or output."""
    strategy = _strategy(weights)
    if strategy == "block":
        blocks = weights.get("block_structure")
        check_blocks(weights, "block_structure", blocks)
        return blocks
    if strategy not in ("tensor", "channel"):
        raise weights.refused("strategy", "one of 'tensor', 'channel', 'block' for 8-bit weights")
    return None


def _bits(weights: QuantFields) -> int:
    bits = weights.integer("num_bits", default=8)
    if bits not in _BITS:
        raise weights.refused("num_bits", f"one of {_BITS}")
    if weights.text("type", "int") != "int":
        raise weights.refused("type", f"'int' in {_PACKED}")
    return bits


def _packed_linear(
    named: str, shape: tuple[int, int], found: Mapping[str, TensorInfo], weights: QuantFields
) -> StoredLinear:
    num_out, num_in = shape
    bits, strategy = _bits(weights), _strategy(weights)
    symmetric = weights.boolean("symmetric", True)
    if strategy not in ("group", "channel"):
        raise weights.refused("strategy", f"'group' or 'channel' in {_PACKED}")
    size = weights.integer("group_size") if strategy == "group" else -1
    groups = num_in // check_group_size(named, size, num_in)
    zeros: dict[str, Stored] = {}
    if not symmetric:
        zeros["weight_zero_point"] = Stored(((_words(num_out, bits), groups),), ("I32",))

    def build(where: str, arrays: dict[str, np.ndarray]) -> QuantTensor:
        if tuple(arrays["weight_shape"].reshape(-1).tolist()) != shape:
            raise ValueError(
                f"{where}: weight_shape={arrays['weight_shape'].tolist()}: expected {list(shape)}"
            )
        codes_NK = unpack_words(arrays["weight_packed"], bits, num_in)
        zero_NG = None
        if not symmetric:
            zero_NG = unpack_words(arrays["weight_zero_point"].T, bits, num_out).T
        perm = None
        if "weight_g_idx" in arrays:
            # -1 throughout is the library's own "not in use".
            if (arrays["weight_g_idx"] >= 0).any():
                perm = group_order(where, arrays["weight_g_idx"], groups, num_in)
            codes_NK = codes_NK if perm is None else codes_NK[:, perm]
        return integer_weight(where, codes_NK, arrays["weight_scale"], zero_NG, bits, perm)

    return StoredLinear(
        tensors={
            "weight_packed": Stored(((num_out, _words(num_in, bits)),), ("I32",)),
            "weight_scale": Stored(((num_out, groups),), SCALE_DTYPES),
            "weight_shape": Stored(((2,),), ("I64", "I32")),
            "weight_g_idx": Stored(((num_in,),), ("I32", "I64"), optional=True),
            **zeros,
        },
        build=build,
        nbytes=integer_nbytes(
            shape, bits, groups, found.get("weight_scale"), not symmetric, "weight_g_idx" in found
        ),
    )


def _int8_linear(
    named: str, shape: tuple[int, int], found: Mapping[str, TensorInfo], weights: QuantFields
) -> StoredLinear:
    symmetric = weights.boolean("symmetric", True)
    if _bits(weights) != 8:
        raise weights.refused("num_bits", f"8 outside {_PACKED}")
    if _strategy(weights) == "group":
        size = check_group_size(named, weights.integer("group_size"), shape[1])
        shapes: tuple[tuple[int, ...], ...] = ((shape[0], shape[1] // size),)
        blocks = None
    else:
        blocks = _blocks(weights)
        shapes = scale_shapes(named, shape, blocks)
        size = shape[1] if blocks is None else blocks[1]
    grouped = _strategy(weights) == "group"

    def spread(array: np.ndarray) -> np.ndarray:
        return array if grouped else spread_scales(array, shape, blocks)

    def build(where: str, arrays: dict[str, np.ndarray]) -> QuantTensor:
        zero = arrays.get("weight_zero_point")
        return host_weight(
            packed=arrays["weight"],
            scale=spread(arrays["weight_scale"]),
            zero=None if zero is None or symmetric else spread(zero).astype(np.int16),
            bits=8,
            group_size=size,
            implicit_zero=0,
        )

    tensors: dict[str, Any] = {
        "weight": Stored((shape,), ("I8",)),
        "weight_scale": Stored(shapes, SCALE_DTYPES),
        "weight_zero_point": Stored(shapes, ("I8",), optional=symmetric),
    }
    groups = shape[1] // size
    nbytes = integer_nbytes(shape, 8, groups, found.get("weight_scale"), not symmetric)
    return StoredLinear(tensors=tensors, build=build, nbytes=nbytes)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)
