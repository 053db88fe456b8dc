"""Which channels deserve precision? AWQ (arXiv 2306.00978): scales and clipping from activations.

A few input channels carry large activations, and errors of their weights dominate the output. AWQ
multiplies column k of the weights by s[k] before rounding, and divides what comes in by it:

    y = Q(W diag(s)) diag(1 / s) x,    s = mean |x| ^ alpha,

alpha by grid search on the output's error (equation 4 and 5). The division is folded into whatever
makes x (`helios_jax.calibrate`), so inference pays nothing. Afterwards each group's range is shrunk
where saturating a few weights costs the output less than a coarser scale for all.

The error is the exact mean over all calibration tokens, through their second moment
(`helios_jax.quant.statistics`), not a sample's.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from helios_jax.quant.scheme import Scheme, decode, encode, fit_grid, grouped
from helios_jax.quant.statistics import InputStatistics, output_error

NUM_ALPHAS = 20
# Ranges are shrunk by down to a half, in steps of a twentieth.
_CLIPS = tuple(1 - i / 20 for i in range(11))


class ScaleSearch(NamedTuple):
    """What `search_scales` found.

    scale_K: float32, what each input channel of the weights is multiplied by.
    alpha: the exponent that was best; 0 means no scaling.
    error: relative mean squared error of the outputs with it, summed over the linears.
    unscaled_error: the same for alpha = 0, round to nearest.
    """

    scale_K: jax.Array
    alpha: jax.Array
    error: jax.Array
    unscaled_error: jax.Array


@functools.partial(jax.jit, static_argnums=(1, 3))
def search_scales(
    weights: tuple[jax.Array, ...],
    schemes: tuple[Scheme, ...],
    statistics: InputStatistics,
    heads: tuple[int, int] | None = None,
) -> ScaleSearch:
    """The scales for linears that share their inputs (q, k, v; gate, up; or one alone).

    Args:
      weights: [N_i, K] of each linear, and `schemes` how each is quantised. An error is taken
        relative to the linear's own output, so that no linear outweighs the others by its size.
      statistics: of the inputs.
      heads: (KV heads, query heads per KV head) where x are attention outputs: the query heads of a
        group then get equal scales, because one value head makes them all.
    """
    moment_KK = statistics.moment_KK
    magnitude_K = _shared(statistics.magnitude_K, heads)
    # A channel that never was active has no say; the smallest active one stands in for it.
    active = magnitude_K > 0
    smallest = jnp.min(jnp.where(active, magnitude_K, jnp.inf))
    magnitude_K = jnp.where(active, magnitude_K, jnp.where(jnp.isfinite(smallest), smallest, 1.0))

    energies = [output_error(weight, moment_KK) for weight in weights]

    def scales_of(alpha):
        scale_K = magnitude_K**alpha
        return scale_K * lax.rsqrt(jnp.max(scale_K) * jnp.min(scale_K))

    def error_of(alpha):
        scale_K = scales_of(alpha)
        total = jnp.float32(0)
        for weight, scheme, energy in zip(weights, schemes, energies, strict=True):
            groups = grouped(weight * scale_K, scheme)
            error = (_rounded(groups, scheme, 1.0) - groups).reshape(weight.shape) / scale_K
            total += output_error(error, moment_KK) / jnp.where(energy > 0, energy, 1.0)
        return total

    alphas = jnp.arange(NUM_ALPHAS, dtype=jnp.float32) / NUM_ALPHAS
    errors = lax.map(error_of, alphas)
    best = jnp.argmin(errors)
    return ScaleSearch(scales_of(alphas[best]), alphas[best], errors[best], errors[0])


@functools.partial(jax.jit, static_argnums=1)
def search_clip(weight_NK: jax.Array, scheme: Scheme, moment_KK: jax.Array) -> jax.Array:
    """The factor on each group's range, [N, groups], 0.5..1, that its output error is least with.

    The error of a group is taken on its own, e M_gg e^T with the group's block of the moment, as
    though the others were exact.
    """
    groups_NGg = grouped(weight_NK, scheme)
    size = groups_NGg.shape[-1]
    starts = jnp.arange(0, weight_NK.shape[1], size)
    blocks_Ggg = jax.vmap(lambda i: lax.dynamic_slice(moment_KK, (i, i), (size, size)))(starts)

    def try_clip(best, clip):
        best_error_NG, best_clip_NG = best
        error_NGg = _rounded(groups_NGg, scheme, clip) - groups_NGg
        products = jnp.einsum("ngi,gij->ngj", error_NGg, blocks_Ggg, precision="highest")
        error_NG = jnp.sum(products * error_NGg, axis=-1)
        better = error_NG < best_error_NG
        best_error_NG = jnp.where(better, error_NG, best_error_NG)
        return (best_error_NG, jnp.where(better, clip, best_clip_NG)), None

    shape = groups_NGg.shape[:2]
    start = (jnp.full(shape, jnp.inf), jnp.ones(shape))
    (_, clip_NG), _ = lax.scan(try_clip, start, jnp.asarray(_CLIPS, jnp.float32))
    return clip_NG


def _rounded(groups: jax.Array, scheme: Scheme, clip) -> jax.Array:
    scale, zero = fit_grid(groups, scheme, clip)
    scale, zero = scale[..., None], zero[..., None]
    return decode(encode(groups, scale, zero, scheme), scale, zero)


def _shared(magnitude_K: jax.Array, heads: tuple[int, int] | None) -> jax.Array:
    """The mean over the query heads that share a KV head, in the place of each."""
    if heads is None:
        return magnitude_K
    per_head = magnitude_K.reshape(*heads, -1)
    shared = jnp.mean(per_head, axis=1, keepdims=True)
    return jnp.broadcast_to(shared, per_head.shape).reshape(-1)
