"""How quantised weights lie in bytes: packing and its exact inverse.

A linear maps K inputs to N outputs; its codes q are a matrix [N, K], one row an output channel.

4-bit codes (0..15) are packed along K in spans of `span` codes (32 or 64, independent of the scale
group). Byte j of a span holds code j in its low nibble and code j + span/2 in its high nibble:

    span of 32 codes q0..q31 -> 16 bytes

    byte   0          1                 15
         +----+----+ +----+----+      +-----+-----+
         |q16 | q0 | |q17 | q1 |  ... | q31 | q15 |
         +----+----+ +----+----+      +-----+-----+
          7..4 3..0   7..4 3..0        7..4  3..0     (bits)

So a contiguous run of bytes unpacks to two contiguous runs of codes, with no interleave. With span
32 this is also the order of GGUF's Q4_0 and Q4_1 blocks. 8-bit codes are stored as they are, int8.

3-bit codes (0..7) lie in spans of 32 codes, 12 bytes: first the two low bits of each, then the high
bits, so that no code straddles two bytes:

    byte   0                              7                     8           11
         +------+------+------+----+    +------+------+----+  +-----------------+
         | q24  | q16  |  q8  | q0 | .. | q31  | ...  | q7 |  | q28 q24 .. q4 q0|  ...
         +------+------+------+----+    +------+------+----+  +-----------------+
          7..6   5..4   3..2   1..0                            7 6 .. 1 0: the high bits
"""

import jax.numpy as jnp
import numpy as np

SPANS = (32, 64)


def pack_int4(codes, span: int = 32):
    """Packs 4-bit codes.

    Args:
      codes: [..., N, K] integers in 0..15 (numpy or jax array); K a multiple of `span`.
      span: codes per span, 32 or 64.

    Returns:
      uint8 [..., N, K // 2], of the same array library as `codes`.
    """
    _check_span(codes.shape[-1], span, "codes.shape[-1]")
    xp = np if isinstance(codes, np.ndarray) else jnp
    halves = xp.reshape(codes.astype(xp.uint8), (*codes.shape[:-1], -1, 2, span // 2))
    packed = halves[..., 0, :] | (halves[..., 1, :] << 4)
    return xp.reshape(packed, (*codes.shape[:-1], -1))


def unpack_int4(packed, span: int = 32):
    """The inverse of `pack_int4`: uint8 [..., N, K // 2] -> uint8 codes [..., N, K]."""
    _check_span(packed.shape[-1] * 2, span, "2 * packed.shape[-1]")
    xp = np if isinstance(packed, np.ndarray) else jnp
    spans = xp.reshape(packed, (*packed.shape[:-1], -1, span // 2))
    codes = xp.stack([spans & 15, spans >> 4], axis=-2)
    return xp.reshape(codes, (*packed.shape[:-1], -1))


def _check_span(num_codes: int, span: int, name: str) -> None:
    if span not in SPANS:
        raise ValueError(f"span={span}: must be one of {SPANS}")
    if num_codes % span:
        raise ValueError(f"{name}={num_codes}: must be a multiple of span={span}; pad K first")


def pack_int3(codes):
    """Packs 3-bit codes: [..., N, K] integers in 0..7, K a multiple of 32 -> uint8 [..., N, K * 3/8].

    Takes and returns numpy or jax arrays, as `pack_int4`.
    """
    _check_span(codes.shape[-1], 32, "codes.shape[-1]")
    xp = np if isinstance(codes, np.ndarray) else jnp
    spans = xp.reshape(codes.astype(xp.uint8), (*codes.shape[:-1], -1, 32))
    low = _pack_planes(xp, spans & 3, 8, 2)
    high = _pack_planes(xp, spans >> 2, 4, 1)
    return xp.reshape(xp.concatenate([low, high], axis=-1), (*codes.shape[:-1], -1))


def unpack_int3(packed):
    """The inverse of `pack_int3`: uint8 [..., N, K * 3/8] -> uint8 codes [..., N, K]."""
    if packed.shape[-1] % 12:
        raise ValueError(f"packed.shape[-1]={packed.shape[-1]}: must be a multiple of 12 bytes")
    xp = np if isinstance(packed, np.ndarray) else jnp
    spans = xp.reshape(packed, (*packed.shape[:-1], -1, 12))
    low = _unpack_planes(xp, spans[..., :8], 2)
    high = _unpack_planes(xp, spans[..., 8:], 1)
    return xp.reshape(low | (high << 2), (*packed.shape[:-1], -1))


def _pack_planes(xp, values, num_bytes: int, bits: int):
    """[..., 32] values of `bits` bits -> [..., num_bytes]: value j + num_bytes * i in byte j."""
    planes = xp.reshape(values, (*values.shape[:-1], -1, num_bytes))
    packed = planes[..., 0, :]
    for i in range(1, planes.shape[-2]):
        packed = packed | (planes[..., i, :] << (bits * i))
    return packed


def _unpack_planes(xp, packed, bits: int):
    """The inverse of `_pack_planes`."""
    mask = (1 << bits) - 1
    planes = [(packed >> (bits * i)) & mask for i in range(8 // bits)]
    return xp.concatenate(planes, axis=-1)
