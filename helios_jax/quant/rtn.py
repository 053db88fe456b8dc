"""How is a weight quantised without looking at data? Round to nearest, the baseline."""

import functools

import jax

from helios_jax.quant.scheme import Scheme, assemble, encode, fit_grid, grouped
from helios_jax.quant.tensor import QuantTensor


@functools.partial(jax.jit, static_argnums=1)
def rtn(weight_NK: jax.Array, scheme: Scheme, clip_NG=1.0) -> QuantTensor:
    """Every weight becomes the nearest value of its group's grid.

    Args:
      weight_NK: float, one row per output channel (a dense kernel is the transpose; an embedding
        [V, D] is as it is).
      scheme: `scheme.check(name, K)` must hold.
      clip_NG: what each group's range is multiplied by, see `helios_jax.quant.awq.search_clip`.
    """
    groups = grouped(weight_NK, scheme)
    scale, zero = fit_grid(groups, scheme, clip_NG)
    codes = encode(groups, scale[..., None], zero[..., None], scheme)
    return assemble(codes.reshape(weight_NK.shape), scale, zero, scheme)
