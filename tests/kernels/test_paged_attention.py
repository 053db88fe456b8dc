"""Does paged_attention agree with float64 on the dequantised keys and values, on every backend?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_format import FORMATS, format_of
from pallas_kernels.paged_attention import paged_attention, shapes, triton
from pallas_kernels.paged_attention.shapes import Case, arguments
from tests.kernels.tolerances import assert_within, attention_bound

BACKENDS = ("xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu))


def decoded(words, kv_dtype) -> np.ndarray:
    """uint16 words [..., W] -> float64 [..., H], by the layout's definition, with numpy's types."""
    if kv_dtype == "float32":
        return np.ascontiguousarray(words).view(np.float32).astype(np.float64)
    if format_of(kv_dtype).bits == 16:
        return np.ascontiguousarray(words).view(jnp.dtype(kv_dtype)).astype(np.float64)
    codes = np.concatenate([words & 0xFF, words >> 8], -1).astype(np.uint8)
    dtype = {"fp8_e4m3": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2, "int8": np.int8}
    return codes.view(dtype[kv_dtype]).astype(np.float64)


def expected(positional, keyword):
    """(result, bound on its error), float64, one token and head at a time."""
    q, k_pool, v_pool, table, context_len, query_start, query_len = positional
    T, N, H = q.shape
    K = k_pool.shape[1]
    kv_dtype = keyword["kv_dtype"]
    fmt = format_of(kv_dtype)
    words = fmt.words_per_token(H)
    ones = np.ones(K)
    k_scale = np.asarray(keyword.get("k_scale_K", ones), np.float64)
    v_scale = np.asarray(keyword.get("v_scale_K", ones), np.float64)
    out, bound = np.zeros((T, N, H)), np.zeros((T, N, H))
    for b in range(len(context_len)):
        context, queries = int(context_len[b]), int(query_len[b])
        s = np.arange(context)
        block, place = table[b, s // fmt.tokens_per_block], s % fmt.tokens_per_block
        columns = (place * words)[:, None] + np.arange(words)[None]
        if not context:
            continue
        k = decoded(k_pool[block[:, None], :, columns].transpose(0, 2, 1), kv_dtype)
        v = decoded(v_pool[block[:, None], :, columns].transpose(0, 2, 1), kv_dtype)
        k, v = k * k_scale[None, :, None], v * v_scale[None, :, None]
        for i in range(queries):
            position = context - queries + i
            visible = s <= position
            if keyword.get("sliding_window"):
                visible &= s > position - keyword["sliding_window"]
            if keyword.get("tree_mask_BJJ") is not None:
                new = s - (context - queries)
                tree = keyword["tree_mask_BJJ"][b, i]
                visible &= (new < 0) | tree[np.clip(new, 0, len(tree) - 1)]
            t = query_start[b] + i
            head = np.arange(N) // (N // K)
            query = np.asarray(q[t], np.float64)
            scores = np.einsum("nh,snh->ns", query, k[:, head]) / np.sqrt(H)
            if keyword.get("soft_cap"):
                scores = keyword["soft_cap"] * np.tanh(scores / keyword["soft_cap"])
            scores = np.where(visible[None], scores, -np.inf)
            largest = np.abs(np.where(visible[None], scores, 0)).max()
            p = np.exp(scores - scores.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            seen = np.where(visible[:, None, None], v, 0)
            out[t] = np.einsum("ns,snh->nh", p, seen[:, head])
            q_dtype = jnp.dtype(q.dtype).name
            bound[t] = attention_bound(p, seen[:, head], out[t], largest, kv_dtype, q_dtype)
    return out, bound


# One jit for the file, so that calls alike but for their values compile once.
_jitted = jax.jit(
    paged_attention,
    static_argnames=(
        "kv_dtype", "max_query_len", "sliding_window", "soft_cap", "backend", "config",
    ),
)  # fmt: skip


def run(positional, keyword, backend, **options):
    return np.asarray(_jitted(*positional, **keyword, **options, backend=backend))


def check(positional, keyword, backend, **options):
    y, bound = expected(positional, keyword)
    actual = run(positional, keyword, backend, **options)
    assert_within(actual, y, bound, f"{backend} {options}")
    return actual


def config(case: Case, **changes) -> triton.Config:
    base = dict(block_q=4, block_s=32, num_splits=1, fp8_decode="bits", num_warps=1, num_stages=2)
    return triton.Config(**(base | changes))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", shapes.EDGES, ids=str)
def test_edges(case, backend):
    check(*arguments(case), backend)


def test_other_rows_lengths_do_not_change_a_rows_bits():
    positional, keyword = arguments(
        Case(1, 2, 64, ((700, 1), (600, 1), (500, 1)), kv_dtype="bfloat16", scales=False)
    )
    alone = run(positional, keyword, "xla")[1]
    for lengths in ((1, 600, 500), (700, 600, 1), (300, 600, 300)):
        context_len = np.array(lengths, np.int32)
        changed = run((*positional[:4], context_len, *positional[5:]), keyword, "xla")
        np.testing.assert_array_equal(changed[1], alone)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", shapes.SLOW_EDGES, ids=str)
def test_slow_edges(case, backend):
    check(*arguments(case), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_all_codes_are_read_exactly(kv_dtype, backend):
    """One key a row, so the output is its value: all 256 codes, each as low and as high element."""
    codes = np.arange(256, dtype=np.uint16)
    finite = np.isfinite(decoded(codes[:, None], kv_dtype)[:, 0])
    codes = np.where(finite, codes, 0)
    words = codes | (codes[::-1] << 8)  # 256 words: 8 rows of 32, H = 64
    pool = np.zeros((8, 1, 8 * 64), np.uint16)
    pool[:, 0, :32] = words.reshape(8, 32)
    ones = np.ones(8, np.int32)
    positional = (
        np.zeros((8, 1, 64), jnp.float16 if kv_dtype == "fp8_e5m2" else jnp.bfloat16),
        np.zeros_like(pool), pool, np.arange(8, dtype=np.int32)[:, None], ones,
        np.arange(8, dtype=np.int32), ones,
    )  # fmt: skip
    for decode in triton.FP8_DECODES:
        actual = run(
            positional, dict(kv_dtype=kv_dtype, max_query_len=1), backend,
            config=config(None, fp8_decode=decode, block_q=1),
        )  # fmt: skip
        np.testing.assert_array_equal(
            actual[:, 0].astype(np.float64), decoded(pool[:, 0, :32], kv_dtype)
        )


def test_float32_is_the_reference_mode():
    case = Case(2, 3, 64, ((33, 5), (8, 1)), kv_dtype="float32", q_dtype="float32", scales=False)
    y, _ = expected(*arguments(case))
    actual = run(*arguments(case), None)
    np.testing.assert_allclose(actual, y, rtol=2e-5, atol=2e-6)
    with pytest.raises(NotImplementedError, match="float32 is the reference mode"):
        run(*arguments(case), "interpret")


VALUES = {
    "scores of 1e4": lambda q, keyword: (q * 2e3, keyword),
    "equal scores": lambda q, keyword: (q * 0, keyword),
    "k_scale 1e-6": lambda q, keyword: (q, keyword | dict(k_scale_K=np.full(2, 1e-6, np.float32))),
    "k_scale 1e4": lambda q, keyword: (q, keyword | dict(k_scale_K=np.full(2, 1e4, np.float32))),
    "v_scale 1e-6": lambda q, keyword: (q, keyword | dict(v_scale_K=np.full(2, 1e-6, np.float32))),
    "v_scale 1e4": lambda q, keyword: (q, keyword | dict(v_scale_K=np.full(2, 1e4, np.float32))),
    "soft cap on large scores": lambda q, keyword: (q * 1e3, keyword | dict(soft_cap=30.0)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VALUES)
def test_values(name, backend):
    (q, *rest), keyword = arguments(Case(2, 3, 64, ((70, 1), (33, 2), (0, 0))))
    q, keyword = VALUES[name](np.asarray(q, np.float32), keyword)
    check((q.astype(jnp.bfloat16), *rest), keyword, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spike", [0, 15, 16, 31, 32, 63, 64])
def test_one_key_that_takes_all(spike, backend):
    """The key at an edge of a block or tile has all the weight: the output is its value."""
    case = Case(1, 2, 64, ((65, 1),), kv_dtype="bfloat16", scales=False)
    (q, k_pool, v_pool, table, *rest), keyword = arguments(case)
    q = np.ones_like(q)
    k_pool = k_pool.copy()
    keys = np.zeros((65, 64), jnp.bfloat16)
    keys[spike] = 30.0
    for s in range(65):
        k_pool[table[0, s // 8], 0, (s % 8) * 64 : (s % 8 + 1) * 64] = keys[s].view(np.uint16)
    positional = (q, k_pool, v_pool, table, *rest)
    actual = run(positional, keyword, backend, config=config(case, block_q=1, num_splits=2))
    place = slice((spike % 8) * 64, (spike % 8 + 1) * 64)
    value = v_pool[table[0, spike // 8], 0, place].view(jnp.bfloat16)
    np.testing.assert_array_equal(actual[0, 0], value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 40])
def test_splits_agree(window, backend):
    """1 to 32 splits differ by rounding only, splits without keys included, and repeat exactly."""
    case = Case(2, 3, 64, ((257, 2), (31, 2), (1, 1), (0, 0)), sliding_window=window)
    positional, keyword = arguments(case)
    for num_splits in (1, 32) if window else (1, 2, 32):
        cut = config(case, num_splits=num_splits)
        first = check(positional, keyword, backend, config=cut)
        np.testing.assert_array_equal(first, run(positional, keyword, backend, config=cut))


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_are_invisible(backend):
    """Another row's queries, keys and length change nothing, bit for bit."""
    case = Case(2, 3, 64, ((50, 3), (70, 2)))
    (q, k_pool, v_pool, table, context, start, length), keyword = arguments(case)
    base = run((q, k_pool, v_pool, table, context, start, length), keyword, backend)
    q, k_pool, context = q.copy(), k_pool.copy(), context.copy()
    q[3:] *= 3
    k_pool[table[1, :4]] ^= 0x0101
    context[1] = 60
    changed = run((q, k_pool, v_pool, table, context, start, length), keyword, backend)
    np.testing.assert_array_equal(base[:3], changed[:3])
    assert (base[3:] != changed[3:]).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_of_no_row_are_zeros(backend):
    """Gaps between rows, as in a batch whose other rows are served in another precision."""
    case = Case(2, 3, 64, ((50, 3), (70, 2)))
    (q, k_pool, v_pool, table, context, start, length), keyword = arguments(case)
    wide = np.full((9, *q.shape[1:]), np.nan, q.dtype)
    wide[1:4], wide[6:8] = q[:3], q[3:]
    for num_splits in (1, 2):
        options = dict(config=config(case, num_splits=num_splits))
        actual = run(
            (wide, k_pool, v_pool, table, context, np.array([1, 6], np.int32), length),
            keyword, backend, **options,
        )  # fmt: skip
        y, bound = expected((q, k_pool, v_pool, table, context, start, length), keyword)
        assert_within(actual[[1, 2, 3, 6, 7]], y, bound)
        np.testing.assert_array_equal(actual[[0, 4, 5, 8]].astype(np.float32), 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_may_be_shared_and_offset(backend):
    """Two rows with the same first blocks; block ids of the third of four layers."""
    case = Case(2, 3, 64, ((40, 1), (40, 1)))
    (q, k_pool, v_pool, table, *rest), keyword = arguments(case)
    table = table.copy()
    table[1, :2] = table[0, :2]
    y, bound = expected((q, k_pool, v_pool, table, *rest), keyword)
    P = k_pool.shape[0]
    poison = np.full_like(k_pool, 0xFF7F)
    k_all, v_all = (np.concatenate([poison, poison, pool, poison]) for pool in (k_pool, v_pool))
    actual = run((q, k_all, v_all, table, *rest), keyword | dict(block_offset=2 * P), backend)
    assert_within(actual, y, bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
def test_chunks_equal_one_prefill(chunk, backend):
    """A prompt in chunks gives what it gives at once; with chunk 1, decoding does."""
    case = Case(1, 2, 64, ((40, 40),))
    (q, k_pool, v_pool, table, *_), keyword = arguments(case)
    whole, bound = expected((q, k_pool, v_pool, table, *_), keyword)
    starts = range(0, 40, chunk) if chunk > 1 else (0, 15, 16, 39)
    for first in starts:
        last = min(first + chunk, 40)
        positional = (
            q[first:last], k_pool, v_pool, table, np.array([last], np.int32),
            np.zeros(1, np.int32), np.array([last - first], np.int32),
        )  # fmt: skip
        actual = run(positional, keyword | dict(max_query_len=last - first), backend)
        assert_within(actual, whole[first:last], 2 * bound[first:last])


def test_changing_a_scale_compiles_nothing():
    (*positional,), keyword = arguments(Case(2, 3, 64, ((40, 1),)))
    call = jax.jit(
        lambda k, v: paged_attention(*positional, **(keyword | dict(k_scale_K=k, v_scale_K=v)))
    )
    scales = (keyword["k_scale_K"], keyword["v_scale_K"])
    first, second = call(*scales), call(scales[0], 2 * scales[1])
    assert call._cache_size() == 1
    np.testing.assert_allclose(
        np.asarray(second, np.float32), 2 * np.asarray(first, np.float32), rtol=1e-2
    )


def _check_drawn(data):
    rows = []
    for _ in range(data.draw(st.integers(1, 4))):
        context = data.draw(st.integers(0, 90))
        rows.append((context, data.draw(st.integers(0, min(context, 6)))))
    kv_dtype = data.draw(st.sampled_from([n for n in FORMATS if n != "float32"]))
    case = Case(
        K=data.draw(st.integers(1, 3)),
        G=data.draw(st.integers(1, 8)),
        H=data.draw(st.sampled_from([16, 64, 80, 96])),
        rows=tuple(rows),
        kv_dtype=kv_dtype,
        q_dtype="float16" if kv_dtype == "float16" else "bfloat16",
        sliding_window=data.draw(st.sampled_from([None, 9, 32])),
    )
    cut = config(
        case,
        block_q=data.draw(st.integers(1, 6)),
        block_s=data.draw(st.sampled_from([16, 32, 64])),
        num_splits=data.draw(st.sampled_from([1, 3])),
    )
    positional, keyword = arguments(case, seed=data.draw(st.integers(0, 99)))
    if case.num_tokens:
        check(positional, keyword, "interpret", config=cut)
        check(positional, keyword, "xla")


@settings(max_examples=2, deadline=None, derandomize=True)
@given(st.data())
def test_drawn_shapes(data):
    _check_drawn(data)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_many_drawn_shapes(data):
    _check_drawn(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv_dtype="fp8"), "kv_dtype='fp8'"),
        (dict(max_query_len=0), "max_query_len=0"),
        (dict(sliding_window=0), "sliding_window=0"),
        (dict(soft_cap=-1.0), "soft_cap=-1.0"),
        (dict(k_scale_K=np.ones(3, np.float32)), r"k_scale_K has shape \(3,\)"),
        (dict(tree_mask_BJJ=np.ones((1, 40, 40), bool)), "tree_mask_BJJ has shape"),
        (dict(tree_mask_BJJ=np.ones((1, 4, 4), bool), sliding_window=4), "both given"),
    ],
)
def test_bad_options_are_named(change, message):
    positional, keyword = arguments(Case(2, 3, 64, ((40, 1),)))
    with pytest.raises(ValueError, match=message):
        paged_attention(*positional, **(keyword | change))


