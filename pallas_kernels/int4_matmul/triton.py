"""int4_matmul as a Pallas-Triton kernel: weights dequantised in registers, one source for sm_80 on.

The product is computed transposed, Y^T[BN, BM] = W[BN, BK] . X^T[BK, BM], so that the weight is the
left operand, which tensor cores take from registers, and a small batch pads to 16 columns only.
A 4-bit tile of BN x BK/2 bytes becomes two operands, low and high nibbles, each multiplied with the
columns of x that belong to it; K may be summed in any order.

Unpacking, 7 instructions for 8 weights: masking four bytes to their nibbles and interleaving them
with 0x43 makes four bfloat16 numbers 128 + q (with 0x64, float16 1024 + q). Subtracting 128 + zero
is exact. The group's scale is then applied in one of two places, never in a pass of its own:

    "post"  acc += scale * (W_group . x_group)     scale multiplies the float32 sum of its group
    "pre"   acc += (scale * w) . x                 scale multiplies each weight, rounded once to x's
                                                   dtype

"post" costs rows / group_size multiplies a weight and rounds nothing; "pre" costs a constant and
serves groups smaller than a tile, float offsets, and many rows. Where "pre" needs float32 (float
offsets, scales in another 16-bit dtype than x), a byte of a nibble put beside 0x43 is the float32
128 + q, and one multiply-add with scale and offset - 128 scale (or -(128 + zero) scale) makes the
weight: 11 instructions for 4 weights with the rounding to pairs.

With few rows there are too few tiles to keep all SMs loading, so K is split: every split writes
float32 partial sums, and a second kernel adds them in a fixed order (results do not vary from run
to run), adds the bias, applies the gate and casts.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.cost import Cost
from pallas_kernels.int4_matmul.problem import Problem
from pallas_kernels.triton_call import MAX_ONE_BYTE_ELEMENTS, triton_call

# High byte that turns a nibble into base + q, by dtype of the activations.
_MAGIC = {"bfloat16": (0x43, 128), "float16": (0x64, 1024)}
# Packed arithmetic: PTX suffix, the pair (1, 1), the pair (-0, -0).
_PACKED = {
    "bfloat16": ("bf16x2", "0x3f803f80", "0x80008000"),
    "float16": ("f16x2", "0x3c003c00", "0x80008000"),
}
_REDUCE_BLOCK = 256
ACTIVATIONS = ("silu", "gelu_tanh")  # erf does not lower


@dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block_n: weight rows (output channels) a program computes.
      block_m: activation rows a program computes, a power of two >= 16.
      block_k: codes of K a loop iteration reads; divides K, and is a multiple of the group size or
        divides it.
      split_k: programs that share a tile's K, each on a contiguous part.
      scaling: "post" or "pre".
      num_warps, num_stages: see `triton_call`.
    """

    block_n: int
    block_m: int
    block_k: int
    split_k: int
    scaling: str
    num_warps: int
    num_stages: int


def unsupported(problem: Problem) -> str | None:
    """Why the kernel cannot serve `problem` on any device, or None."""
    if problem.x_dtype not in _MAGIC:
        return f"x is {problem.x_dtype}; the kernel multiplies {' or '.join(_MAGIC)}"
    if problem.activation is not None and problem.activation not in ACTIVATIONS:
        return f"gate_activation={problem.activation!r} does not lower; it has {ACTIVATIONS}"
    if problem.in_features % 32:
        return f"in_features={problem.in_features} is not a multiple of 32"
    elements = (problem.num_layers or 1) * problem.out_features * problem.packed_columns
    if elements > MAX_ONE_BYTE_ELEMENTS:
        return (
            f"the weight has {elements} one-byte elements, more than {MAX_ONE_BYTE_ELEMENTS}: "
            "int32 offsets would wrap; split the stack of layers"
        )
    return None


# Traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("problem", "config", "cost", "interpret"))
def matmul(
    x, packed, scale, zero, offset, bias, layer, problem: Problem, config: Config, cost: Cost,
    interpret: bool,
):  # fmt: skip
    """x [M, K] times the weight; see `api.int4_matmul`. Returns [M, N], or [M, N // 2] gated."""
    check_config(problem, config)
    arrays = {"layer": jnp.asarray(0 if layer is None else layer, jnp.int32).reshape(1), "x": x}
    per_layer = {"w": packed, "scale": scale, "zero": zero, "offset": offset, "bias": bias}
    for name, array in per_layer.items():
        if array is not None:
            arrays[name] = array if layer is not None else array[None]
    split = config.split_k > 1
    columns = problem.out_features if split else problem.out_columns
    shape = (config.split_k, problem.rows, columns) if split else (problem.rows, columns)
    result = triton_call(
        functools.partial(
            _matmul_kernel, names=tuple(arrays), problem=problem, config=config,
            interpret=interpret,
        ),
        list(arrays.values()),
        name=f"int{problem.bits}_matmul",
        grid=(
            pl.cdiv(columns, config.block_n),
            pl.cdiv(problem.rows, config.block_m),
            config.split_k,
        ),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32 if split else problem.out_dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        bytes_accessed=cost.bytes_moved,
        flops=cost.flops,
    )  # fmt: skip
    if not split:
        return result
    arguments = [result] if bias is None else [result, arrays["layer"], arrays["bias"]]
    return triton_call(
        functools.partial(_reduce_kernel, problem=problem, split_k=config.split_k),
        arguments,
        name=f"int{problem.bits}_matmul_reduce",
        grid=(problem.rows, pl.cdiv(problem.out_columns, _REDUCE_BLOCK)),
        out_shape=jax.ShapeDtypeStruct((problem.rows, problem.out_columns), problem.out_dtype),
        num_warps=2,
        num_stages=1,
        interpret=interpret,
        bytes_accessed=result.size * 4 + cost.bytes_written,
        flops=result.size,
    )


def check_config(problem: Problem, config: Config) -> None:
    """Raises ValueError where `config` cannot cut `problem`."""
    k, group = config.block_k, problem.group_size
    one_group = problem.num_groups == 1
    rules = {
        "block_k divides in_features": problem.in_features % k == 0,
        "block_k is 32, 64, 128 or 256": k in (32, 64, 128, 256),
        "block_k and group_size divide one another": one_group or k % group == 0 or group % k == 0,
        "block_k is a multiple of the packing span": problem.bits == 8 or k % problem.span == 0,
        "block_m is a power of two >= 16": config.block_m >= 16 and _is_power(config.block_m),
        "block_n is a power of two >= 16": config.block_n >= 16 and _is_power(config.block_n),
        "split_k leaves each split work": 1 <= config.split_k <= problem.in_features // k,
        "scaling is 'post' or 'pre'": config.scaling in ("post", "pre"),
        "post scaling has whole tiles in a group": config.scaling == "pre" or post(problem, k),
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"{config} cannot cut {problem}: violates '{rule}'")


def post(problem: Problem, block_k: int) -> bool:
    """Whether every operand of a tile lies in one group without offset: "post" scaling works."""
    one_group = problem.num_groups == 1
    whole = one_group or (problem.group_size % block_k == 0)
    return whole and not problem.has_offset


def _matmul_kernel(*refs, names, problem: Problem, config: Config, interpret: bool):
    """Program (n, m, s): a [BM, BN] tile of the result, or split s of its partial sums."""
    *inputs, out_ref = refs
    ref = dict(zip(names, inputs, strict=True))
    layer = ref["layer"][0]
    m = pl.program_id(1) * config.block_m + jnp.arange(config.block_m, dtype=jnp.int32)
    n = pl.program_id(0) * config.block_n + jnp.arange(config.block_n, dtype=jnp.int32)
    split = config.split_k > 1
    activation = None if split else problem.activation
    columns = problem.out_columns if activation else problem.out_features
    # Rows past the edge read the last one and are not stored.
    m_safe = m if problem.rows % config.block_m == 0 else jnp.minimum(m, problem.rows - 1)
    n_safe = n if columns % config.block_n == 0 else jnp.minimum(n, columns - 1)
    tile = functools.partial(_tile, ref, layer, m_safe, problem, config, interpret)
    if activation is not None:
        gate = _with_bias(tile(n_safe), ref, layer, n_safe)
        up = _with_bias(tile(n_safe + columns), ref, layer, n_safe + columns)
        acc = activate(gate, activation) * up
    else:
        acc = tile(n_safe)
        acc = acc if split else _with_bias(acc, ref, layer, n_safe)
    target = (m[:, None], n[None, :])
    inside = (m < problem.rows)[:, None] & (n < columns)[None, :]
    if split:
        target = (pl.program_id(2), *target)
    plt.store(out_ref.at[target], acc.T.astype(out_ref.dtype), mask=inside)


