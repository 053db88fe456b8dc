"""How are activations multiplied by a weight, whatever form the weight has?"""

import jax
import jax.numpy as jnp

from helios_jax.quant.expanded import ExpandedWeight, row_matmul
from helios_jax.quant.tensor import QuantTensor

Weight = jax.Array | QuantTensor | ExpandedWeight


def matmul(inputs: jax.Array, weight: Weight) -> jax.Array:
    """[..., K] times a weight of K inputs and N outputs -> [..., N].

    Products accumulate in float32; the result has the dtype of `inputs`. Operands are taken in the
    narrower of both dtypes, so float32 activations on bfloat16 weights multiply in bfloat16, and
    bfloat16 activations on float32 master weights too.
    """
    return float32_matmul(inputs, weight).astype(inputs.dtype)


def float32_matmul(inputs: jax.Array, weight: Weight) -> jax.Array:
    """`matmul` with the accumulated float32 kept (logits)."""
    if isinstance(weight, ExpandedWeight):
        num_rows = inputs.size // inputs.shape[-1]
        if weight.serves_rows(num_rows):
            rows = row_matmul(inputs.reshape(num_rows, -1), weight)
            return rows.reshape(*inputs.shape[:-1], -1)
        weight = weight.dense_KN
    if isinstance(weight, QuantTensor):
        if weight.perm is not None:
            # One gather of the inputs costs less than one of the weights.
            inputs = jnp.take(inputs, weight.perm, axis=-1)
            weight = weight.in_stored_order()
        weight = weight.dequantize(inputs.dtype).T
    narrow = min(inputs.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    return jnp.dot(
        inputs.astype(narrow),
        weight.astype(narrow),
        preferred_element_type=jnp.float32,
        precision="highest" if narrow == jnp.float32 else None,
    )


def weight_shape(weight: Weight) -> tuple[int, int]:
    """(K, N) of any weight."""
    if isinstance(weight, ExpandedWeight):
        return weight.dense_KN.shape
    if isinstance(weight, QuantTensor):
        return weight.in_features, weight.out_features
    return weight.shape


def embedding_lookup(table: jax.Array | QuantTensor, tokens: jax.Array, dtype) -> jax.Array:
    """Rows `tokens` [...] of a table [V, D] -> [..., D]; only those are dequantised."""
    rows = jax.tree.map(lambda array: jnp.take(array, tokens, axis=0), table)
    return rows.dequantize(dtype) if isinstance(rows, QuantTensor) else rows.astype(dtype)