@pytest.mark.parametrize(
    ("place", "array", "message"),
    [
        (0, np.zeros((1, 5, 64), jnp.bfloat16), "multiple of the 2 KV heads"),
        (0, np.zeros((1, 6, 72), jnp.bfloat16), "head_dim must be a multiple of 16"),
        (1, np.zeros((4, 2, 512), np.int16), "k_pool has shape"),
        (4, np.zeros(2, np.int32), "context_len_B has shape"),
        (3, np.zeros((1, 3), np.int16), "block_table_BM has dtype"),
    ],
)
def test_bad_arrays_are_named(place, array, message):
    positional, keyword = arguments(Case(2, 3, 64, ((40, 1),)))
    positional = tuple(array if i == place else a for i, a in enumerate(positional))
    with pytest.raises(ValueError, match=message):
        paged_attention(*positional, **keyword)


def test_rule_cuts_every_problem():
    from pallas_kernels.devices import DEVICES
    from pallas_kernels.paged_attention import config as configs
    from pallas_kernels.paged_attention.problem import describe

    for case in shapes.EDGES:
        positional, keyword = shapes.abstract_arguments(case)
        keyword = dict.fromkeys(["k_scale_K", "v_scale_K", "softmax_scale", "tree_mask_BJJ"]) | (
            keyword
        )
        problem = describe(*positional, **keyword)
        for device in (None, *DEVICES.values()):
            triton.check_config(problem, configs.rule(problem, device))
        assert dataclasses.replace(problem) == problem
