"""The cases that tests, benchmarks and compile checks of paged_attention share."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_format import format_of, pool_shape, to_words


@dataclass(frozen=True)
class Case:
    """One call: K KV heads of H dimensions, G query heads each, one (context, queries) pair a row.

    `max_blocks` 0 makes the table just wide enough; `tree` adds a random tree mask.
    """

    K: int
    G: int
    H: int
    rows: tuple[tuple[int, int], ...]
    kv_dtype: str = "fp8_e4m3"
    q_dtype: str = "bfloat16"
    scales: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    tree: bool = False
    max_blocks: int = 0

    @property
    def max_query_len(self) -> int:
        return max(1, *(queries for _, queries in self.rows))

    @property
    def num_tokens(self) -> int:
        return sum(queries for _, queries in self.rows)

    @property
    def table_width(self) -> int:
        tokens = format_of(self.kv_dtype).tokens_per_block
        return self.max_blocks or max(1, *(-(-context // tokens) for context, _ in self.rows))


# Models: (name, KV heads, query heads per KV head, head_dim).
LLAMA3_8B = ("llama3-8b", 8, 4, 128)
SMOLLM2_135M = ("smollm2-135m", 3, 3, 64)
MODELS = (LLAMA3_8B, SMOLLM2_135M)
DECODE_BATCHES = (1, 8, 64)
DECODE_CONTEXTS = (1024, 4096, 8192, 32768)
VERIFY_TOKENS = 5
PREFILL_CHUNK = 512

LENGTHS = (0, 1, 15, 16, 17, 31, 32, 127, 128, 129, 255, 256, 257)


def _decode(lengths):
    return tuple((length, 1 if length else 0) for length in lengths)


EDGES = (
    # Every residue of the last block, an empty row among them; each format.
    *(Case(2, 3, 64, _decode(LENGTHS), kv_dtype=d) for d in ("fp8_e4m3", "fp8_e5m2", "int8")),
    Case(2, 4, 64, _decode(LENGTHS), kv_dtype="bfloat16", scales=False),
    Case(2, 4, 64, _decode(LENGTHS), kv_dtype="float16", q_dtype="float16"),
    Case(2, 4, 64, _decode(LENGTHS[:6]), kv_dtype="float16", scales=False),
    # Ratios of heads, among them 9 over 3; one KV head and eight.
    Case(3, 3, 64, _decode((33, 128))),
    Case(1, 1, 64, _decode((33, 0))),
    Case(1, 7, 64, _decode((40,))),
    Case(8, 8, 64, _decode((40,))),
    # Head dimensions, those that are no power of two in both widths.
    *(Case(1, 2, H, _decode((45, 16))) for H in (16, 80, 96, 128, 256)),
    *(Case(1, 2, H, _decode((45, 16)), kv_dtype="bfloat16") for H in (96, 256)),
    # Verification and chunked prefill, ragged, with rows that take no part.
    Case(2, 3, 64, ((37, 5), (5, 5), (0, 0), (130, 5))),
    Case(3, 3, 64, ((64, 2), (20, 0), (17, 17), (100, 33)), kv_dtype="int8"),
    Case(2, 4, 64, ((150, 33), (16, 16), (70, 1)), kv_dtype="bfloat16"),
    Case(1, 4, 128, ((90, 70), (40, 0), (33, 20))),
    # Windows at and around block and tile edges, soft cap, trees.
    *(Case(1, 2, 64, ((100, 1), (7, 3), (65, 5)), sliding_window=w) for w in (1, 16, 17)),
    *(Case(1, 2, 64, ((100, 4), (64, 1)), sliding_window=w) for w in (63, 1000)),
    Case(1, 2, 64, ((150, 40),), sliding_window=20, kv_dtype="bfloat16"),
    Case(2, 3, 64, ((60, 5), (9, 2)), soft_cap=5.0),
    Case(2, 3, 64, ((60, 9), (12, 6), (9, 9)), tree=True),
    # Contexts of several hundred keys, with what masks some of them.
    Case(1, 2, 64, ((530, 5), (30, 2), (257, 1)), tree=True),
    Case(1, 2, 64, ((530, 20), (300, 1)), sliding_window=290, kv_dtype="bfloat16"),
    # A table much wider than any row.
    Case(2, 3, 64, ((37, 1), (20, 1)), max_blocks=40),
)
# Long contexts, and more of kinds that are above.
SLOW_EDGES = (
    Case(1, 2, 80, _decode((45, 16)), kv_dtype="bfloat16"),
    Case(1, 2, 64, ((100, 1), (7, 3), (65, 5)), sliding_window=15),
    *(Case(1, 2, 64, ((100, 4), (64, 1)), sliding_window=w) for w in (64, 65)),
    Case(2, 4, 128, _decode((4095, 257))),
    Case(3, 3, 64, _decode((4095, 1, 0, 4096)), kv_dtype="bfloat16"),
    Case(1, 4, 128, ((512, 300), (300, 212)), kv_dtype="fp8_e5m2"),
)


def arguments(case: Case, seed: int = 0, poison: bool = True) -> tuple[tuple, dict]:
    """(positional, keyword) arguments of `paged_attention` with random values, as numpy arrays.

    Blocks are shuffled over the pool. With `poison`, whatever no row may read is filled with NaN
    (FP8: the NaN codes; INT8: -128), unused table entries with -1, INT_MAX or a block id too large.
    """
    rng = np.random.default_rng(seed)
    fmt = format_of(case.kv_dtype)
    words = fmt.words_per_token(case.H)
    B, M = len(case.rows), case.table_width
    needed = [-(-context // fmt.tokens_per_block) for context, _ in case.rows]
    num_blocks = sum(needed) + 3
    ids = iter(rng.permutation(num_blocks))
    table = rng.choice([-1, 2**31 - 1, num_blocks], (B, M)).astype(np.int32)
    if not poison:
        table[:] = -1
    pools = []
    for _ in range(2):
        pools.append(
            np.full(pool_shape(num_blocks, case.K, case.H), _poison(case.kv_dtype), np.uint16)
            if poison
            else np.zeros(pool_shape(num_blocks, case.K, case.H), np.uint16)
        )
    for b, (context, _) in enumerate(case.rows):
        for m in range(needed[b]):
            block = next(ids)
            table[b, m] = block
            tokens = min(fmt.tokens_per_block, context - m * fmt.tokens_per_block)
            for pool in pools:
                values = rng.normal(size=(case.K, tokens, case.H))
                values = values * (40 if case.kv_dtype == "int8" else 1)
                stored = np.asarray(to_words(jnp.asarray(values, jnp.float32), case.kv_dtype))
                pool[block, :, : tokens * words] = stored.reshape(case.K, tokens * words)
    q_dtype = jnp.dtype(case.q_dtype)
    q = rng.normal(size=(case.num_tokens, case.K * case.G, case.H)).astype(q_dtype)
    lengths = np.array(case.rows, np.int32).reshape(B, 2)
    starts = np.concatenate([[0], np.cumsum(lengths[:, 1])[:-1]]).astype(np.int32)
    keyword: dict = dict(
        kv_dtype=case.kv_dtype,
        max_query_len=case.max_query_len,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
    )
    if case.scales:
        unit = 1 / 40 if case.kv_dtype == "int8" else 1.0
        keyword["k_scale_K"] = (unit * rng.uniform(0.5, 2, case.K)).astype(np.float32)
        keyword["v_scale_K"] = (unit * rng.uniform(0.5, 2, case.K)).astype(np.float32)
    if case.tree:
        J = case.max_query_len + 1
        keyword["tree_mask_BJJ"] = (rng.random((B, J, J)) < 0.4) | np.eye(J, dtype=bool)
    positional = (q, *pools, table, lengths[:, 0].copy(), starts, lengths[:, 1].copy())
    return positional, keyword


def abstract_arguments(case: Case, sharding=None, num_blocks: int = 0) -> tuple[tuple, dict]:
    """The same without values: ShapeDtypeStructs, on `sharding` where given."""

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    B = len(case.rows)
    pool = struct(pool_shape(num_blocks or B * case.table_width, case.K, case.H), "uint16")
    positional = (
        struct((case.num_tokens, case.K * case.G, case.H), case.q_dtype),
        pool,
        pool,
        struct((B, case.table_width), "int32"),
        *(struct((B,), "int32") for _ in range(3)),
    )
    keyword: dict = dict(
        kv_dtype=case.kv_dtype,
        max_query_len=case.max_query_len,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
    )
    if case.scales:
        keyword["k_scale_K"] = keyword["v_scale_K"] = struct((case.K,), "float32")
    if case.tree:
        J = case.max_query_len + 1
        keyword["tree_mask_BJJ"] = struct((B, J, J), "bool")
    return positional, keyword


def _poison(kv_dtype: str) -> int:
    return {
        "fp8_e4m3": 0xFF7F,
        "fp8_e5m2": 0xFF7F,
        "int8": 0x8080,
        "bfloat16": 0x7FC0,
        "float16": 0x7E00,
        "float32": 0x7FC0,
    }[kv_dtype]
