"""How do later weights make up for the rounding of earlier ones? GPTQ (arXiv 2210.17323).

Input channels are rounded one after another. With H = mean x x^T and U the upper Cholesky factor of
its inverse (H^-1 = U^T U), rounding channel i with error e = (w_i - q_i) / U_ii moves all channels
that are still to come by -e U_i,:, which cancels as much of the error in the output as can be.

Updates beyond the current block of channels are applied once per block, as one matrix product
(section 3.3, step 2); the results do not depend on the block.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from helios_jax.config import require
from helios_jax.quant.awq import search_clip
from helios_jax.quant.scheme import Scheme, assemble, decode, encode, fit_grid, grouped
from helios_jax.quant.tensor import QuantTensor

_BLOCKS = (128, 96, 64, 32)


@dataclass(frozen=True)
class GptqOptions:
    """Attributes:
    act_order: round the channels with the largest activations first, while most others can still
      make up for them.
    static_groups: groups are neighbours and their scales are fixed beforehand, from the unrounded
      weights. Without it scales come from the updated weights when a group's turn comes; with
      act_order its groups are then made of channels in the order of rounding, and inference has to
      gather inputs (`QuantTensor.perm`).
    dampening: what is added to H's diagonal, as a share of its mean.
    clip: shrink ranges where that lowers the group's error (`helios_jax.quant.awq.search_clip`).
      Needs static_groups.
    """

    act_order: bool = True
    static_groups: bool = True
    dampening: float = 0.01
    clip: bool = True

    def __post_init__(self):
        require(
            0 < self.dampening <= 1,
            f"dampening={self.dampening}: must be greater than 0 and at most 1",
        )
        require(
            self.static_groups or not self.clip,
            "clip=True needs static_groups=True: the search is made before the rounding starts",
        )


def gptq(
    weight_NK: jax.Array,
    scheme: Scheme,
    moment_KK: jax.Array,
    options: GptqOptions | None = None,
) -> QuantTensor:
    """Quantises one linear, or several that share their inputs, with rows one below the other.

    Args:
      weight_NK: float, one row per output channel.
      scheme: `scheme.check(name, K)` must hold.
      moment_KK: mean x x^T of the inputs, see `helios_jax.quant.statistics`.

    Raises:
      ValueError: the moment is not finite, or the dampening does not make it positive definite.
    """
    options = options or GptqOptions()
    diagonal_K = jnp.diagonal(moment_KK)
    # Channels that were never active: their weights do not matter, and must not make H singular.
    dead_K = diagonal_K <= 0
    mean = jnp.mean(diagonal_K)
    require(
        bool(jnp.isfinite(mean)),
        "gptq: the second moment of the inputs is not finite: activations overflowed on the "
        "calibration text",
    )
    in_features = weight_NK.shape[1]
    order_K = jnp.argsort(-diagonal_K) if options.act_order else jnp.arange(in_features)
    floor = jnp.where(mean > 0, options.dampening * mean, 1.0)
    damped_KK = moment_KK + jnp.diag(jnp.where(dead_K, mean, 0.0) + floor)
    factor_KK = _inverse_factor(damped_KK[order_K][:, order_K])
    require(
        bool(jnp.all(jnp.isfinite(factor_KK))),
        f"gptq: dampening={options.dampening}: the Hessian is not positive definite with it; "
        "use a larger one, or more calibration tokens",
    )
    weight_NK = jnp.where(dead_K, 0.0, weight_NK.astype(jnp.float32))
    static = None
    if options.static_groups or scheme.group_size == -1:
        clip = search_clip(weight_NK, scheme, moment_KK) if options.clip else 1.0
        static = fit_grid(grouped(weight_NK, scheme), scheme, clip)
    codes_NK, scale_NG, zero_NG = _round_in_order(weight_NK, factor_KK, order_K, static, scheme)
    if static is not None:
        return assemble(codes_NK[:, jnp.argsort(order_K)], scale_NG, zero_NG, scheme)
    weight = assemble(codes_NK, scale_NG, zero_NG, scheme)
    if options.act_order:
        weight = dataclasses.replace(weight, perm=order_K.astype(jnp.int32))
    return weight


@jax.jit
def _inverse_factor(matrix_KK: jax.Array) -> jax.Array:
    """Upper U with matrix^-1 = U^T U, without forming the inverse.

    Reversing rows and columns turns a lower Cholesky factor L of the reversed matrix into an upper
    R with matrix = R R^T; then U = R^-1.
    """
    lower = jnp.linalg.cholesky(matrix_KK[::-1, ::-1])
    upper = lower[::-1, ::-1]
    return solve_triangular(upper, jnp.eye(upper.shape[0], dtype=upper.dtype), lower=False)


@functools.partial(jax.jit, static_argnums=4)
def _round_in_order(weight_NK, factor_KK, order_K, static, scheme: Scheme):
    """Codes [N, K] with columns in rounding order, and scales and zeros [N, groups].

    `static` is (scale_NG, zero_NG) of groups of neighbours, or None to take each group's grid from
    its updated weights when its turn comes.
    """
    N, K = weight_NK.shape
    group_size = scheme.channels_per_group(K)
    # A block that is a group sees all earlier updates when its grid is fitted.
    block = next((b for b in _BLOCKS if K % b == 0), K) if static is not None else group_size
    # Channels are rows here, so that what is updated lies in one piece.
    weight_KN = weight_NK.T[order_K]
    num_groups = K // group_size
    scale_GN, zero_GN = (
        (jnp.zeros((num_groups, N)), jnp.zeros((num_groups, N)))
        if static is None
        else (static[0].T, static[1].T)
    )

    def round_block(b, carry):
        weight_KN, codes_KN, scale_GN, zero_GN = carry
        first = b * block
        rows_BN = lax.dynamic_slice(weight_KN, (first, 0), (block, N))
        factor_BB = lax.dynamic_slice(factor_KK, (first, first), (block, block))
        if static is None:
            scale_N, zero_N = fit_grid(rows_BN.T, scheme)
            scale_GN, zero_GN = scale_GN.at[b].set(scale_N), zero_GN.at[b].set(zero_N)

        def round_channel(i, carry):
            rows_BN, codes_BN, errors_BN = carry
            group = b if static is None else order_K[first + i] // group_size
            scale_N, zero_N = scale_GN[group], zero_GN[group]
            codes_N = encode(rows_BN[i], scale_N, zero_N, scheme)
            error_N = (rows_BN[i] - decode(codes_N, scale_N, zero_N)) / factor_BB[i, i]
            # Row i of an upper triangle: channels that are done are not touched.
            rows_BN -= factor_BB[i][:, None] * error_N
            return rows_BN, codes_BN.at[i].set(codes_N), errors_BN.at[i].set(error_N)

        zeros_BN = jnp.zeros((block, N))
        _, codes_BN, errors_BN = lax.fori_loop(
            0, block, round_channel, (rows_BN, zeros_BN, zeros_BN)
        )
        later_BK = lax.dynamic_slice(factor_KK, (first, 0), (block, K))
        later_BK = jnp.where(jnp.arange(K) >= first + block, later_BK, 0.0)
        weight_KN -= jnp.dot(later_BK.T, errors_BN, precision="highest")
        codes_KN = lax.dynamic_update_slice(codes_KN, codes_BN, (first, 0))
        return weight_KN, codes_KN, scale_GN, zero_GN

    start = (weight_KN, jnp.zeros((K, N)), scale_GN, zero_GN)
    _, codes_KN, scale_GN, zero_GN = lax.fori_loop(0, K // block, round_block, start)
    return codes_KN.T, scale_GN.T, zero_GN.T
