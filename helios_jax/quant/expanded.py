"""ExpandedWeight: the forms a CPU computes with, made once at load from any stored weight.

A CPU has no fast path for 4-bit weights, so INT4 stays what is stored and shipped, and loading
expands it. Measured on two Zen 5 cores, jax 0.12.0.1, the 120 fused linears of SmolLM2-135M, ms:

    rows of activations        1      2      3      5      8     11     16
    int8, sums in vectors    5.4    7.3    8.8   13.8   20.0   25.6   34.7
    int8, sums in tiles      7.1    7.3    7.8    8.5   10.5   13.0   17.6
    bfloat16 dot            96.4   12.8   12.9   13.9   13.9   14.8   16.0

Up to 12 rows therefore run on int8 weights with float32 activations (`row_matmul`), more rows on
bfloat16. Before jax 0.12 XLA:CPU makes no vectorised pass of tiles (145 ms for 5 rows) and vectors
want blocks of 16 weight rows (9.7 ms for one row of activations; 31 with 8): int8 serves two there.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

_TILES_ARE_FAST = jax.__version_info__ >= (0, 12)
# More rows than this are served by the bfloat16 form.
MAX_INT8_ROWS = 12 if _TILES_ARE_FAST else 2
# As many are summed in vectors, more in tiles.
_MAX_VECTOR_ROWS = 1 if _TILES_ARE_FAST else 2
# Weight rows per loop iteration: what LLVM turns into one vectorised pass without spilling.
_ROW_BLOCK = 8 if _TILES_ARE_FAST else 16
# Outputs of a tile: four registers of 16 floats for each row of activations.
_TILE_WIDTH = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpandedWeight:
    """A linear of K inputs and N outputs in the forms that are fast on a CPU.

    Attributes:
      dense_KN: bfloat16, for more rows of activations than `MAX_INT8_ROWS`.
      int8_KN: round(w / scale), in -127..127, for fewer.
      scale_N: float32, max |w| / 127 of each output channel.
    """

    dense_KN: jax.Array
    int8_KN: jax.Array
    scale_N: jax.Array

    def serves_rows(self, num_rows: int) -> bool:
        """Whether the int8 form is the one for `num_rows` rows of activations."""
        num_inputs, num_outputs = self.int8_KN.shape
        most = _MAX_VECTOR_ROWS if num_outputs % _TILE_WIDTH else MAX_INT8_ROWS
        return num_rows <= most and num_inputs % _ROW_BLOCK == 0


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
    Every row's products are added in the same order, however many rows there are.
    """
    assert weight.serves_rows(inputs_MK.shape[0])
    sum_products = _sum_in_vectors if inputs_MK.shape[0] <= _MAX_VECTOR_ROWS else _sum_in_tiles
    return sum_products(inputs_MK.astype(jnp.float32), weight.int8_KN) * weight.scale_N


def _sum_in_vectors(inputs_MK: jax.Array, int8_KN: jax.Array) -> jax.Array:
    """[M, N] from one vector of N sums for each row: each is a pass of its own over the block."""
    num_rows, num_outputs = inputs_MK.shape[0], int8_KN.shape[1]

    def add_block(i, sums):
        factors, block = _block(i, inputs_MK, int8_KN)
        rows = [block[r].astype(jnp.float32) for r in range(_ROW_BLOCK)]
        for r in range(_ROW_BLOCK):
            sums = tuple(total + factors[m, r] * rows[r] for m, total in enumerate(sums))
        return sums

    zeros = tuple(jnp.zeros(num_outputs, jnp.float32) for _ in range(num_rows))
    return jnp.stack(lax.fori_loop(0, int8_KN.shape[0] // _ROW_BLOCK, add_block, zeros))


def _sum_in_tiles(inputs_MK: jax.Array, int8_KN: jax.Array) -> jax.Array:
    """[M, N] from tiles of [M, `_TILE_WIDTH`] sums: the rows share one pass over the block.

    A tile's rows are an inner loop short enough to be unrolled, so that a weight can be read and
    converted once for all; in one [M, N] array the rows are the outer loop.
    """
    num_rows, num_outputs = inputs_MK.shape[0], int8_KN.shape[1]
    num_tiles = num_outputs // _TILE_WIDTH

    def add_block(i, sums):
        factors, block = _block(i, inputs_MK, int8_KN)
        tiles = block.reshape(_ROW_BLOCK, num_tiles, 1, _TILE_WIDTH)
        for r in range(_ROW_BLOCK):
            sums = sums + factors[:, r, None] * tiles[r].astype(jnp.float32)
        return sums

    zeros = jnp.zeros((num_tiles, num_rows, _TILE_WIDTH), jnp.float32)
    sums = lax.fori_loop(0, int8_KN.shape[0] // _ROW_BLOCK, add_block, zeros)
    return sums.swapaxes(0, 1).reshape(num_rows, num_outputs)


def _block(i: jax.Array, inputs_MK: jax.Array, int8_KN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The i-th `_ROW_BLOCK` rows of weights, and their factors of each row of activations."""
    first = i * _ROW_BLOCK
    factors = lax.dynamic_slice_in_dim(inputs_MK, first, _ROW_BLOCK, axis=1)
    return factors, lax.dynamic_slice_in_dim(int8_KN, first, _ROW_BLOCK)
