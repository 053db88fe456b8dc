"""Do eight devices compute what one does? Run by `test_sharding.py` in a process of its own."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from helios_jax import (
    ModelConfig,
    SamplingParams,
    Transformer,
    generate,
    init_params,
    param_shardings,
)
from helios_jax.model.sharding import TENSOR_PARALLEL
from helios_jax.sampling import stack_sampling
from tests.equality import EqualityRule
from tests.model.quantised import quantise_linears

B, T, NUM_NEW = 8, 9, 12
CONFIG = ModelConfig(
    architecture="qwen3", vocab_size=128, hidden_size=64, intermediate_size=96, num_layers=2,
    num_heads=8, num_kv_heads=4, head_dim=8, max_model_len=64, tie_word_embeddings=True,
    qk_norm=True,
)  # fmt: skip
MODEL = Transformer(CONFIG)


def make_mesh(**axes: int):
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def larger(params):
    """Weights with clearly different logits, unlike those that training starts from."""
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, params)


@pytest.fixture(scope="module")
def params():
    assert len(jax.devices()) == 8
    return larger(init_params(CONFIG, jax.random.key(0)))


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(0)
    lengths = np.array([9, 1, 4, 7, 2, 8, 3, 5], np.int32)
    return random.integers(128, size=(B, T)).astype(np.int32), lengths


SAMPLING = stack_sampling(
    [SamplingParams(temperature=0, max_tokens=NUM_NEW)] * 4
    + [SamplingParams(temperature=0.9, top_p=0.8, seed=seed, max_tokens=9) for seed in range(4)],
    vocab_size=128,
)


@jax.jit
def serve(params, prompts, lengths):
    """A caller's own program: other work before and after."""
    output = generate(MODEL, params, (prompts + 1) % 128, lengths, SAMPLING, NUM_NEW)
    return output, jnp.sum(output.lengths * 2)


@pytest.fixture(scope="module")
def one_device(params, prompts):
    return jax.device_get(serve(params, *prompts))


FSDP = TENSOR_PARALLEL | {"embed": "data"}


@pytest.mark.parametrize(
    "axes, rules",
    [
        ({"data": 2, "model": 4}, None),
        ({"model": 4}, None),
        ({"data": 8}, None),
    ],
)
def test_generate_in_a_callers_jit(axes, rules, params, prompts, one_device):
    mesh = make_mesh(**axes)
    sharded = jax.device_put(params, param_shardings(CONFIG, mesh, rules))
    rows = NamedSharding(mesh, PartitionSpec("data" if "data" in axes else None))
    output, total = serve(sharded, *jax.device_put(prompts, rows))
    expected, expected_total = one_device
    np.testing.assert_array_equal(output.lengths, expected.lengths)
    np.testing.assert_array_equal(output.finish_reason, expected.finish_reason)
    assert total == expected_total == 2 * (4 * NUM_NEW + 4 * 9)
    rule = EqualityRule(MODEL, params)
    for row in range(4):
        length = prompts[1][row]
        prompt = (prompts[0][row, :length] + 1) % 128
        rule.compare(prompt, expected.tokens[row], output.tokens[row])
    rule.check()
    # Seeded rows draw the same uniforms; none of these lies on an edge.
    np.testing.assert_array_equal(output.tokens[4:], expected.tokens[4:])
    assert len({tuple(row) for row in expected.tokens[4:].tolist()}) == 4
    assert output.logprobs is not None and expected.logprobs is not None
    same = np.asarray(output.tokens) == expected.tokens
    np.testing.assert_allclose(
        np.where(same, output.logprobs.chosen_BN, 0),
        np.where(same, expected.logprobs.chosen_BN, 0),
        atol=1e-4,
    )


