"""Does the byte model count what real arrays hold?"""

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels import append_kv, int4_matmul, paged_attention
from pallas_kernels.append_kv import shapes as append_shapes
from pallas_kernels.cost import Cost
from pallas_kernels.devices import DEVICES
from pallas_kernels.int4_matmul import shapes as matmul_shapes
from pallas_kernels.kv_format import pool_shape
from pallas_kernels.paged_attention import shapes as attention_shapes


@pytest.mark.parametrize("case", matmul_shapes.EDGES, ids=str)
def test_matmul_bytes_are_those_of_the_arrays(case):
    positional, keyword = matmul_shapes.arguments(case)
    cost = int4_matmul.cost(*positional, **keyword)
    x, *weight = positional
    weight += [v for k, v in keyword.items() if isinstance(v, np.ndarray) and k != "layer"]
    layers = case.num_layers or 1
    assert cost.bytes_read == x.nbytes + sum(a.nbytes for a in weight) // layers
    y = jax.eval_shape(lambda: int4_matmul.int4_matmul(*positional, **keyword))
    assert cost.bytes_written == y.size * y.dtype.itemsize
    assert cost.flops == 2 * case.M * case.N * case.K


def test_matmul_cost_of_structs_is_that_of_arrays():
    for case in matmul_shapes.EDGES:
        abstract, keyword = matmul_shapes.abstract_arguments(case)
        positional, concrete = matmul_shapes.arguments(case)
        assert int4_matmul.cost(*abstract, **keyword) == int4_matmul.cost(*positional, **concrete)


def test_attention_reads_a_full_pool_once():
    """Rows that together fill the pool: K and V bytes are those of the two pools."""
    case = attention_shapes.Case(2, 3, 64, ((64, 1), (128, 1)))
    positional, keyword = attention_shapes.arguments(case)
    used = 64 // 16 + 128 // 16
    pools = 2 * used * np.zeros(pool_shape(1, 2, 64), np.uint16).nbytes
    small = sum(a.nbytes for a in positional[3:])
    small += keyword["k_scale_K"].nbytes + keyword["v_scale_K"].nbytes
    cost = paged_attention.cost(*positional, **keyword)
    q = positional[0]
    assert cost.bytes_read == pools + q.nbytes + small
    assert cost.bytes_written == q.nbytes
    assert cost.flops == 4 * 6 * 64 * (64 + 128)


def test_attention_counts_windows_and_causality():
    case = attention_shapes.Case(1, 1, 64, ((100, 3),), scales=False)
    full = paged_attention.cost(*attention_shapes.arguments(case)[0], kv_dtype="fp8_e4m3",
                                max_query_len=3)  # fmt: skip
    assert full.flops == 4 * 64 * (98 + 99 + 100)
    windowed = paged_attention.cost(*attention_shapes.arguments(case)[0], kv_dtype="fp8_e4m3",
                                    max_query_len=3, sliding_window=10)  # fmt: skip
    assert windowed.flops == 4 * 64 * 30
    # Keys 88..99 are seen by some query: 12 of the 100.
    assert full.bytes_read - windowed.bytes_read == (100 - 12) * 2 * 64


def test_attention_without_lengths_counts_every_row_full():
    case = attention_shapes.Case(2, 3, 64, ((64, 1), (128, 1)))
    abstract = paged_attention.cost(
        *attention_shapes.abstract_arguments(case)[0], kv_dtype="fp8_e4m3", max_query_len=1
    )
    rows = ((128, 1), (128, 1))
    full, keyword = attention_shapes.abstract_arguments(dataclasses.replace(case, rows=rows))
    assert abstract == paged_attention.cost(*full, kv_dtype="fp8_e4m3", max_query_len=1)


@pytest.mark.parametrize("case", append_shapes.EDGES, ids=str)
def test_append_bytes(case):
    positional, keyword = append_shapes.abstract_arguments(case)
    cost = append_kv.cost(*positional, **keyword)
    width = 1 if case.kv_dtype in ("fp8_e4m3", "fp8_e5m2", "int8") else 2
    values = 2 * case.T * case.K * case.H
    assert cost.bytes_written == values * width
    source = {"float32": 4}.get(case.dtype, 2)
    assert cost.bytes_read == values * source + 4 * case.T + 2 * 4 * case.K


def test_floor_is_the_slower_of_memory_and_tensor_cores():
    """4096 x 4096 at g128 on an H200: 2.0 us at one row, 393 at 8192."""
    device = DEVICES["h200"]
    one = Cost(bytes_read=8_720_000, bytes_written=8192, flops=2 * 4096**2)
    assert one.floor_seconds(device) == pytest.approx(2.0e-6, rel=0.05)
    many = Cost(bytes_read=76_000_000, bytes_written=67_000_000, flops=2 * 8192 * 4096**2)
    assert many.floor_seconds(device) == pytest.approx(393e-6, rel=0.03)
