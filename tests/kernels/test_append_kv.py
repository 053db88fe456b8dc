"""Does append_kv write the right bits to the right words, and nothing else, on every backend?"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from pallas_kernels.append_kv import append_kv, shapes
from pallas_kernels.append_kv.shapes import Case
from pallas_kernels.kv_format import FORMATS, format_of, from_words, pool_shape, to_words

BACKENDS = ("xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu))


def encoded(values, kv_dtype):
    """float32 [..., H] -> uint16 words, by numpy and ml_dtypes."""
    fmt = format_of(kv_dtype)
    if kv_dtype == "float32":
        return values.astype(np.float32).view(np.uint16)
    values = np.clip(values.astype(np.float32), -fmt.largest, fmt.largest)
    if fmt.bits == 16:
        return values.astype(jnp.dtype(kv_dtype)).view(np.uint16)
    if kv_dtype == "int8":
        codes = np.round(values).astype(np.int8).view(np.uint8)
    else:
        fp8 = ml_dtypes.float8_e4m3fn if kv_dtype == "fp8_e4m3" else ml_dtypes.float8_e5m2
        codes = values.astype(fp8).view(np.uint8)
    low, high = np.split(codes.astype(np.uint16), 2, -1)
    return low | high << 8


def appended(pool, values_TKH, slots, kv_dtype, block_offset=0):
    """`pool` with unscaled values written at `slots`, token by token."""
    pool = pool.copy()
    tokens = format_of(kv_dtype).tokens_per_block
    words = format_of(kv_dtype).words_per_token(values_TKH.shape[-1])
    for values_KH, slot in zip(values_TKH, slots, strict=True):
        if slot >= 0:
            start = slot % tokens * words
            pool[block_offset + slot // tokens, :, start : start + words] = encoded(
                values_KH, kv_dtype
            )
    return pool


_jitted = jax.jit(append_kv, static_argnames=("kv_dtype", "backend"))


def run(positional, backend, **options):
    return [np.asarray(pool) for pool in _jitted(*positional, **options, backend=backend)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", shapes.EDGES, ids=str)
def test_edges(case, scaled, backend):
    """The pool after the call equals one that numpy wrote, canaries and all."""
    rng = np.random.default_rng(0)
    fmt = format_of(case.kv_dtype)
    pools = rng.integers(0, 2**16, (2, *pool_shape(case.num_blocks, case.K, case.H)))
    pools = pools.astype(np.uint16)
    slots = rng.permutation(case.num_blocks * fmt.tokens_per_block)[: case.T].astype(np.int32)
    slots = np.concatenate([slots, np.full(max(0, case.T - len(slots)), -1, np.int32)])
    slots[1::4] = -1
    values = (rng.normal(size=(2, case.T, case.K, case.H)) * 300).astype(jnp.dtype(case.dtype))
    scales = 2.0 ** rng.integers(-3, 4, (2, case.K)).astype(np.float32)
    options: dict = dict(kv_dtype=case.kv_dtype)
    if scaled:
        options |= dict(k_scale_K=scales[0], v_scale_K=scales[1])
    got = run((*pools, *values, slots), backend, **options)
    for actual, pool, value, scale in zip(got, pools, values, scales, strict=True):
        value = value.astype(np.float32) / (scale[None, :, None] if scaled else 1)
        np.testing.assert_array_equal(actual, appended(pool, value, slots, case.kv_dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", [(5,), (-1,), (-1, -1), (-1, 20, -1, 0, 31)], ids=str)
def test_no_slot_writes_nothing(slots, backend):
    """In any layer: -1 plus an offset would be the last block of the layer before."""
    rng = np.random.default_rng(0)
    P = 2
    pools = rng.integers(0, 2**16, (2, *pool_shape(3 * P, 2, 64))).astype(np.uint16)
    values = rng.normal(size=(2, len(slots), 2, 64)).astype(np.float32)
    positional = (*pools, *values, np.array(slots, np.int32))
    for offset in (0, P, 2 * P):
        got = run(positional, backend, kv_dtype="fp8_e4m3", block_offset=offset)
        for actual, pool, value in zip(got, pools, values, strict=True):
            np.testing.assert_array_equal(actual, appended(pool, value, slots, "fp8_e4m3", offset))


def _interesting(kv_dtype):
    """Every representable number, every midpoint, their neighbours, and what must saturate."""
    if kv_dtype == "int8":
        base = np.arange(-130, 131) / 2.0
    else:
        codes = np.arange(256, dtype=np.uint8)
        fp8 = ml_dtypes.float8_e4m3fn if kv_dtype == "fp8_e4m3" else ml_dtypes.float8_e5m2
        numbers = np.sort(codes.view(fp8).astype(np.float32))
        numbers = numbers[np.isfinite(numbers)]
        base = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2])
    base = base.astype(np.float32)
    near = [base, np.nextafter(base, np.float32(np.inf)), np.nextafter(base, np.float32(-np.inf))]
    limits = np.array([464, 465, 480, 1e5, 3e38, np.inf, 1e-30, 0.0, -0.0], np.float32)
    values = np.concatenate([*near, limits, -limits])
    return np.pad(values, (0, -len(values) % 64)).reshape(-1, 1, 64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_rounding_and_saturation(kv_dtype, backend):
    values = _interesting(kv_dtype)
    T = len(values)
    pool = np.zeros(pool_shape(-(-T // 16), 1, 64), np.uint16)
    slots = np.arange(T, dtype=np.int32)
    k, _ = run((pool, pool, values, values, slots), backend, kv_dtype=kv_dtype)
    written = k.reshape(-1, 32)[:T]
    np.testing.assert_array_equal(written, encoded(values[:, 0], kv_dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "bfloat16", "float16"])
def test_nan_stays_nan(kv_dtype, backend):
    values = np.full((1, 1, 64), np.nan, np.float32)
    pool = np.zeros(pool_shape(1, 1, 64), np.uint16)
    k, _ = run((pool, pool, values, values, np.zeros(1, np.int32)), backend, kv_dtype=kv_dtype)
    words = k[0, 0, : format_of(kv_dtype).words_per_token(64)]
    if format_of(kv_dtype).bits == 16:
        assert np.isnan(words.view(jnp.dtype(kv_dtype)).astype(np.float32)).all()
    else:
        fp8 = ml_dtypes.float8_e4m3fn if kv_dtype == "fp8_e4m3" else ml_dtypes.float8_e5m2
        assert np.isnan(words.view(np.uint8).view(fp8).astype(np.float32)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_block_offset_and_float32(backend):
    """Layer 2 of 3 is written, the others are not; the reference mode keeps all bits."""
    P = 2
    pool = np.zeros(pool_shape(3 * P, 1, 16), np.uint16)
    values = np.random.default_rng(0).normal(size=(1, 1, 16)).astype(np.float32)
    slot = np.array([5], np.int32)
    kv_dtype = "float32" if backend == "xla" else "bfloat16"
    k, _ = run((pool, pool, values, values, slot), backend, kv_dtype=kv_dtype, block_offset=2 * P)
    tokens = format_of(kv_dtype).tokens_per_block
    assert (np.delete(k, 2 * P + 5 // tokens, 0) == 0).all()
    words = format_of(kv_dtype).words_per_token(16)
    place = 5 % tokens * words
    np.testing.assert_array_equal(
        k[2 * P + 5 // tokens, 0, place : place + words], encoded(values[0, 0], kv_dtype)
    )


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_words_round_trip(kv_dtype):
    """from_words inverts to_words on what the format holds; a block has the same bytes in all."""
    fmt = format_of(kv_dtype)
    assert fmt.tokens_per_block * fmt.words_per_token(64) == pool_shape(1, 1, 64)[2]
    values = np.random.default_rng(0).integers(-8, 9, (3, 64)).astype(np.float32)
    words = to_words(jnp.asarray(values), kv_dtype)
    np.testing.assert_array_equal(words, encoded(values, kv_dtype))
    np.testing.assert_array_equal(np.asarray(from_words(words, kv_dtype), np.float32), values)


def _write(k_pool, v_pool, values_TKH, slot_T, block_offset=0):
    return append_kv(
        k_pool, v_pool, values_TKH, values_TKH, slot_T, kv_dtype="fp8_e4m3",
        block_offset=block_offset,
    )  # fmt: skip


def _write_and_read_layers(k_pool, v_pool, values_TKH, slot_T):
    def layer(pools, offset):
        pools = _write(*pools, values_TKH, slot_T, offset)
        return pools, [jnp.sum(pool[offset + slot_T // 16]) for pool in pools]

    return lax.scan(layer, (k_pool, v_pool), jnp.arange(4) * 1024)


@pytest.mark.parametrize("num_tokens", [1, 8])
@pytest.mark.parametrize("program", [_write, _write_and_read_layers])
def test_pools_are_updated_in_place(program, num_tokens):
    """A donated pool is the one returned: no pool-sized temporary in the compiled program."""
    pool = jax.ShapeDtypeStruct(pool_shape(4096, 2, 64), jnp.uint16)
    values = jax.ShapeDtypeStruct((num_tokens, 2, 64), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    call = jax.jit(program, donate_argnums=(0, 1))
    memory = call.lower(pool, pool, values, slots).compile().memory_analysis()
    pool_bytes = 4096 * 2 * 8 * 64 * 2
    assert memory.alias_size_in_bytes == 2 * pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k_TKH=np.zeros((2, 2, 64), np.int8)), "k_TKH has shape"),
        (dict(v_TKH=np.zeros((2, 1, 64), np.float32)), "v_TKH has shape"),
        (dict(slot_T=np.zeros(3, np.int32)), "slot_T has shape"),
        (dict(v_pool=np.zeros((3, 2, 512), np.uint16)), "must agree"),
        (dict(k_scale_K=np.ones(3, np.float32)), "k_scale_K has shape"),
    ],
)
def test_bad_arguments_are_named(change, message):
    pool = np.zeros(pool_shape(4, 2, 64), np.uint16)
    values = np.zeros((2, 2, 64), np.float32)
    arguments = dict(
        k_pool=pool, v_pool=pool, k_TKH=values, v_TKH=values, slot_T=np.zeros(2, np.int32)
    )
    with pytest.raises(ValueError, match=message):
        append_kv(**(arguments | change), kv_dtype="fp8_e4m3")


def test_cases_are_hashable():
    assert len({*shapes.EDGES, Case(1, 1, 16, "fp8_e4m3")}) == len(shapes.EDGES)
