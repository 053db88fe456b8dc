"""Does the byte model agree with sums done by hand?"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from helios_jax.config import ModelConfig
from helios_jax.model import init_params
from helios_jax.profiler import (
    GPUS,
    Formats,
    Hardware,
    kv_bytes_per_token,
    linear_bytes,
    num_matmul_weights,
    step_bytes,
    step_seconds,
    weight_bytes,
)
from helios_jax.profiler.bytes import vector_bytes
from tests import tiny

LLAMA_8B = ModelConfig(
    "llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=8192,
)  # fmt: skip


def test_llama_8b_has_its_published_sizes():
    linears, head = num_matmul_weights(LLAMA_8B)
    assert linears == 6_979_321_856 and head == 525_336_576
    assert linears + 2 * head == 8_029_995_008  # 8.03 B, norms aside
    assert weight_bytes(LLAMA_8B, Formats(weight_bits=16)) == 2 * 8_029_995_008
    # 2 (K and V) * 32 layers * 8 heads * 128 * 2 bytes: 128 KiB a token, half of it at 8 bits.
    assert kv_bytes_per_token(LLAMA_8B, 16) == 131_072
    assert kv_bytes_per_token(LLAMA_8B, 8) == 65_536


def test_a_sequence_of_2048_tokens_has_the_kv_size_of_the_design():
    multi_head = ModelConfig(
        "llama", vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_layers=32,
        num_heads=32, num_kv_heads=32, head_dim=128, max_model_len=4096,
    )  # fmt: skip
    assert 2048 * kv_bytes_per_token(multi_head, 16) == 1_073_741_824


def test_scales_and_zeros_count():
    linears, _ = num_matmul_weights(LLAMA_8B)
    for formats, bits in (
        (Formats(weight_bits=4, group_size=128), 4 + 20 / 128),
        (Formats(weight_bits=4, group_size=32, zero_bits=16), 5),
        (Formats(weight_bits=4, group_size=128, zero_bits=0), 4 + 16 / 128),
        (Formats(weight_bits=16), 16),
    ):
        assert linear_bytes(LLAMA_8B, formats) == linears * bits / 8


def test_a_decode_step_by_part():
    moved = step_bytes(LLAMA_8B, Formats(), num_tokens=4, num_sampled=4, kv_tokens=4 * 1000)
    assert float(moved.linears) == pytest.approx(6_979_321_856 * 4.15625 / 8)
    assert float(moved.head) == 525_336_576 * 2
    assert float(moved.embedding) == 4 * 4096 * 2
    assert float(moved.kv_read) == 4000 * 65_536 and float(moved.kv_written) == 4 * 65_536
    assert float(moved.total) == pytest.approx(sum(map(float, moved)))
    nothing = step_bytes(LLAMA_8B, Formats(), num_tokens=0, num_sampled=0, kv_tokens=0)
    assert float(nothing.total) == 0


def test_decode_is_bound_by_bytes_and_a_long_chunk_by_flops():
    def seconds(hardware, num_tokens, **counts):
        return float(step_seconds(LLAMA_8B, Formats(), hardware, num_tokens=num_tokens, **counts))

    decode = {"num_sampled": 1, "kv_tokens": 1000, "attended_tokens": 1000}
    moved = step_bytes(LLAMA_8B, Formats(), num_tokens=1, num_sampled=1, kv_tokens=1000)
    assert seconds(GPUS["h100"].hardware, 1, **decode) == pytest.approx(
        float(moved.total) / 3.352e12
    )
    chunk = {"num_sampled": 1, "kv_tokens": 0, "attended_tokens": 4096 * 4097 // 2}
    flops = 2 * 6_979_321_856 * 4096 + 2 * 525_336_576 + 4 * 32 * 4096 * chunk["attended_tokens"]
    assert seconds(GPUS["h100"].hardware, 4096, **chunk) == pytest.approx(flops / 989e12, rel=1e-5)


def test_impossible_values_are_refused():
    with pytest.raises(ValueError, match="kv_bits=0"):
        Formats(kv_bits=0)
    with pytest.raises(ValueError, match="bytes_per_second=0"):
        Hardware(bytes_per_second=0, flops_per_second=1)


def test_a_draft_head_has_the_bytes_of_its_arrays():
    config = dataclasses.replace(tiny.config(), is_draft_head=True, num_layers=3)
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    leaves = jax.tree.leaves(params)
    formats = Formats(weight_bits=16, head_bits=16)
    matrices = sum(leaf.nbytes for leaf in leaves if leaf.ndim == 2)
    assert weight_bytes(config, formats) == matrices
    assert vector_bytes(config) == 2 * sum(leaf.nbytes for leaf in leaves if leaf.ndim == 1)
    moved = step_bytes(config, formats, num_tokens=1, num_sampled=1, kv_tokens=1000)
    assert moved.kv_read == moved.kv_written == 0
    assert moved.linears + moved.head == matrices
