"""How far a kernel's result may lie from float64 on the dequantised values, and why.

| error                                       | bound                                              |
|---------------------------------------------|----------------------------------------------------|
| result rounded to bf16 / f16 / f32          | 2^-8 / 2^-10 / 2^-22 of the result (2 roundings)   |
| weight rounded once to x's dtype before the | 2^-9 / 2^-12 / 2^-24 of each product x w; products |
| product ("pre" scaling, the XLA path)       | round independently: 5 sigma of their sum; where   |
|                                             | x is no random sign (`correlated`), their sum      |
| float32 sums over K (tensor cores truncate) | 2^-20 of sum |x||w|                                |
| softmax weights rounded to f16 / bf16       | 2^-10 / 2^-8 of sum p |v| (2 roundings)            |
| scores in float32, then exp2 of them        | a score of size s is off by 2^-22 s (its sum, then |
|                                             | exp2's argument), so its weight, relatively, by    |
|                                             | 2^-21 (s + 4), of sum p |v|; q is scaled by a      |
|                                             | power of two only, which is exact                  |

The error of quantising is in no bound: references start from dequantised values.
"""

import numpy as np

OUTPUT = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-22}
OPERAND = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "float32": 2.0**-24}
FLOAT32_SUM = 2.0**-20
# By the format of the pool: bfloat16 weights against bfloat16 values, float16 against the others.
SOFTMAX_WEIGHT = {"bfloat16": 2.0**-8}
SOFTMAX_WEIGHT_OTHER = 2.0**-10
FLOAT32_SCORE = 2.0**-21


def matmul_bound(x, weight, y, x_dtype: str, out_dtype: str, correlated: bool = False):
    """The bound on |error| of y = x weight^T, all float64, elementwise."""
    absolute = np.abs(x) @ np.abs(weight).T
    if correlated:
        rounding = OPERAND[x_dtype] * absolute
    else:
        rounding = 5 * OPERAND[x_dtype] * np.sqrt(x**2 @ (weight**2).T)
    # A float16 weight below 2^-14 is subnormal and keeps 2^-25 of absolute precision.
    subnormal = 2.0**-25 * np.abs(x).sum(-1, keepdims=True) if x_dtype == "float16" else 0.0
    return OUTPUT[out_dtype] * np.abs(y) + rounding + subnormal + FLOAT32_SUM * absolute


def attention_bound(p, values, out, largest_score: float, kv_dtype: str, q_dtype: str):
    """The bound on |error| of out[n, h] = sum_s p[n, s] values[s, n, h], all float64, elementwise.

    `largest_score` is the largest |score| of the row's visible keys.
    """
    weight = SOFTMAX_WEIGHT.get(kv_dtype, SOFTMAX_WEIGHT_OTHER)
    relative = weight + FLOAT32_SCORE * (largest_score + 4)
    absolute = np.einsum("ns,snh->nh", p, np.abs(values))
    return relative * absolute + OUTPUT[q_dtype] * np.abs(out) + 1e-6 * np.abs(values).max()


def assert_within(actual, expected, bound, context=""):
    """Asserts |actual - expected| <= bound elementwise; NaN anywhere fails."""
    error = np.abs(np.asarray(actual, np.float64) - expected)
    worst = np.unravel_index(np.nanargmax(error - bound), error.shape) if error.size else None
    assert np.all(error <= bound), (
        f"{context}: at {worst} got {np.asarray(actual)[worst]}, expected {expected[worst]}, "
        f"error {error[worst]:.3g} exceeds {np.broadcast_to(bound, error.shape)[worst]:.3g}"
    )