def test_init_params_are_made_sharded(params):
    mesh = make_mesh(data=2, model=4)
    shardings = param_shardings(CONFIG, mesh, FSDP)
    made = jax.jit(init_params, static_argnums=0, out_shardings=shardings)(
        CONFIG, jax.random.key(0)
    )
    # The sums of the initialiser's polynomial may be ordered otherwise: the last bit.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), larger(made), params
    )
    tree = made["params"]
    shards = {
        "embed": (tree["embed"]["embedding"], (32, 32)),
        "q": (tree["layers_0"]["attention"]["q"]["kernel"], (32, 16)),
        "k": (tree["layers_0"]["attention"]["k"]["kernel"], (32, 8)),
        "o": (tree["layers_1"]["attention"]["o"]["kernel"], (16, 32)),
        "gate": (tree["layers_1"]["ffn"]["gate"]["kernel"], (32, 24)),
        "down": (tree["layers_1"]["ffn"]["down"]["kernel"], (24, 32)),
        "norm": (tree["final_norm"]["scale"], (32,)),
    }
    for name, (array, shape) in shards.items():
        assert {shard.data.shape for shard in array.addressable_shards} == {shape}, name
        assert len(array.addressable_shards) == 8, name


def gathered_shapes(compiled) -> set[tuple[int, ...]]:
    """The shapes of what all-gathers (also asynchronous ones) produce in the compiled program."""
    shapes = set()
    for line in compiled.as_text().splitlines():
        if match := re.search(r"= (\S+) all-gather(-start)?\(", line):
            for dims in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                shapes.add(tuple(map(int, dims.split(",")))) if dims else None
    return shapes


def test_tensor_parallelism_gathers_no_weights(params):
    """Five tokens a row, so that no activation has a weight's shape."""
    mesh = make_mesh(data=2, model=4)
    sharded = jax.device_put(params, param_shardings(CONFIG, mesh))
    tokens = jax.device_put(np.zeros((2, 5), np.int32), NamedSharding(mesh, PartitionSpec("data")))
    weights = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    weights |= {shape[::-1] for shape in weights}
    largest_activation = 2 * 5 * CONFIG.vocab_size
    for shape in gathered_shapes(jax.jit(MODEL.apply).lower(sharded, tokens).compile()):
        assert shape not in weights and np.prod(shape) <= largest_activation, shape
    # A program that does gather a weight is noticed.
    kernel = sharded["params"]["layers_0"]["ffn"]["up"]["kernel"]
    whole = NamedSharding(mesh, PartitionSpec())
    gather = jax.jit(lambda kernel: kernel * 2, out_shardings=whole).lower(kernel).compile()
    assert (64, 96) in gathered_shapes(gather) & weights


def test_training_step_is_sharded(params, prompts):
    """Gradients, and with them logits, of parameters split over both axes (FSDP)."""
    mesh = make_mesh(data=2, model=4)
    shardings = param_shardings(CONFIG, mesh, FSDP)
    tokens = prompts[0]

    def loss(params, tokens):
        logprobs = jax.nn.log_softmax(MODEL.apply(params, tokens)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1))

    expected = jax.jit(jax.grad(loss))(params, tokens)
    actual = jax.jit(jax.grad(loss), out_shardings=shardings)(
        jax.device_put(params, shardings),
        jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data"))),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), actual, expected)


def test_quantised_params_may_be_replicated(params, prompts):
    """Data parallelism with INT4 weights: the same tree on every device, rows split."""
    mesh = make_mesh(data=8)
    quantised = quantise_linears(params)
    tokens = prompts[0]
    expected = jax.jit(MODEL.apply)(quantised, tokens)
    actual = jax.jit(MODEL.apply)(
        jax.device_put(quantised, NamedSharding(mesh, PartitionSpec())),
        jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data"))),
    )
    assert len(actual.sharding.device_set) == 8
    np.testing.assert_allclose(actual, expected, atol=5e-5)


def test_explicit_axes(params, prompts):
    """Refused by name, and usable through auto_axes as the message says."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sharded = jax.device_put(params, param_shardings(CONFIG, mesh))
    tokens = jax.device_put(prompts[0], NamedSharding(mesh, PartitionSpec("data")))
    with pytest.raises(ValueError, match=r"axes \('data', 'model'\) are Explicit.*Auto,\) \* 2"):
        MODEL.apply(sharded, tokens)
    with jax.set_mesh(mesh):
        apply = jax.sharding.auto_axes(MODEL.apply, out_sharding=PartitionSpec("data"))
        logits = jax.jit(apply)(sharded, tokens)
    np.testing.assert_allclose(logits, jax.jit(MODEL.apply)(params, prompts[0]), atol=5e-5)
