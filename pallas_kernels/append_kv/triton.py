"""append_kv as a Pallas-Triton kernel: quantise a token's keys and values and write them in place.

Conversion to FP8 is integer arithmetic on float32 bits, so that it is the same on every device (the
conversion instruction needs compute capability 8.9, and saturates only on request). For a format
with m mantissa bits and smallest normal exponent e:

    normal     round the bits at position 23 - m to nearest even, rebias the exponent, shift down
    subnormal  x + 2^(23 + e - m): the sum's last bits are x / 2^(e - m), rounded by the addition
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.append_kv.problem import Problem
from pallas_kernels.cost import Cost
from pallas_kernels.triton_call import triton_call

# Mantissa bits and exponent of the smallest normal number.
_FP8 = {"fp8_e4m3": (3, -6), "fp8_e5m2": (2, -14)}


def unsupported(problem: Problem) -> str | None:
    """Why the kernel cannot serve `problem` on any device, or None."""
    if problem.kv_dtype == "float32":
        return "float32 is the reference mode"
    if problem.head_dim > 256:
        return f"head_dim={problem.head_dim}: a program holds at most 256"
    return None


# Traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("problem", "cost", "interpret"))
def append(
    k_pool, v_pool, k_TKH, v_TKH, slot_T, k_scale_K, v_scale_K, block_offset, problem: Problem,
    cost: Cost, interpret: bool,
):  # fmt: skip
    """See `api.append_kv`. Returns the two pools."""
    arrays = dict(
        k_pool=k_pool,
        v_pool=v_pool,
        k=k_TKH,
        v=v_TKH,
        slot=slot_T,
        offset=jnp.asarray(block_offset, jnp.int32).reshape(1),
    )
    if k_scale_K is not None:
        arrays["k_scale"] = k_scale_K.astype(jnp.float32)
    if v_scale_K is not None:
        arrays["v_scale"] = v_scale_K.astype(jnp.float32)
    pool = jax.ShapeDtypeStruct(k_pool.shape, k_pool.dtype)
    k_pool, v_pool = triton_call(
        functools.partial(_append_kernel, names=tuple(arrays), problem=problem),
        list(arrays.values()),
        name=f"append_kv_{problem.kv_dtype}",
        grid=(problem.num_tokens, problem.num_kv_heads),
        out_shape=[pool, pool],
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        aliases={0: 0, 1: 1},
        bytes_accessed=cost.bytes_moved,
        flops=cost.flops,
    )
    return k_pool, v_pool


def _append_kernel(*refs, names, problem: Problem):
    """Program (token, head): the token's words of both pools."""
    ref = dict(zip(names, refs[:-2], strict=True))
    t, head = pl.program_id(0), pl.program_id(1)
    fmt = problem.format
    words = fmt.words_per_token(problem.head_dim)
    slot = ref["slot"][t]
    tokens = jnp.int32(fmt.tokens_per_block)
    d = jnp.arange(max(16, 1 << (words - 1).bit_length()), dtype=jnp.int32)
    inside = d < words
    block = lax.div(jnp.maximum(slot, 0), tokens) + ref["offset"][0]
    word = lax.rem(jnp.maximum(slot, 0), tokens) * words + d
    for name, pool_ref in (("k", refs[-2]), ("v", refs[-1])):
        inverse = 1.0 / ref[f"{name}_scale"][head] if f"{name}_scale" in ref else None

        def code(plane, name=name, inverse=inverse):
            column = d + plane * (problem.head_dim // 2)
            x = plt.load(ref[name].at[t, head, column], mask=inside, other=0).astype(jnp.float32)
            if inverse is not None:
                x = x * inverse
            return encode(x, problem.kv_dtype)

        value = code(0) if fmt.bits == 16 else code(0) | (code(1) << 8)
        plt.store(
            pool_ref.at[block, head, word], value.astype(jnp.uint16), mask=inside & (slot >= 0)
        )


def encode(x, kv_dtype: str):
    """float32 -> the bits of kv_dtype in an int32 (uint16 for 16-bit formats), saturating."""
    if kv_dtype == "float16":
        # Comparisons with NaN are false, so it passes.
        x = jnp.where(x > 65504.0, 65504.0, jnp.where(x < -65504.0, -65504.0, x))
        return lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)
    if kv_dtype == "bfloat16":
        largest = float(jnp.finfo(jnp.bfloat16).max)
        x = jnp.where(x > largest, largest, jnp.where(x < -largest, -largest, x))
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    if kv_dtype == "int8":
        x = jnp.minimum(jnp.maximum(x, -127.0), 127.0)
        # Adding 1.5 * 2^23 leaves the rounded integer in the low bits.
        return lax.bitcast_convert_type(x + 12582912.0, jnp.int32) & 0xFF
    mantissa, exponent = _FP8[kv_dtype]
    largest = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[kv_dtype]
    bits = lax.bitcast_convert_type(x, jnp.int32)
    sign = lax.shift_right_logical(bits, jnp.full_like(bits, 24)) & 0x80
    magnitude = jnp.where(jnp.abs(x) > largest, largest, jnp.abs(x))
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    drop = 23 - mantissa
    odd = lax.shift_right_logical(bits, jnp.full_like(bits, drop)) & 1
    rounded = bits + ((1 << (drop - 1)) - 1) + odd
    rebias = (127 + exponent - 1) << mantissa
    normal = lax.shift_right_logical(rounded, jnp.full_like(bits, drop)) - rebias
    tiny = magnitude + 2.0 ** (23 + exponent - mantissa)
    subnormal = lax.bitcast_convert_type(tiny, jnp.int32) & ((1 << (mantissa + 1)) - 1)
    code = jnp.where(magnitude < 2.0**exponent, subnormal, normal)
    not_a_number = x != x
    return jnp.where(not_a_number, 0x7F, code) | sign
