"""Does int4_matmul agree with float64 on the dequantised weight, on every backend?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import packing
from pallas_kernels.int4_matmul import config as configs
from pallas_kernels.int4_matmul import int4_matmul, shapes, triton
from pallas_kernels.int4_matmul.problem import describe
from pallas_kernels.int4_matmul.shapes import Case, arguments
from tests.kernels.tolerances import assert_within, matmul_bound

BACKENDS = ("xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu))


def dequantized(packed, scale, keyword) -> np.ndarray:
    """The weight in float64, by the definition in the op's docstring."""
    bits, span = keyword["bits"], keyword["span"]
    codes = np.asarray(packed, np.int64)
    if bits == 4:
        spans = codes.reshape(*codes.shape[:-1], -1, span // 2)
        codes = np.concatenate([spans & 15, spans >> 4], -1).reshape(*codes.shape[:-1], -1)
    group = codes.shape[-1] // scale.shape[-1]
    codes = codes.reshape(*scale.shape, group)
    scale = np.asarray(scale, np.float64)[..., None]
    if keyword.get("offset") is not None:
        weight = scale * codes + np.asarray(keyword["offset"], np.float64)[..., None]
    else:
        zero = keyword.get("zero")
        zero = keyword.get("implicit_zero", 8) if zero is None else np.asarray(zero)[..., None]
        weight = scale * (codes - zero)
    weight = weight.reshape(*weight.shape[:-2], -1)
    return weight[keyword["layer"]] if keyword.get("layer") is not None else weight


def expected(positional, keyword, correlated=False):
    """(result, bound on its error), float64."""
    x, packed, scale = positional
    x_dtype = jnp.dtype(x.dtype).name
    weight = dequantized(packed, scale, keyword)
    x = np.asarray(x, np.float64)
    y = x @ weight.T
    activation = keyword.get("gate_activation")
    # A gate's parts are not rounded before they meet.
    part = "float32" if activation else x_dtype
    bound = matmul_bound(x, weight, y, x_dtype, part, correlated)
    if keyword.get("bias") is not None:
        bias = np.asarray(keyword["bias"], np.float64)
        bias = bias[keyword["layer"]] if keyword.get("layer") is not None else bias
        y = y + bias
        bound = bound + 2.0**-8 * np.abs(bias)
    if activation:
        (gate, up), (gate_bound, up_bound) = np.split(y, 2, -1), np.split(bound, 2, -1)
        if activation == "silu":
            acted = gate / (1 + np.exp(-gate))
        else:
            acted = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        # |silu'| and |gelu'| stay below 1.13.
        bound = 1.13 * gate_bound * (np.abs(up) + up_bound) + np.abs(acted) * up_bound
        y = acted * up
        bound = bound + 2.0**-8 * np.abs(y) + 1e-6
    return y, bound


# One jit for the file, so that calls alike but for their values compile once.
_jitted = jax.jit(
    int4_matmul,
    static_argnames=(
        "bits", "group_size", "span", "implicit_zero", "gate_activation", "backend", "config",
    ),
)  # fmt: skip


def run(positional, keyword, backend, **options):
    return _jitted(*positional, **keyword, **options, backend=backend)


def check(positional, keyword, backend, correlated=False, **options):
    y, bound = expected(positional, keyword, correlated)
    actual = run(positional, keyword, backend, **options)
    assert_within(actual, y, bound, f"{backend} {options}")
    return np.asarray(actual)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", shapes.EDGES, ids=str)
def test_edges(case, backend):
    check(*arguments(case), backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", shapes.SLOW_EDGES, ids=str)
def test_slow_edges(case, backend):
    check(*arguments(case), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("span", packing.SPANS)
def test_every_byte_meets_its_input(span, bits, backend):
    """x one-hot at each k reads column k: all 256 bytes at all places of a span, exactly."""
    K = span
    if bits == 4:
        bytes_NB = (np.arange(256)[:, None] + 37 * np.arange(K // 2)[None, :]) % 256
        packed = bytes_NB.astype(np.uint8)
    else:
        packed = ((np.arange(256)[:, None] + 37 * np.arange(K)[None, :]) % 256).astype(np.uint8)
        packed = packed.view(np.int8)
    scale = np.ones((256, 1), jnp.bfloat16)
    keyword = dict(bits=bits, group_size=-1, span=span, implicit_zero=3)
    actual = int4_matmul(
        np.eye(K, dtype=jnp.bfloat16), packed, scale, **keyword, out_dtype=jnp.float32,
        backend=backend,
    )  # fmt: skip
    np.testing.assert_array_equal(actual, dequantized(packed, scale, keyword).T)


def _values(case: Case, **changes):
    positional, keyword = arguments(case)
    x, packed, scale = positional
    for name in ("x", "packed", "scale"):
        if name in changes:
            value = changes.pop(name)
            like = dict(x=x, packed=packed, scale=scale)[name]
            value = np.broadcast_to(value, like.shape).astype(like.dtype)
            positional = tuple(
                value if n == name else a
                for n, a in zip(("x", "packed", "scale"), positional, strict=True)
            )
    keyword |= changes
    return positional, keyword


VALUES = {
    "codes all 0": dict(packed=0),
    "codes all 15": dict(packed=255),
    "zero point 0": dict(zero=np.zeros((33, 4), np.int16)),
    "zero point 15": dict(zero=np.full((33, 4), 15, np.int16)),
    "scale 0": dict(scale=0.0),
    "scale 1e-30": dict(scale=1e-30),
    "scale 1e4": dict(scale=1e4),
    "scale negative": dict(scale=-0.3),
}


# XLA has one way of scaling, the kernels two.
SCALINGS = [("xla", "post")] + [
    pytest.param(backend, scaling, marks=marks)
    for backend, marks in (("interpret", ()), ("triton", pytest.mark.gpu))
    for scaling in ("post", "pre")
]


@pytest.mark.parametrize("backend, scaling", SCALINGS)
@pytest.mark.parametrize("name", VALUES)
def test_values(name, backend, scaling):
    positional, keyword = _values(Case(5, 33, 256, 64), **VALUES[name])
    config = triton.Config(32, 16, 64, 1, scaling, 2, 3)
    check(positional, keyword, backend, config=config)


@pytest.mark.parametrize("backend", BACKENDS)
def test_common_offset_of_x_cancels(backend):
    """x = 1000 + noise against weights that sum to about 0: no bits lost to the code's bias."""
    positional, keyword = arguments(Case(5, 33, 1024, 128))
    x = np.random.default_rng(1).normal(size=(5, 1024)) + 1e3
    positional = (x.astype(jnp.bfloat16), *positional[1:])
    check(positional, keyword, backend, correlated=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_do_not_touch_one_another(backend):
    """A row of inf and NaN leaves the others bit-equal, also through the edge of the tile."""
    (x, packed, scale), keyword = arguments(Case(17, 65, 128))
    clean = np.asarray(run((x, packed, scale), keyword, backend))
    x = x.copy()
    x[16, ::2], x[16, 1::2] = np.inf, np.nan
    dirty = np.asarray(run((x, packed, scale), keyword, backend))
    np.testing.assert_array_equal(clean[:16], dirty[:16])
    assert not np.isfinite(dirty[16].astype(np.float32)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_layers_are_not_read(backend):
    """Layers beside the chosen one may hold anything."""
    (x, packed, scale), keyword = arguments(Case(5, 65, 256, 64, num_layers=3))
    keyword["layer"] = 1
    scale = scale.copy()
    scale[[0, 2]] = np.nan
    actual = jax.jit(lambda layer: int4_matmul(
        x, packed, scale, **(keyword | dict(layer=layer)), backend=backend
    ))(1)  # fmt: skip
    y, bound = expected((x, packed, scale), keyword)
    assert_within(actual, y, bound)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ways_of_cutting_agree(backend):
    """Splits, tiles and scaling change rounding only; every way repeats bit for bit."""
    positional, keyword = arguments(Case(7, 96, 1024, 128))
    ways = [
        dict(block_n=n, block_m=16, block_k=k, split_k=s, scaling=mode, num_warps=2, num_stages=2)
        for n, k, s, mode in [(32, 128, 1, "post"), (64, 64, 3, "post"), (32, 256, 4, "pre"),
                              (64, 128, 8, "pre")]
    ]  # fmt: skip
    for way in ways:
        config = triton.Config(**way)
        first = check(positional, keyword, backend, config=config)
        again = np.asarray(run(positional, keyword, backend, config=config))
        np.testing.assert_array_equal(first, again)


def test_no_rows():
    (x, packed, scale), keyword = arguments(Case(1, 64, 128))
    assert int4_matmul(x[:0], packed, scale, **keyword).shape == (0, 64)
    assert int4_matmul(x[:0, None], packed, scale, **keyword).shape == (0, 1, 64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padded_k(backend):
    """K = 100 packed as 128: x is padded, so padding codes of any value do not matter."""
    (x, packed, scale), keyword = arguments(Case(3, 64, 128, -1))
    short = int4_matmul(x[:, :100], packed, scale, **keyword, backend=backend)
    padded = x.copy()
    padded[:, 100:] = 0
    full = int4_matmul(padded, packed, scale, **keyword, backend=backend)
    np.testing.assert_array_equal(short, full)


def test_float32_is_the_reference_mode():
    (x, packed, scale), keyword = arguments(Case(3, 64, 128, x_dtype="float32"))
    check((x, packed, scale), keyword, None)
    with pytest.raises(NotImplementedError, match="x is float32"):
        int4_matmul(x, packed, scale, **keyword, backend="interpret")


def _check_drawn(data):
    group = data.draw(st.sampled_from([32, 64, 128, -1]))
    unit = 32 if group == -1 else group
    K = unit * data.draw(st.integers(1, 6))
    span = data.draw(st.sampled_from([s for s in packing.SPANS if K % s == 0]))
    case = Case(
        M=data.draw(st.integers(1, 40)),
        N=2 * data.draw(st.integers(1, 50)),
        K=K,
        group_size=group,
        bits=data.draw(st.sampled_from([4, 8])),
        span=span,
        zero_kind=data.draw(st.sampled_from(["zero", "offset", "implicit"])),
        x_dtype=data.draw(st.sampled_from(["bfloat16", "float16"])),
        gate_activation=data.draw(st.sampled_from([None, "silu"])),
        bias=data.draw(st.booleans()),
    )
    check(*arguments(case, seed=data.draw(st.integers(0, 99))), "interpret")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_drawn_shapes(data):
    _check_drawn(data)


@pytest.mark.slow
@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.data())
def test_many_drawn_shapes(data):
    _check_drawn(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(group_size=96), "group_size=96: must be one of"),
        (dict(bits=3), "bits=3: must be 4 or 8"),
        (dict(span=48), "span=48"),
        (dict(gate_activation="relu"), "gate_activation='relu'"),
        (dict(zero=np.zeros((64, 4), np.int16)), r"zero has shape \(64, 4\)"),
        (dict(zero=np.zeros((64, 2), np.uint8)), "signed integers"),
        (dict(offset=np.zeros((64, 2), np.float32)), "zero and offset are both given"),
        (dict(bias=np.zeros(63, np.float32)), r"bias has shape \(63,\)"),
        (dict(layer=0), "with a layer it must have 3 axes"),
        (dict(backend="mosaic"), "backend='mosaic'"),
    ],
)
def test_bad_arguments_are_named(change, message):
    positional, keyword = arguments(Case(3, 64, 256, 128))
    with pytest.raises(ValueError, match=message):
        int4_matmul(*positional, **(keyword | change))


def test_k_not_a_multiple_of_the_group_raises():
    (x, packed, scale), keyword = arguments(Case(3, 64, 576, 64))
    with pytest.raises(ValueError, match="group_size=128: does not divide the 576"):
        int4_matmul(x, packed, scale, **(keyword | dict(group_size=128)))


def test_stack_too_large_for_int32_offsets_is_refused():
    """80 x 28672 x 4096 codes: 4.7 billion one-byte elements. Shapes only, nothing allocated."""
    case = Case(1, 28672, 8192, num_layers=80)
    positional, keyword = shapes.abstract_arguments(case)

    def run(backend):
        return jax.eval_shape(
            lambda p, zero, layer: int4_matmul(
                *p, **(keyword | dict(zero=zero, layer=layer)), backend=backend
            ),
            positional, keyword["zero"], keyword["layer"],
        )  # fmt: skip

    with pytest.raises(NotImplementedError, match="one-byte elements"):
        run("interpret")
    assert run(None).shape == (1, 28672)


def test_rule_cuts_every_problem():
    """The rule's configuration is valid for all shipped shapes and rows, on each device."""
    from pallas_kernels.devices import DEVICES

    for case in (*shapes.EDGES, *shapes.SLOW_EDGES, *model_cases()):
        for rows in shapes.MODEL_ROWS:
            positional, keyword = shapes.abstract_arguments(dataclasses.replace(case, M=rows))
            problem = describe(
                *positional, **(dict.fromkeys(
                    ["zero", "offset", "bias", "layer", "out_dtype"]
                ) | dict(implicit_zero=8) | keyword)
            )  # fmt: skip
            for device in (None, *DEVICES.values()):
                triton.check_config(problem, configs.rule(problem, device))


def test_rule_fills_the_device():
    """Narrow prefill gives most SMs a tile; at 64 rows enough is loaded ahead, and it fits."""
    from pallas_kernels.devices import DEVICES

    for device in DEVICES.values():
        for N, K in ((1024, 4096), (4096, 4096), (960, 576)):
            problem = configs.problem_of_case(Case(512, N, K, 32))
            config = configs.rule(problem, device)
            programs = -(-N // config.block_n) * (512 // config.block_m)
            assert programs >= min(device.num_sms, N * 512 // 64**2) * 0.9
        config = configs.rule(configs.problem_of_case(Case(64, 4096, 4096)), device)
        ahead = config.num_stages - 1
        stage = config.block_n * config.block_k // 2 + 2 * config.block_m * config.block_k
        assert ahead * stage < device.smem_per_block
        if device.key == "h200":
            resident = 64 * config.split_k // device.num_sms
            assert (resident + 1) * ahead * config.block_n * config.block_k // 2 >= 30 * 1024


def model_cases():
    for matrices, formats in (
        (shapes.LLAMA3_8B, shapes.LLAMA3_FORMATS),
        (shapes.SMOLLM2_135M, shapes.SMOLLM2_FORMATS),
    ):
        for _, N, K in matrices:
            for bits, group_size, zero_kind, scale_dtype in formats:
                yield Case(1, N, K, group_size, bits, 32, zero_kind, "bfloat16", scale_dtype)
