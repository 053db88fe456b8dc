"""paged_attention as a Pallas-Triton kernel: one body for decode, verify and chunked prefill.

A program computes one KV head's group of query heads for a block of one row's query tokens, over
one split of the row's keys: rows of its tiles are (token, head) pairs, so a KV tile is read once
for the whole group. Tiles of keys are gathered through the block table, word by word, and taken
apart in
registers: the planar words of an 8-bit pool hold elements d and d + H/2, so a tile of words is two
operands, each multiplied with its half of q (keys) or giving its half of the output (values). A
value tile is transposed 16 bits at a time, which tensor-core loads can do and 8-bit ones cannot.

Decoding to float16 (its 11 bits hold every 8-bit format exactly), two elements a register:

    E4M3  bit form: shifted into place it reads as value / 256; the 256 goes into the scores' and
          the output's scale. Or the conversion instruction of compute capability 8.9 on ("cvt").
    E5M2  the high byte of a float16.
    INT8  0x6400 | (q + 128) is 1152 + q in float16; subtracting 1152 is exact.

Softmax is in base 2 and float32 with running maximum and sum. Masked scores are a finite -1e30,
below the maximum's start of -1e29, so their weight is an exact 0; values of masked slots are not
loaded (read as 0), so that NaN in unwritten slots cannot meet a zero weight.

With few programs, each row's keys are split between several; a second kernel joins the parts in a
fixed order.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.cost import Cost
from pallas_kernels.paged_attention.problem import Problem
from pallas_kernels.triton_call import triton_call

_MASKED = -1e30
_START = -1e29
_LOG2E = math.log2(math.e)
FP8_DECODES = ("bits", "cvt")


@dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block_q: query tokens of a row a program takes.
      block_s: keys a loop iteration reads, a power of two >= 16.
      num_splits: programs that share a row's keys.
      fp8_decode: "bits" or "cvt" (E4M3 only; "cvt" needs compute capability 8.9).
      num_warps, num_stages: see `triton_call`.
    """

    block_q: int
    block_s: int
    num_splits: int
    fp8_decode: str
    num_warps: int
    num_stages: int


def unsupported(problem: Problem) -> str | None:
    """Why the kernel cannot serve `problem` on any device, or None."""
    if problem.kv_dtype == "float32" or problem.q_dtype == "float32":
        return "float32 is the reference mode; the kernel multiplies 16-bit operands"
    if problem.kv_dtype == "bfloat16" and problem.q_dtype == "float16":
        return "float16 queries would be rounded to the bfloat16 of the pool"
    if problem.head_dim > 256:
        return f"head_dim={problem.head_dim}: a program's accumulator holds at most 256"
    return None


