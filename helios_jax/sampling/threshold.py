"""Which tokens survive min-p, top-k and top-p: one threshold per row, found without a sort.

All three filters keep the most probable tokens, so that the strictest threshold is all three at
once. With y = (logit - largest logit) / temperature, a token is kept if y >= threshold:

- min-p: y >= log(min_p);
- top-k: y >= the k-th largest y;
- top-p: y >= the largest t such that the tokens with y >= t hold at least top_p of the probability
  that min-p and top-k left.

Equal tokens are kept or dropped together: ties at the threshold are kept, so that more than k may
be (as in vLLM and transformers), and the outcome does not depend on the order of ids.

The NUM_CANDIDATES largest y usually settle both; the rows they do not settle (a k above it, or a
distribution so flat that they hold too little) bisect over the bit patterns of float32, which are
ordered as the numbers they stand for: at most 31 passes give an exact threshold.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from helios_jax.sampling.rows import first_true, largest

NUM_CANDIDATES = 64

_ONE_BITS = 0x3F800000


def keep_threshold(y_BV: Array, top_k_B: Array, top_p_B: Array, min_p_B: Array) -> Array:
    """The threshold of each row, float32 [B]; -inf keeps every token.

    Args:
      y_BV: float32 tempered logits, the largest of each row 0, -inf for barred tokens.
      top_k_B: int32; 0 keeps all.
      top_p_B: float32; 1 keeps all.
      min_p_B: float32; 0 keeps all.
    """
    min_p_threshold_B = jnp.log(min_p_B)

    return _where_any(
        (top_k_B > 0) | (top_p_B < 1),
        lambda: _searched_threshold(y_BV, top_k_B, top_p_B, min_p_threshold_B),
        min_p_threshold_B,
    )


def _searched_threshold(
    y_BV: Array, top_k_B: Array, top_p_B: Array, min_p_threshold_B: Array
) -> Array:
    candidates_BC, _ = largest(y_BV, min(NUM_CANDIDATES, y_BV.shape[1]))
    top_k_threshold_B = _top_k_threshold(y_BV, candidates_BC, top_k_B)
    threshold_B = jnp.maximum(min_p_threshold_B, top_k_threshold_B)
    return jnp.maximum(threshold_B, _top_p_threshold(y_BV, candidates_BC, top_p_B, threshold_B))


def _top_k_threshold(y_BV: Array, candidates_BC: Array, top_k_B: Array) -> Array:
    threshold_B = _nth(candidates_BC, jnp.maximum(top_k_B, 1) - 1)
    open_B = top_k_B > candidates_BC.shape[1]
    threshold_B = _where_any(
        open_B,
        lambda: _bisect_top_k(y_BV, top_k_B, candidates_BC[:, -1], open_B),
        threshold_B,
    )
    return jnp.where(top_k_B > 0, threshold_B, -jnp.inf)


def _top_p_threshold(
    y_BV: Array, candidates_BC: Array, top_p_B: Array, threshold_B: Array
) -> Array:
    """The threshold of top-p over the tokens that `threshold_B` leaves."""
    is_left_BC = candidates_BC >= threshold_B[:, None]
    cumulated_BC = jnp.cumsum(jnp.exp(jnp.where(is_left_BC, candidates_BC, -jnp.inf)), axis=1)

    def among_candidates(all_B):
        reached_BC = cumulated_BC >= (top_p_B * all_B)[:, None]
        return reached_BC[:, -1], _nth(candidates_BC, first_true(reached_BC))

    def among_all():
        weights_BV = jnp.exp(y_BV)
        # A branch, because a select fused with the exp keeps XLA:CPU from vectorising it.
        weights_BV = lax.cond(
            jnp.any(threshold_B > -jnp.inf),
            lambda: jnp.where(y_BV >= threshold_B[:, None], weights_BV, 0.0),
            lambda: weights_BV,
        )
        all_B = jnp.sum(weights_BV, axis=1)
        is_reached_B, found_B = among_candidates(all_B)
        open_B = more_B & ~is_reached_B
        return _where_any(
            open_B,
            lambda: _bisect_top_p(
                y_BV, weights_BV, all_B, top_p_B * all_B, candidates_BC[:, -1], open_B
            ),
            found_B,
        )

    # Where the last candidate is not left, all that are left are candidates.
    more_B = (top_p_B < 1) & is_left_BC[:, -1]
    found_B = _where_any(more_B, among_all, among_candidates(cumulated_BC[:, -1])[1])
    return jnp.where(top_p_B < 1, found_B, -jnp.inf)


def _where_any(rows_B: Array, search: Callable[[], Array], otherwise_B: Array) -> Array:
    """search() in the given rows; not run where there are none."""
    return lax.cond(
        jnp.any(rows_B), lambda: jnp.where(rows_B, search(), otherwise_B), lambda: otherwise_B
    )


def _bisect_top_k(y_BV: Array, top_k_B: Array, above_B: Array, rows_B: Array) -> Array:
    """The k-th largest y of the given rows, which is at most `above_B`.

    It is minus the smallest distance from 0 that holds k tokens.
    """
    distance_BV = jnp.abs(y_BV)

    def count(bits_B):
        within_BV = distance_BV <= _float(bits_B)[:, None]
        return jnp.sum(jnp.where(within_BV, 1.0, 0.0), axis=1)  # exact up to 2**24

    farthest_B = jnp.max(jnp.where(jnp.isfinite(distance_BV), distance_BV, 0.0), axis=1)
    high_B = _bits(farthest_B)
    low_B = jnp.where(rows_B, jnp.minimum(_bits(jnp.abs(above_B)), high_B), high_B)
    all_B = jnp.full_like(above_B, y_BV.shape[1])
    one_B = jnp.ones_like(above_B)
    found_B = _bisect(count, top_k_B.astype(jnp.float32), low_B, high_B, all_B, lambda _: one_B)
    distance_B = jnp.max(
        jnp.where(distance_BV <= _float(found_B)[:, None], distance_BV, 0.0), axis=1
    )
    return -distance_B


def _bisect_top_p(
    y_BV: Array, weights_BV: Array, all_B: Array, target_B: Array, above_B: Array, rows_B: Array
) -> Array:
    """The threshold on y that top-p asks for in the given rows, which is at most `above_B`.

    It is found as the largest threshold on `weights_BV`, where weights that are equal in
    float32 count as ties, and returned as the smallest y among the kept: never computed from the
    weight, so that rounding cannot drop the token it stands at.
    """

    def weight(bits_B):
        return _float(_ONE_BITS - bits_B)

    def mass(bits_B):
        return jnp.sum(jnp.where(weights_BV >= weight(bits_B)[:, None], weights_BV, 0.0), axis=1)

    # All tokens lighter than this together weigh less than half of what top-p leaves out.
    high_B = _ONE_BITS - _bits((all_B - target_B) / (2 * y_BV.shape[1]))
    low_B = jnp.minimum(_ONE_BITS - _bits(jnp.exp(above_B)), high_B)
    low_B = jnp.where(rows_B, low_B, high_B)
    smallest_B = weight(_bisect(mass, target_B, low_B, high_B, all_B, weight))
    return jnp.min(jnp.where(weights_BV >= smallest_B[:, None], y_BV, 0.0), axis=1)


def _bisect(
    measure: Callable[[Array], Array],
    target_B: Array,
    low_B: Array,
    high_B: Array,
    all_B: Array,
    lightest: Callable[[Array], Array],
) -> Array:
    """An n in low..high that holds the tokens of the smallest n with measure(n) >= target.

    Halving goes on until a single n is left, or a single token: what lies between the bounds weighs
    less than two of the lightest that can lie there. That takes 12 to 20 passes.

    Args:
      measure: the weight of the tokens within n; must not decrease.
      low_B, high_B: int32 bounds; a row whose bounds are equal gets them back.
      all_B: measure(high), or more.
      lightest: the least weight of a token within n.
    """

    def is_open(state):
        low_B, high_B, below_B, upto_B = state
        return (low_B < high_B) & (upto_B - below_B >= 1.5 * lightest(high_B))

    def halve(state):
        low_B, high_B, below_B, upto_B = state
        middle_B = low_B + (high_B - low_B) // 2
        measured_B = measure(middle_B)
        down_B = is_open(state) & (measured_B >= target_B)
        up_B = is_open(state) & ~down_B
        return (
            jnp.where(up_B, middle_B + 1, low_B),
            jnp.where(down_B, middle_B, high_B),
            jnp.where(up_B, measured_B, below_B),
            jnp.where(down_B, measured_B, upto_B),
        )

    state = low_B, high_B, jnp.zeros_like(all_B), all_B
    return lax.while_loop(lambda state: jnp.any(is_open(state)), halve, state)[1]


def _float(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _nth(x_BC: Array, n_B: Array) -> Array:
    """Entry n of each row, the last one where n is beyond it."""
    n_B = jnp.minimum(n_B, x_BC.shape[1] - 1)
    return jnp.take_along_axis(x_BC, n_B[:, None], axis=1)[:, 0]
