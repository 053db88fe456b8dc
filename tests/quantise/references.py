"""The quantisation formulas once more, in float64 and loops, to compare with."""

import numpy as np

from helios_jax.quant import Scheme


def code_range(scheme: Scheme) -> tuple[int, int, int]:
    """Lowest, highest and zero code as stored, written out per grid."""
    table = {
        (3, "symmetric"): (1, 7, 4), (3, "full"): (0, 7, 4),
        (4, "symmetric"): (1, 15, 8), (4, "full"): (0, 15, 8),
        (8, "symmetric"): (-127, 127, 0), (8, "full"): (-128, 127, 0),
        (3, "asymmetric"): (0, 7, 4), (4, "asymmetric"): (0, 15, 8),
        (8, "asymmetric"): (-128, 127, 0),
    }  # fmt: skip
    return table[scheme.bits, scheme.grid]


def fit(group: np.ndarray, scheme: Scheme) -> tuple[float, int]:
    """Scale and zero code of one group."""
    first, last, zero = code_range(scheme)
    low, high = min(group.min(), 0.0), max(group.max(), 0.0)
    if low == high == 0:
        scale = 1.0
    elif scheme.grid == "asymmetric":
        scale = float(np.float16((high - low) / (last - first)))
        zero = int(np.clip(np.round(first - low / scale), first, last))
    else:
        scale = float(np.float16(max(high / (last - zero), low / (first - zero))))
    return scale, zero


def nearest(value: float, scale: float, zero: int, scheme: Scheme) -> int:
    first, last, _ = code_range(scheme)
    return int(np.clip(np.round(value / scale) + zero, first, last))


def gptq(weight: np.ndarray, scheme: Scheme, moment: np.ndarray, dampening: float, order):
    """Dequantised GPTQ weights by solving for the remaining channels after each rounding.

    The equations of optimal brain quantisation (arXiv 2210.17323, equation 2) with the inverse of
    the remaining channels' Hessian taken anew each time: no Cholesky factors, no blocks. Groups are
    neighbours with scales from the unrounded weights.
    """
    weight = weight.astype(np.float64).copy()
    num_out, num_in = weight.shape
    size = scheme.channels_per_group(num_in)
    grids = [
        [fit(row[g : g + size].astype(np.float32), scheme) for g in range(0, num_in, size)]
        for row in weight
    ]
    hessian = moment.astype(np.float64)
    hessian = hessian + dampening * np.mean(np.diag(hessian)) * np.eye(num_in)
    result = np.zeros_like(weight)
    remaining = list(order)
    while remaining:
        inverse = np.linalg.inv(hessian[np.ix_(remaining, remaining)])
        k = remaining[0]
        for n in range(num_out):
            scale, zero = grids[n][k // size]
            value = scale * (nearest(weight[n, k], scale, zero, scheme) - zero)
            error = (weight[n, k] - value) / inverse[0, 0]
            weight[n, remaining] -= error * inverse[0]
            result[n, k] = value
        remaining = remaining[1:]
    return result
