"""Does the inline assembly compute what its jnp twin does? Emulated, on all 256 bytes.

The interpreter runs the twins and a GPU the assembly, so without a GPU this is what joins them.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.int4_matmul import triton as matmul
from pallas_kernels.paged_attention import triton as attention
from tests.kernels.ptx_emulator import pack, run, unpack

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("zero", [-1, 0, 8, 15, 16])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("nibble", ["low", "high"])
def test_nibbles_of_all_bytes(nibble, x_dtype, zero):
    """Each byte at each of the four places, beside each of three others."""
    dtype = DTYPES[x_dtype]
    base = matmul._MAGIC[x_dtype][1]
    codes = np.arange(256, dtype=np.uint32)
    for others in (0, 0x5A, 0xFF):
        for place in range(4):
            quad = [np.full(256, others, np.uint32) for _ in range(4)]
            quad[place] = codes
            word = sum(q << np.uint32(8 * i) for i, q in enumerate(quad))
            minus = pack([np.full(256, -base - zero, dtype)] * 2)
            assembly = matmul.unpack_assembly(nibble, x_dtype)
            registers = run(assembly, {"$2": word, "$3": minus, "$4": minus})
            found = [*unpack(registers["$0"], dtype), *unpack(registers["$1"], dtype)]
            for i in range(4):
                want = (quad[i] & 15 if nibble == "low" else quad[i] >> 4).astype(int) - zero
                np.testing.assert_array_equal(found[i].astype(int), want)


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_packed_product(x_dtype):
    dtype = DTYPES[x_dtype]
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(2, 500)).astype(dtype) for _ in range(2))
    a[0, :2], b[0, 0] = 0, -1
    registers = run(matmul.multiply_assembly(x_dtype), {"$1": pack(list(a)), "$2": pack(list(b))})
    want = (a.astype(np.float64) * b.astype(np.float64)).astype(dtype)
    np.testing.assert_array_equal(np.stack(unpack(registers["$0"], dtype)), want)


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("nibble", ["low", "high"])
def test_scaled_nibbles_of_all_bytes(nibble, x_dtype):
    """Each byte at each place with a scale and an offset of its own, against the twin's result."""
    codes = np.arange(256, dtype=np.uint32)
    quad = [np.roll(codes, 37 * i) for i in range(4)]
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.01, 2, (4, 256)).astype(np.float16).astype(np.float32)
    least = rng.normal(size=(4, 256)).astype(np.float16).astype(np.float32) - 128 * scale
    inputs = {"$2": sum(q << np.uint32(8 * i) for i, q in enumerate(quad))}
    for i in range(4):
        inputs[f"${3 + i}"] = scale[i].view(np.uint32)
        inputs[f"${7 + i}"] = least[i].view(np.uint32)
    registers = run(matmul.scale_assembly(nibble, x_dtype), inputs)
    dtype = DTYPES[x_dtype]
    found = np.stack([*unpack(registers["$0"], dtype), *unpack(registers["$1"], dtype)])
    twin = matmul._scale_codes(
        np.stack(quad).astype(np.uint8), scale, least, nibble, jnp.dtype(x_dtype), interpret=True
    )
    np.testing.assert_array_equal(found, np.asarray(twin))


@pytest.mark.parametrize("fp8_decode", attention.FP8_DECODES)
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_decoding_of_all_codes(kv_dtype, plane, fp8_decode):
    """Each code as low or high element of each of two words, whatever the other element."""
    codes = np.arange(256, dtype=np.uint32)
    fp8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
    want = codes.astype(np.uint8).view(fp8[kv_dtype]).astype(np.float64)
    if kv_dtype == "fp8_e4m3" and fp8_decode == "bits":
        want = want / 256
    finite = np.isfinite(want)
    for other in (0, 0x7E, 0xFF):
        element = codes << np.uint32(8 * plane) | np.uint32(other << 8 * (1 - plane))
        rest = np.uint32(0xC35A)
        assembly = attention.decode_assembly(kv_dtype, plane, fp8_decode)
        for place, words in ((0, element | rest << np.uint32(16)), (1, element << 16 | rest)):
            found = unpack(run(assembly, {"$1": words})["$0"], np.float16)[place]
            np.testing.assert_array_equal(found.astype(np.float64)[finite], want[finite])
