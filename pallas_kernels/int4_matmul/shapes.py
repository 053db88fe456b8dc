"""The cases that tests, benchmarks and compile checks of int4_matmul share, and their arrays."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packing


@dataclass(frozen=True)
class Case:
    """One call: rows M, outputs N (gate and up together where gated), inputs K, and its options.

    `zero_kind` is "zero" (integer zero points), "offset" (floats) or "implicit"; `num_layers` 0 for
    a plain matrix, else the length of the stack of which the last layer is used.
    """

    M: int
    N: int
    K: int
    group_size: int = 128
    bits: int = 4
    span: int = 32
    zero_kind: str = "zero"
    x_dtype: str = "bfloat16"
    scale_dtype: str = "bfloat16"
    gate_activation: str | None = None
    bias: bool = False
    num_layers: int = 0


# Matrices (name, N, K) of the models we ship configurations for. Fused: q, k and v; gate and up.
LLAMA3_8B = (
    ("qkv", 6144, 4096),
    ("q", 4096, 4096),
    ("kv", 1024, 4096),
    ("o", 4096, 4096),
    ("gate_up", 28672, 4096),
    ("gate", 14336, 4096),
    ("down", 4096, 14336),
    ("lm_head", 128256, 4096),
)
SMOLLM2_135M = (
    ("qkv", 960, 576),
    ("q", 576, 576),
    ("kv", 192, 576),
    ("o", 576, 576),
    ("gate_up", 3072, 576),
    ("gate", 1536, 576),
    ("down", 576, 1536),
    ("lm_head", 49152, 576),
)
# How each model's weights are usually quantised: (bits, group_size, zero_kind, scale_dtype).
LLAMA3_FORMATS = ((4, 128, "zero", "float16"), (4, 32, "offset", "float16"))
SMOLLM2_FORMATS = ((4, 32, "offset", "float16"), (4, 64, "zero", "float16"))
MODEL_ROWS = (1, 16, 32, 64, 512)

# Every edge of the kernel once: row counts around the tile sizes, ...
ROWS = (1, 7, 9, 16, 17, 33, 64, 65, 129)
# ... output counts around the tile sizes, ...
OUTPUTS = (1, 63, 64, 65, 192, 576)
EDGES = (
    *(Case(M, 65, 128) for M in ROWS),
    *(Case(3, N, 256, 64) for N in OUTPUTS),
    # ... groups and K, among them the small model's 576 = 18 x 32 and one group per output, ...
    Case(2, 64, 32, 32),
    Case(5, 64, 576, 64),
    Case(5, 64, 576, 32, zero_kind="offset"),
    Case(5, 64, 640, 128),
    Case(5, 48, 576, -1, zero_kind="implicit"),
    Case(70, 48, 96, -1),
    Case(20, 80, 544, 32),
    Case(4, 64, 4096, 128),
    # ... spans, kinds of zero, dtypes, 8 bits, gates, bias and stacks.
    Case(9, 64, 256, 32, span=64),
    Case(9, 64, 256, 32, span=64, zero_kind="offset", x_dtype="float16"),
    Case(9, 64, 256, 128, span=64, x_dtype="float16", scale_dtype="float16"),
    Case(40, 64, 256, 32, zero_kind="offset", scale_dtype="float16"),
    Case(66, 64, 256, 64, scale_dtype="float32"),
    Case(6, 64, 256, 64, bits=8),
    Case(6, 64, 192, -1, bits=8, zero_kind="implicit"),
    Case(6, 64, 256, 32, bits=8, x_dtype="float16"),
    Case(3, 130, 256, 64, gate_activation="silu", bias=True),
    Case(67, 66, 128, 64, gate_activation="gelu_tanh", zero_kind="offset"),
    Case(3, 64, 2048, 128, gate_activation="silu", num_layers=2, bias=True),
    Case(5, 64, 1024, 64, bias=True, num_layers=3),
)
# Minutes in interpret mode, and more row counts of kinds that are above.
SLOW_EDGES = (
    *(Case(M, 65, 128) for M in (2, 8, 15, 31, 63, 127)),
    Case(16, 4097, 4096),
    Case(16, 64, 14336),
    Case(8191, 64, 128),
    Case(129, 4096, 576, 64),
    Case(1, 49152, 576, 32, zero_kind="offset"),
)


def arguments(case: Case, seed: int = 0) -> tuple[tuple, dict]:
    """(positional, keyword) arguments of `int4_matmul` with random values, as numpy arrays."""
    rng = np.random.default_rng(seed)
    lead = (case.num_layers,) if case.num_layers else ()
    group = case.K if case.group_size == -1 else case.group_size
    per_group = (*lead, case.N, case.K // group)
    if case.bits == 4:
        codes = rng.integers(0, 16, (*lead, case.N, case.K), dtype=np.uint8)
        packed = packing.pack_int4(codes, case.span)
        zeros = rng.integers(-1, 17, per_group).astype(np.int16)
    else:
        packed = rng.integers(-128, 128, (*lead, case.N, case.K)).astype(np.int8)
        zeros = rng.integers(-100, 100, per_group).astype(np.int16)
    scale = rng.uniform(0.5, 1.5, per_group) / (8 if case.bits == 4 else 128)
    keyword: dict = dict(
        bits=case.bits,
        group_size=case.group_size,
        span=case.span,
        gate_activation=case.gate_activation,
    )
    if case.zero_kind == "zero":
        keyword["zero"] = zeros
    elif case.zero_kind == "offset":
        keyword["offset"] = rng.normal(size=per_group).astype(jnp.dtype(case.scale_dtype))
    else:
        keyword["implicit_zero"] = 8 if case.bits == 4 else 0
    if case.bias:
        keyword["bias"] = rng.normal(size=(*lead, case.N)).astype(np.float32)
    if case.num_layers:
        keyword["layer"] = np.int32(case.num_layers - 1)
    x = rng.normal(size=(case.M, case.K)).astype(jnp.dtype(case.x_dtype))
    return (x, packed, scale.astype(jnp.dtype(case.scale_dtype))), keyword


def abstract_arguments(case: Case, sharding=None) -> tuple[tuple, dict]:
    """The same without values: ShapeDtypeStructs, on `sharding` where given."""
    lead = (case.num_layers,) if case.num_layers else ()
    group = case.K if case.group_size == -1 else case.group_size
    per_group = (*lead, case.N, case.K // group)

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    keyword: dict = dict(
        bits=case.bits,
        group_size=case.group_size,
        span=case.span,
        gate_activation=case.gate_activation,
    )
    if case.zero_kind == "zero":
        keyword["zero"] = struct(per_group, "int16")
    elif case.zero_kind == "offset":
        keyword["offset"] = struct(per_group, case.scale_dtype)
    else:
        keyword["implicit_zero"] = 8 if case.bits == 4 else 0
    if case.bias:
        keyword["bias"] = struct((*lead, case.N), "float32")
    if case.num_layers:
        keyword["layer"] = struct((), "int32")
    packed = struct((*lead, case.N, case.K * case.bits // 8), "uint8" if case.bits == 4 else "int8")
    return (struct((case.M, case.K), case.x_dtype), packed, struct(per_group, case.scale_dtype)), (
        keyword
    )
