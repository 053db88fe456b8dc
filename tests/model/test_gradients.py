"""Is `model.apply` differentiable, with the gradient that finite differences find?"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax import Transformer
from tests.model import reference_models
from tests.model.quantised import quantise_linears

STEP = 1e-2
OUTSIDE = -(10**6)  # an id that no vocabulary has


def loss_function(config):
    """(params, padding id) -> mean cross-entropy of two rows, the second one padded."""
    tokens = np.stack([reference_models.tokens("qwen3_bias_tied")] * 2)
    is_token = np.arange(tokens.shape[1]) < np.array([[24], [13]])
    positions = np.where(is_token, np.arange(tokens.shape[1]), -1)
    weight = is_token[:, 1:] / is_token[:, 1:].sum()
    model = Transformer(config)

    def loss(params, padding=OUTSIDE):
        inputs = jnp.where(is_token, tokens, padding)
        logits = model.apply(params, inputs, jnp.asarray(positions))[:, :-1]
        logprobs = jax.nn.log_softmax(logits)
        targets = jnp.asarray(tokens[:, 1:, None])
        return -jnp.sum(weight * jnp.take_along_axis(logprobs, targets, axis=-1)[..., 0])

    return loss


def check_entries(loss, params, gradient, names):
    """The largest entry of each named leaf's gradient against a central difference."""
    value = jax.jit(loss)
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    leaves = [leaf for _, leaf in flat]
    gradients = dict(zip(paths, jax.tree.leaves(gradient), strict=True))
    for name in names:
        index = paths.index(f"params/{name}")
        slope = gradients[paths[index]]
        entry = np.unravel_index(np.argmax(np.abs(slope)), slope.shape)

        def at(change, index=index, entry=entry):
            changed = list(leaves)
            changed[index] = changed[index].at[entry].add(change)
            return float(value(structure.unflatten(changed)))

        numerical = (at(STEP) - at(-STEP)) / (2 * STEP)
        assert abs(slope[entry]) > 1e-3, f"{name}: too flat to compare"
        # The losses' float32 rounding is 5e-7 / 2e-2; a step of 1e-2 bends by less than 1%.
        np.testing.assert_allclose(slope[entry], numerical, rtol=2e-2, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("chunk", [512, 5])
def test_gradient(chunk, load_case, monkeypatch):
    """Biases, QK norms and a tied embedding included; also through the loop over query chunks."""
    monkeypatch.setattr(importlib.import_module("helios_jax.cache.attention"), "QUERY_CHUNK", chunk)
    config, params = load_case("qwen3_bias_tied")
    params = jax.tree.map(jnp.asarray, params)
    loss = loss_function(config)
    gradient = jax.jit(jax.grad(loss))(params)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    check_entries(
        loss, params, gradient,
        [
            "embed/embedding", "layers_0/attention/q/kernel", "layers_0/attention/k_norm/scale",
            "layers_1/attention/v/bias", "layers_1/attention/o/kernel", "layers_0/ffn/gate/kernel",
            "layers_1/ffn_norm/scale", "final_norm/scale",
        ],
    )  # fmt: skip


def test_padding_has_no_gradient(load_case):
    """Which ids the padding holds changes no bit of the gradient."""
    config, params = load_case("qwen3_bias_tied")
    gradient = jax.jit(jax.grad(loss_function(config)))
    gradients = [gradient(params, jnp.int32(padding)) for padding in (3, 10**6)]
    jax.tree.map(np.testing.assert_array_equal, *gradients)


def test_scales_of_quantised_weights(load_case):
    """Codes have no gradient (float0); scales do, so quantised linears can be tuned."""
    config, params = load_case("qwen3_bias_tied")
    params = quantise_linears(params)
    loss = loss_function(config)
    gradient = jax.jit(jax.grad(loss, allow_int=True))(params)
    kernel = gradient["params"]["layers_0"]["attention"]["q"]["kernel"]
    assert kernel.packed.dtype == jax.dtypes.float0
    assert kernel.scale.dtype == jnp.float32
    names = ["layers_0/ffn/down/kernel/scale", "layers_1/attention/v/kernel/offset"]
    check_entries(loss, params, gradient, names)
