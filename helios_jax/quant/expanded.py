"""ExpandedWeight: the forms a CPU computes with, made once at load from any stored weight.

A CPU has no fast path for 4-bit weights, so INT4 stays what is stored and shipped, and loading
expands it. Measured on two Zen 5 cores, jax 0.12.0.1, the 120 fused linears of SmolLM2-135M, ms:

    rows of activations        1      2      5      8     16    512
    int8 rows                4.5    5.8   13.4   20.3      -      -
    bfloat16 dot            11.4   11.6   12.2   12.0   15.5    142

One or two rows therefore run on int8 weights with float32 activations (`row_matmul`), more rows on
bfloat16. On jax 0.10.2 the int8 loop needs blocks of 16 rows (9.7 ms; 31 with 8), later ones of 8.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

# More rows than this are served by the bfloat16 form.
MAX_INT8_ROWS = 2
# Weight rows per loop iteration: what LLVM turns into one vectorised pass without spilling.
_ROW_BLOCK = 16 if jax.__version_info__ < (0, 11) else 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpandedWeight:
    """A linear of K inputs and N outputs in the forms that are fast on a CPU.

    Attributes:
      dense_KN: bfloat16, for three rows of activations and more.
      int8_KN: round(w / scale), in -127..127, for fewer.
      scale_N: float32, max |w| / 127 of each output channel.
    """

    dense_KN: jax.Array
    int8_KN: jax.Array
    scale_N: jax.Array

    def serves_rows(self, num_rows: int) -> bool:
        """Whether the int8 form is the one for `num_rows` rows of activations."""
        return num_rows <= MAX_INT8_ROWS and self.int8_KN.shape[0] % _ROW_BLOCK == 0


def expand(weight_KN: jax.Array) -> ExpandedWeight:
    """Both forms of a float weight matrix."""
    weight = weight_KN.astype(jnp.float32)
    scale_N = jnp.max(jnp.abs(weight), axis=0) / 127.0
    # An all-zero column has scale 0; dividing by 1 keeps its codes 0.
    codes = jnp.round(weight / jnp.where(scale_N > 0, scale_N, 1.0))
    return ExpandedWeight(
        dense_KN=weight.astype(jnp.bfloat16), int8_KN=codes.astype(jnp.int8), scale_N=scale_N
    )


# Traced once per shape, not for each of a model's linears (0.2 s of a start).
@partial(jax.jit, inline=True)
def row_matmul(inputs_MK: jax.Array, weight: ExpandedWeight) -> jax.Array:
    """A few rows times int8 weights, float32 throughout: sum_k x[k] * w[k, :], scaled at the end.

    A loop over blocks of weight rows whose body XLA:CPU fuses into one vectorised pass that reads
    each int8 once; a dot on converted weights would write floats out first (6 to 40x slower).
    """
    num_rows, num_inputs = inputs_MK.shape
    assert num_inputs % _ROW_BLOCK == 0, "serves_rows says so"
    num_outputs = weight.int8_KN.shape[1]
    inputs = inputs_MK.astype(jnp.float32)

    def add_block(i, sums):
        first = i * _ROW_BLOCK
        block = lax.dynamic_slice(weight.int8_KN, (first, 0), (_ROW_BLOCK, num_outputs))
        factors = lax.dynamic_slice(inputs, (0, first), (num_rows, _ROW_BLOCK))
        rows = [block[r].astype(jnp.float32) for r in range(_ROW_BLOCK)]
        # One sum per activation row: a single [M, N] sum compiles to slower code.
        for r in range(_ROW_BLOCK):
            sums = tuple(total + factors[m, r] * rows[r] for m, total in enumerate(sums))
        return sums

    zeros = tuple(jnp.zeros(num_outputs, jnp.float32) for _ in range(num_rows))
    sums = lax.fori_loop(0, num_inputs // _ROW_BLOCK, add_block, zeros)
    return jnp.stack(sums) * weight.scale_N