def _with_bias(acc, ref, layer, n):
    if "bias" not in ref:
        return acc
    return acc + ref["bias"][layer, n].astype(jnp.float32)[:, None]


def _tile(ref, layer, m, problem: Problem, config: Config, interpret: bool, n):
    """Sums this program's part of K: float32 [BN, BM] for weight rows n and activation rows m."""
    block_k = config.block_k
    num_tiles = problem.in_features // block_k
    per_split = pl.cdiv(num_tiles, config.split_k)
    first = pl.program_id(2) * per_split
    last = jnp.minimum(first + per_split, num_tiles)
    operands = _operands(problem, block_k)
    one_group = problem.num_groups == 1
    post_scaled = config.scaling == "post"

    def scales(i):
        return [_group_values(ref, layer, n, i, operand, problem, config) for operand in operands]

    def body(i, carry):
        acc, current = carry
        # The next tile's scales are on their way while this tile is multiplied.
        following = current if one_group else scales(jnp.minimum(i + 1, num_tiles - 1))
        byte = i * (block_k * problem.bits // 8) + jnp.arange(
            block_k * problem.bits // 8, dtype=jnp.int32
        )
        codes = ref["w"][layer, n[:, None], byte[None, :]]
        products = jnp.zeros((config.block_n, config.block_m), jnp.float32)
        if not post_scaled or one_group:
            products = acc
        for operand, values in zip(operands, current, strict=True):
            weight = _dequantize(codes, operand, values, problem, config, interpret)
            columns = i * block_k + operand.columns()
            x = ref["x"][m[:, None], columns[None, :]]
            products = products + plt.dot(weight, x.T)
        if post_scaled and not one_group:
            products = acc + current[0]["scale"].astype(jnp.float32) * products
        return products, following

    zeros = jnp.zeros((config.block_n, config.block_m), jnp.float32)
    acc, final = lax.fori_loop(
        first, last, body, (zeros, scales(jnp.minimum(first, num_tiles - 1)))
    )
    if post_scaled and one_group:
        acc = acc * final[0]["scale"].astype(jnp.float32)
    return acc


@dataclass(frozen=True)
class _Operand:
    """One left operand made of a tile: its nibble, its columns of x, and its groups.

    `width` codes in `num_runs` runs of one group each; run r of tile i lies in group
    `(i * block_k + start + r * stride) // group_size`, counted in codes.
    """

    nibble: str
    width: int
    num_runs: int
    start: int
    stride: int
    half: int

    def columns(self):
        """The K indices of the codes, relative to the tile, in the order of its bytes."""
        j = jnp.arange(self.width, dtype=jnp.int32)
        if not self.half:
            return j
        half = jnp.int32(self.half)
        return lax.div(j, half) * (2 * self.half) + lax.rem(j, half) + self.start