def check_config(problem: Problem, config: Config) -> None:
    """Raises ValueError where `config` cannot cut `problem`."""
    rules = {
        "block_q is at least 1": config.block_q >= 1,
        "block_s is a power of two >= 16": config.block_s >= 16
        and config.block_s & (config.block_s - 1) == 0,
        "num_splits is at least 1": config.num_splits >= 1,
        f"fp8_decode is one of {FP8_DECODES}": config.fp8_decode in FP8_DECODES,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ValueError(f"{config} cannot cut {problem}: violates '{rule}'")


# Traced and lowered once for all layers of a model.
@functools.partial(jax.jit, static_argnames=("problem", "config", "cost", "interpret"))
def attention(
    q_TNH, k_pool, v_pool, block_table_BM, context_len_B, query_start_B, query_len_B,
    k_scale_K, v_scale_K, block_offset, tree_mask_BJJ, problem: Problem, config: Config,
    cost: Cost, interpret: bool,
):  # fmt: skip
    """See `api.paged_attention`. Returns [T, N, H]; tokens of no row are zeros."""
    check_config(problem, config)
    arrays = dict(
        q=q_TNH,
        k=k_pool,
        v=v_pool,
        table=block_table_BM,
        context_len=context_len_B,
        query_start=query_start_B,
        query_len=query_len_B,
        offset=jnp.asarray(block_offset, jnp.int32).reshape(1),
    )
    if k_scale_K is not None:
        arrays["k_scale"] = k_scale_K.astype(jnp.float32)
    if v_scale_K is not None:
        arrays["v_scale"] = v_scale_K.astype(jnp.float32)
    if tree_mask_BJJ is not None:
        arrays["tree"] = tree_bits(tree_mask_BJJ)
    T, N, H = q_TNH.shape
    S = config.num_splits
    blocks_of_q = pl.cdiv(problem.max_query_len, config.block_q)
    out_shape = jax.ShapeDtypeStruct((T, N, H), q_TNH.dtype)
    part_shape = [
        jax.ShapeDtypeStruct((S, T, N, H), jnp.float32),
        jax.ShapeDtypeStruct((S, T, N), jnp.float32),
        jax.ShapeDtypeStruct((S, T, N), jnp.float32),
    ]
    result = triton_call(
        functools.partial(
            _attention_kernel, names=tuple(arrays), problem=problem, config=config,
            blocks_of_q=blocks_of_q, interpret=interpret,
        ),
        list(arrays.values()),
        name=f"paged_attention_{problem.kv_dtype}",
        grid=(problem.num_rows * blocks_of_q, problem.num_kv_heads, S),
        out_shape=out_shape if S == 1 else part_shape,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        bytes_accessed=cost.bytes_moved,
        flops=cost.flops,
    )  # fmt: skip
    if S == 1:
        token = jnp.arange(T, dtype=jnp.int32)[:, None]
        of_a_row = jnp.any((token >= query_start_B) & (token < query_start_B + query_len_B), axis=1)
        return jnp.where(of_a_row[:, None, None], result, 0)
    return triton_call(
        functools.partial(_join_kernel, num_splits=S, head_dim=H),
        [*result, query_start_B, query_len_B],
        name="paged_attention_join",
        grid=(T, N),
        out_shape=out_shape,
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        bytes_accessed=result[0].size * 4 + cost.bytes_written,
        flops=2 * result[0].size,
    )


def tree_bits(tree_mask_BJJ) -> jax.Array:
    """bool [B, J, J] -> int32 [B, J]: bit j of entry (b, i): query i sees new token j."""
    J = tree_mask_BJJ.shape[-1]
    weights = jnp.left_shift(jnp.uint32(1), jnp.arange(J, dtype=jnp.uint32))
    bits = jnp.sum(jnp.where(tree_mask_BJJ, weights, 0), axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(bits, jnp.int32)


@dataclass(frozen=True)
class _Chunk:
    """A power-of-two run of words of a token: words start .. start + width - 1 of which `valid`."""

    start: int
    width: int
    valid: int


def chunks(words_per_token: int) -> list[_Chunk]:
    """Cuts a token's words into powers of two >= 16 (a tensor-core step), the last one padded."""
    found = []
    start = 0
    while start < words_per_token:
        rest = words_per_token - start
        width = max(16, 1 << (rest.bit_length() - 1))
        found.append(_Chunk(start, width, min(width, rest)))
        start += width
    return found


def rows_of(problem: Problem, block_q: int) -> int:
    """Rows of a program's tiles: (token, head) pairs padded to a power of two >= 16."""
    return max(16, 1 << (block_q * problem.group - 1).bit_length())


def _attention_kernel(
    *refs, names, problem: Problem, config: Config, blocks_of_q: int, interpret: bool
):
    """Program (row and block of queries, KV head, split)."""
    num_inputs = len(names)
    ref = dict(zip(names, refs[:num_inputs], strict=True))
    outputs = refs[num_inputs:]
    fmt = problem.format
    G, H = problem.group, problem.head_dim
    R, S = rows_of(problem, config.block_q), config.block_s
    planes = 2 if fmt.bits == 8 else 1
    word_chunks = chunks(fmt.words_per_token(H))
    dtype = jnp.bfloat16 if problem.kv_dtype == "bfloat16" else jnp.float16

    b = lax.div(pl.program_id(0), jnp.int32(blocks_of_q))
    head = pl.program_id(1)
    query_len = ref["query_len"][b]
    context_len = jnp.minimum(ref["context_len"][b], problem.max_context)
    first_query = lax.rem(pl.program_id(0), jnp.int32(blocks_of_q)) * config.block_q

    r = jnp.arange(R, dtype=jnp.int32)
    query = first_query + lax.div(r, jnp.int32(G))  # index within the row's queries
    live = (query < query_len) & (r < config.block_q * G)
    # Dead rows keep a place of their own: interpreted, a masked store rewrites what it finds there.
    token = ref["query_start"][b] + query
    q_head = head * G + lax.rem(r, jnp.int32(G))
    position = jnp.where(live, context_len - query_len + query, -1)
    first_new = context_len - query_len

    # q is scaled by a power of two only, which is exact; the rest of the scale meets the scores.
    exponent = round(math.log2(problem.softmax_scale))
    q_chunks = []
    for chunk in word_chunks:
        d = jnp.arange(chunk.width, dtype=jnp.int32)
        inside = live[:, None] & (d < chunk.valid)[None, :]
        for plane in range(planes):
            column = chunk.start + d + plane * (H // 2)
            where = (token[:, None], q_head[:, None], column[None, :])
            q = plt.load(ref["q"].at[where], mask=inside, other=0).astype(jnp.float32)
            q = jnp.clip(q * 2.0**exponent, -65504.0, 65504.0)
            q_chunks.append(q.astype(dtype))

    decode = functools.partial(_decode, problem=problem, config=config, interpret=interpret)
    bias = 256.0 if _biased(problem, config) else 1.0
    score_scale = problem.softmax_scale / 2.0**exponent * bias
    if "k_scale" in ref:
        score_scale = score_scale * ref["k_scale"][head]
    out_scale = bias * ref["v_scale"][head] if "v_scale" in ref else bias
    tree_bits_R = None
    if problem.has_tree:
        tree_bits_R = plt.load(ref["tree"].at[b, query], mask=live, other=0)

    # The keys this block of queries can see, [low, high), in tiles, and this split's share of them.
    last_query = jnp.minimum(first_query + config.block_q, query_len) - 1
    high = jnp.where(first_query < query_len, first_new + last_query + 1, 0)
    low = jnp.int32(0)
    if problem.sliding_window is not None:
        low = jnp.maximum(first_new + first_query - (problem.sliding_window - 1), 0)
    first_tile = lax.div(low, jnp.int32(S))
    num_tiles = jnp.maximum(pl.cdiv(high, S) - first_tile, 0)
    per_split = pl.cdiv(num_tiles, config.num_splits)
    start = first_tile + jnp.minimum(pl.program_id(2) * per_split, num_tiles)
    stop = first_tile + jnp.minimum((pl.program_id(2) + 1) * per_split, num_tiles)
    tokens_per_block = jnp.int32(fmt.tokens_per_block)
    words_per_token = fmt.words_per_token(H)
    offset = ref["offset"][0]

    def blocks_at(i):
        """The pool blocks of tile i's keys."""
        s = i * S + jnp.arange(S, dtype=jnp.int32)
        held = (s >= low) & (s < high)
        entry = lax.div(s, tokens_per_block)
        block = plt.load(ref["table"].at[b, entry], mask=held, other=0)
        return jnp.where(held, block + offset, 0)

    def load(pool, block, s, held, chunk):
        d = jnp.arange(chunk.width, dtype=jnp.int32)
        word = lax.rem(s, tokens_per_block) * words_per_token + chunk.start
        mask = held[:, None] & (d < chunk.valid)[None, :]
        where = (block[:, None], head, word[:, None] + d[None, :])
        return plt.load(pool.at[where], mask=mask, other=0)

    def body(i, carry):
        accs, largest, total, block = carry
        following = blocks_at(i + 1)
        s = i * S + jnp.arange(S, dtype=jnp.int32)
        held = (s >= low) & (s < high)
        scores = jnp.zeros((R, S), jnp.float32)
        for c, chunk in enumerate(word_chunks):
            words = load(ref["k"], block, s, held, chunk)
            for plane in range(planes):
                scores = scores + plt.dot(q_chunks[c * planes + plane], decode(words, plane).T)
        if problem.soft_cap is None:
            scores = scores * (score_scale * _LOG2E)
        else:
            capped = _tanh(scores * (score_scale / problem.soft_cap))
            scores = capped * (problem.soft_cap * _LOG2E)
        visible = s[None, :] <= position[:, None]
        if problem.sliding_window is not None:
            visible &= s[None, :] > position[:, None] - problem.sliding_window
        if tree_bits_R is not None:
            new = s - first_new
            shift = jnp.clip(new, 0, 31)[None, :]
            ancestor = (lax.shift_right_logical(
                jnp.broadcast_to(tree_bits_R[:, None], (R, S)), jnp.broadcast_to(shift, (R, S))
            ) & 1) == 1  # fmt: skip
            visible &= (new < 0)[None, :] | ancestor
        scores = jnp.where(visible, scores, _MASKED)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        rescale = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(scores - new_largest[:, None])
        total = total * rescale + jnp.sum(weights, axis=1)
        weights = weights.astype(dtype)
        new_accs = []
        for c, chunk in enumerate(word_chunks):
            words = load(ref["v"], block, s, held, chunk)
            for plane in range(planes):
                acc = accs[c * planes + plane] * rescale[:, None]
                new_accs.append(acc + plt.dot(weights, decode(words, plane)))
        return tuple(new_accs), new_largest, total, following

    accs, largest, total, _ = lax.fori_loop(
        start,
        stop,
        body,
        (
            tuple(jnp.zeros((R, c.width), jnp.float32) for c in word_chunks for _ in range(planes)),
            jnp.full((R,), _START, jnp.float32),
            jnp.zeros((R,), jnp.float32),
            blocks_at(start),
        ),
    )
    split = pl.program_id(2)
    if config.num_splits == 1:
        out_scale = out_scale / jnp.where(total > 0, total, 1.0)
        out_scale = out_scale[:, None]
    for c, chunk in enumerate(word_chunks):
        d = jnp.arange(chunk.width, dtype=jnp.int32)
        mask = live[:, None] & (d < chunk.valid)[None, :]
        for plane in range(planes):
            column = chunk.start + d + plane * (H // 2)
            where = (token[:, None], q_head[:, None], column[None, :])
            if config.num_splits > 1:
                where = (split, *where)
            values = accs[c * planes + plane] * out_scale
            plt.store(outputs[0].at[where], values.astype(outputs[0].dtype), mask=mask)
    if config.num_splits > 1:
        plt.store(outputs[1].at[split, token, q_head], largest, mask=live)
        plt.store(outputs[2].at[split, token, q_head], total, mask=live)


def _join_kernel(
    part_ref,
    largest_ref,
    total_ref,
    query_start_ref,
    query_len_ref,
    out_ref,
    *,
    num_splits,
    head_dim,
):
    """Program (token, head): joins the splits' parts, whose maxima and sums differ."""
    t, n = pl.program_id(0), pl.program_id(1)
    width = 1 << (head_dim - 1).bit_length()
    d = jnp.arange(width, dtype=jnp.int32)
    inside = d < head_dim
    largest = largest_ref[0, t, n]
    for split in range(1, num_splits):
        largest = jnp.maximum(largest, largest_ref[split, t, n])
    acc = jnp.zeros((width,), jnp.float32)
    total = jnp.float32(0)
    for split in range(num_splits):
        weight = jnp.exp2(largest_ref[split, t, n] - largest)
        part = plt.load(part_ref.at[split, t, n, d], mask=inside, other=0)
        acc = acc + weight * part
        total = total + weight * total_ref[split, t, n]
    # Parts of a token that no row has were never written.
    num_rows = query_len_ref.shape[0]
    b = jnp.arange(1 << (num_rows - 1).bit_length(), dtype=jnp.int32)
    start = plt.load(query_start_ref.at[b], mask=b < num_rows, other=0)
    end = start + plt.load(query_len_ref.at[b], mask=b < num_rows, other=0)
    covered = jnp.sum(((t >= start) & (t < end)).astype(jnp.int32)) > 0
    out = jnp.where(covered & (total != 0), acc / jnp.where(total != 0, total, 1.0), 0)
    plt.store(out_ref.at[t, n, d], out.astype(out_ref.dtype), mask=inside)


def _biased(problem: Problem, config: Config) -> bool:
    """Whether decoded values are the true ones / 256."""
    return problem.kv_dtype == "fp8_e4m3" and config.fp8_decode == "bits"


def _tanh(x):
    """tanh of functions that lower: 1 - 2 / (1 + e^2x), whose limits are right for any x."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * _LOG2E)))


def _decode(words, plane: int, problem: Problem, config: Config, interpret: bool):
    """uint16 words -> the 16-bit floats of their low (plane 0) or high (plane 1) elements."""
    kv_dtype = problem.kv_dtype
    if problem.format.bits == 16:
        return lax.bitcast_convert_type(words, jnp.dtype(kv_dtype))
    if interpret:
        return _decode_jnp(words, plane, kv_dtype, config.fp8_decode)
    [values] = plt.elementwise_inline_asm(
        decode_assembly(kv_dtype, plane, config.fp8_decode),
        args=[words],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.float16)],
    )
    return values


def decode_assembly(kv_dtype: str, plane: int, fp8_decode: str) -> str:
    """PTX: two words ($1) to the pair ($0) of float16 of their low or high elements."""
    # $1 holds two words. Byte i of a word pair: 0 and 2 are low, 1 and 3 high elements.
    if kv_dtype == "fp8_e5m2":
        return ("prmt.b32 $0, $1, 0, 0x2404;", "and.b32 $0, $1, 0xff00ff00;")[plane]
    if kv_dtype == "int8":
        pick = ("0x4240", "0x4341")[plane]
        return (
            f"{{ .reg .b32 t, o, n; xor.b32 t, $1, 0x80808080; prmt.b32 t, t, 0x64646464, {pick}; "
            "mov.b32 o, 0x3c003c00; mov.b32 n, 0xe480e480; fma.rn.f16x2 $0, t, o, n; }"
        )
    if fp8_decode == "cvt":
        pick = ("0x4420", "0x4431")[plane]
        return (
            f"{{ .reg .b32 t; .reg .b16 c, z; prmt.b32 t, $1, 0, {pick}; "
            "mov.b32 {c, z}, t; cvt.rn.f16x2.e4m3x2 $0, c; }"
        )
    align = ("prmt.b32 t, $1, 0, 0x2404;", "mov.b32 t, $1;")[plane]
    return (
        f"{{ .reg .b32 t, s; {align} shr.u32 s, t, 1; and.b32 s, s, 0x3f803f80; "
        "lop3.b32 $0, t, 0x80008000, s, 0xea; }"
    )


def _decode_jnp(words, plane: int, kv_dtype: str, fp8_decode: str):
    """The same in jnp, for interpreting."""
    code = words & 0xFF if plane == 0 else words >> 8
    if kv_dtype == "int8":
        biased = lax.bitcast_convert_type((code ^ 0x80) | 0x6400, jnp.float16)
        return biased - jnp.float16(1152)
    if kv_dtype == "fp8_e5m2":
        return lax.bitcast_convert_type(code << 8, jnp.float16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)
    value = lax.bitcast_convert_type(bits, jnp.float16)
    return value if fp8_decode == "bits" else value * jnp.float16(256)
