"""What must be known of a linear's inputs in order to quantise it well?

With inputs x and an error E = W_quantised - W, the mean squared error of the outputs is

    mean |E x|^2 = trace(E M E^T),    M = mean x x^T,

so the second moment M stands for all calibration tokens: an error costs a product with a [K, K]
matrix instead of one with the activations, and every token counts.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class InputStatistics:
    """Sums over the tokens that reached a linear of K inputs.

    Attributes:
      products_KK: float32, sum of x x^T.
      magnitudes_K: float32, sum of |x|.
      num_tokens: int32.
    """

    products_KK: jax.Array
    magnitudes_K: jax.Array
    num_tokens: jax.Array

    @classmethod
    def empty(cls, in_features: int) -> "InputStatistics":
        zeros = jnp.zeros(in_features, jnp.float32)
        return cls(jnp.zeros((in_features, in_features), jnp.float32), zeros, jnp.int32(0))

    def add(self, inputs: jax.Array) -> "InputStatistics":
        """With the tokens of `inputs` [..., K] counted too."""
        x_MK = inputs.reshape(-1, inputs.shape[-1]).astype(jnp.float32)
        return InputStatistics(
            self.products_KK + jnp.dot(x_MK.T, x_MK, precision="highest"),
            self.magnitudes_K + jnp.sum(jnp.abs(x_MK), axis=0),
            self.num_tokens + x_MK.shape[0],
        )

    @property
    def moment_KK(self) -> jax.Array:
        """M = mean x x^T."""
        return self.products_KK / self.num_tokens

    @property
    def magnitude_K(self) -> jax.Array:
        """mean |x|."""
        return self.magnitudes_K / self.num_tokens


def output_error(error_NK: jax.Array, moment_KK: jax.Array) -> jax.Array:
    """trace(E M E^T): mean squared error of the outputs, summed over output channels."""
    return jnp.sum(jnp.dot(error_NK, moment_KK, precision="highest") * error_NK)