def _operands(problem: Problem, block_k: int) -> list[_Operand]:
    group = problem.group_size if problem.num_groups > 1 else block_k
    if problem.bits == 8:
        return [_Operand("byte", block_k, max(1, block_k // group), 0, group, 0)]
    run = max(group, problem.span)  # codes of K, both nibbles, that share a run of bytes
    half = problem.span // 2
    return [
        _Operand(nibble, block_k // 2, max(1, block_k // run), start, run, half)
        for nibble, start in (("low", 0), ("high", half))
    ]


def _group_values(ref, layer, n, i, operand: _Operand, problem: Problem, config: Config):
    """Scale, zero and offset of the operand's runs in tile i: {name: [BN, num_runs]}."""
    code = i * config.block_k + operand.start + jnp.arange(operand.num_runs) * operand.stride
    if operand.num_runs == 1:
        code = i * config.block_k + operand.start
        group = (n, lax.div(jnp.int32(code), jnp.int32(problem.group_size)))
    else:
        code = code.astype(jnp.int32)
        group = (n[:, None], lax.div(code, jnp.int32(problem.group_size))[None, :])
    if problem.num_groups == 1:
        group = (n, 0)
    values = {
        name: ref[name][(layer, *group)] for name in ("scale", "zero", "offset") if name in ref
    }
    return {k: v[:, None] if v.ndim == 1 else v for k, v in values.items()}


def _dequantize(codes, operand: _Operand, values, problem: Problem, config: Config, interpret):
    """The operand [BN, width] in x's dtype: q - zero for "post", the weight itself for "pre"."""
    dtype = jnp.dtype(problem.x_dtype)
    spread = functools.partial(_spread, shape=(config.block_n, operand.width))
    native = not problem.has_offset and problem.scale_dtype == problem.x_dtype
    # With scales of 16 bits (128 + q) * scale is exact in float32; with wider ones a weight of 0
    # would not be.
    if (
        problem.bits == 4
        and config.scaling == "pre"
        and not native
        and problem.scale_dtype != "float32"
    ):
        scale = values["scale"].astype(jnp.float32)
        if problem.has_offset:
            least = values["offset"].astype(jnp.float32) - 128.0 * scale
        else:
            zero = values["zero"].astype(jnp.float32) if problem.has_zero else problem.implicit_zero
            least = -(128.0 + zero) * scale
        return _scale_codes(codes, spread(scale), spread(least), operand.nibble, dtype, interpret)
    base = 0 if problem.bits == 8 else _MAGIC[problem.x_dtype][1]
    if problem.has_zero:
        minus_zero = spread((-base - values["zero"].astype(jnp.float32)).astype(dtype))
    else:
        zero = 0 if problem.has_offset else problem.implicit_zero
        minus_zero = jnp.full((config.block_n, operand.width), -base - zero, dtype)
    if problem.bits == 8:
        q = codes.astype(dtype) + minus_zero
    else:
        q = _unpack(codes, minus_zero, operand.nibble, problem.x_dtype, interpret)
    if config.scaling == "post":
        return q
    if native:
        return _multiply(q, spread(values["scale"]), interpret)
    weight = q.astype(jnp.float32) * spread(values["scale"].astype(jnp.float32))
    if problem.has_offset:
        weight = weight + spread(values["offset"].astype(jnp.float32))
    return weight.astype(dtype)


def _spread(values, shape):
    """[BN, R] -> [BN, width]: each value over its run."""
    rows, width = shape
    runs = values.shape[1]
    if runs > 1:
        values = jnp.broadcast_to(values[:, :, None], (rows, runs, width // runs))
        return values.reshape(shape)
    return jnp.broadcast_to(values, shape)


def _unpack(codes, minus_zero, nibble: str, x_dtype: str, interpret: bool):
    """uint8 codes [BN, C] -> q - zero [BN, C] in the dtype named x_dtype, all steps exact.

    `minus_zero` is -(base + zero), like the result. Packed 16-bit arithmetic is written out (as
    fused multiply-adds, which every target has for both dtypes): left to the compiler, part of it
    was done one element at a time.
    """
    high_byte, _ = _MAGIC[x_dtype]
    dtype = jnp.dtype(x_dtype)
    if interpret:
        q = codes & 15 if nibble == "low" else codes >> 4
        biased = lax.bitcast_convert_type(q.astype(jnp.uint16) | (high_byte << 8), dtype)
        return biased + minus_zero
    [q] = plt.elementwise_inline_asm(
        unpack_assembly(nibble, x_dtype),
        args=[codes, minus_zero],
        constraints="=r,=r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )
    return q


def unpack_assembly(nibble: str, x_dtype: str) -> str:
    """PTX: four bytes ($2) and two pairs of -(base + zero) ($3, $4) to two pairs ($0, $1)."""
    high_byte, _ = _MAGIC[x_dtype]
    suffix, one, _ = _PACKED[x_dtype]
    shift = "" if nibble == "low" else "shr.u32 t, t, 4; "
    fill = f"{high_byte:#04x}" + f"{high_byte:02x}" * 3
    return (
        f"{{ .reg .b32 t, a, b; mov.b32 t, $2; {shift}and.b32 t, t, 0x0f0f0f0f; "
        f"prmt.b32 a, t, {fill}, 0x4140; prmt.b32 b, t, {fill}, 0x4342; "
        f"mov.b32 t, {one}; fma.rn.{suffix} $0, a, t, $3; fma.rn.{suffix} $1, b, t, $4; }}"
    )


def multiply_assembly(dtype: str) -> str:
    """PTX: the product ($0) of two pairs ($1, $2)."""
    suffix, _, minus_null = _PACKED[dtype]
    return f"{{ .reg .b32 n; mov.b32 n, {minus_null}; fma.rn.{suffix} $0, $1, $2, n; }}"


def _scale_codes(codes, scale, least, nibble: str, dtype, interpret: bool):
    """uint8 codes [BN, C] -> (128 + q) * scale + least [BN, C] rounded to dtype; float32 scales."""
    if interpret:
        q = codes & 15 if nibble == "low" else codes >> 4
        return ((128.0 + q.astype(jnp.float32)) * scale + least).astype(dtype)
    [weight] = plt.elementwise_inline_asm(
        scale_assembly(nibble, dtype.name),
        args=[codes, scale, least],
        constraints="=r,=r,r,f,f,f,f,f,f,f,f",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, dtype)],
    )
    return weight


def scale_assembly(nibble: str, dtype: str) -> str:
    """PTX: four bytes ($2), four scales ($3-$6) and least values ($7-$10) to two pairs ($0, $1)."""
    suffix, _, _ = _PACKED[dtype]
    shift = "" if nibble == "low" else "shr.u32 t, t, 4; "
    numbers = " ".join(
        f"prmt.b32 {r}, t, 0x43000000, 0x7{i}44; fma.rn.f32 {r}, {r}, ${3 + i}, ${7 + i};"
        for i, r in enumerate("abcd")
    )
    return (
        f"{{ .reg .b32 t, a, b, c, d; mov.b32 t, $2; {shift}and.b32 t, t, 0x0f0f0f0f; {numbers} "
        f"cvt.rn.{suffix}.f32 $0, b, a; cvt.rn.{suffix}.f32 $1, d, c; }}"
    )


def _multiply(q, scale, interpret: bool):
    """q * scale for two arrays of one 16-bit dtype, two elements an instruction."""
    if interpret:
        return q * scale
    [product] = plt.elementwise_inline_asm(
        multiply_assembly(q.dtype.name),
        args=[q, scale],
        constraints="=r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
    )
    return product


def _reduce_kernel(*refs, problem: Problem, split_k: int):
    """Program (m, c): adds the splits of _REDUCE_BLOCK columns of row m, in order."""
    partial_ref, *bias_refs, out_ref = refs
    m = pl.program_id(0)
    columns = problem.out_columns
    n = pl.program_id(1) * _REDUCE_BLOCK + jnp.arange(_REDUCE_BLOCK, dtype=jnp.int32)
    n_safe = n if columns % _REDUCE_BLOCK == 0 else jnp.minimum(n, columns - 1)

    def total(n):
        acc = partial_ref[0, m, n]
        for split in range(1, split_k):
            acc = acc + partial_ref[split, m, n]
        if bias_refs:
            layer_ref, bias_ref = bias_refs
            layer = layer_ref[0]
            acc = acc + bias_ref[layer, n].astype(jnp.float32)
        return acc

    y = total(n_safe)
    if problem.activation is not None:
        y = activate(y, problem.activation) * total(n_safe + columns)
    plt.store(out_ref.at[m, n], y.astype(out_ref.dtype), mask=n < columns)


def activate(gate, activation: str):
    """The gate's activation, of functions that lower."""
    if activation == "silu":
        return gate / (1 + jnp.exp(-gate))
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1 + jnp.exp(-2 * inner))


def _is_power(value: int) -> bool:
    return value & (value - 1) == 0
