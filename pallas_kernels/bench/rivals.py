"""What else could do the same work? Each rival of a case as (name, function, arguments).

A rival that is not installed, or that refuses the shape, is left out and named.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench.timing import SAMPLES, num_copies
from pallas_kernels.int4_matmul.shapes import Case as MatmulCase
from pallas_kernels.paged_attention.shapes import Case as AttentionCase


def of_matmul(case: MatmulCase) -> list[tuple[str, Any, tuple]]:
    """bf16 `jnp.dot` (cuBLAS) on an unquantised weight, and XLA's own int4 product."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(case.M, case.K)), jnp.bfloat16)
    dense_KN = jnp.asarray(rng.normal(size=(case.K, case.N)), jnp.bfloat16)
    codes_KN = jnp.asarray(rng.integers(-8, 8, (case.K, case.N)), jnp.int4)
    scale_N = jnp.ones(case.N, jnp.bfloat16)
    dot = jax.jit(lambda x, w: jnp.dot(x, w, preferred_element_type=jnp.bfloat16))
    int4 = jax.jit(lambda x, w, s: jnp.dot(x, w.astype(jnp.bfloat16)) * s)
    return [
        ("jnp.dot bf16", dot, (x, dense_KN)),
        ("XLA int4 dot", int4, (x, codes_KN, scale_N)),
    ]


def of_attention(case: AttentionCase) -> list[tuple[str, Any, tuple]]:
    """JAX's shipped paged attention, on bf16 pages of 16 tokens."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    B, context = len(case.rows), max(context for context, _ in case.rows)
    pages_per_row = -(-context // 16)
    rng = np.random.default_rng(0)
    pages = (case.K, B * pages_per_row, 16, case.H)
    q = jnp.asarray(rng.normal(size=(B, case.K * case.G, case.H)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=pages), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(pages[1]).reshape(B, -1), jnp.int32)
    lengths = jnp.full((B,), context, jnp.int32)
    shipped = jax.jit(lambda q, k, v, t, n: paged_attention(q, k, v, t, n))
    return [("jax paged_attention bf16", shipped, (q, k, k, table, lengths))]


def torch_seconds(case: MatmulCase | AttentionCase, l2_bytes: int) -> float | None:
    """torch's matmul, or its scaled_dot_product_attention on contiguous KV; None without it.

    By CUDA events, cold like ours: operands rotate through copies that exceed the cache.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    if isinstance(case, MatmulCase):
        x = torch.randn(case.M, case.K, **options)
        number = num_copies(2 * case.N * case.K, l2_bytes)
        weights = [torch.randn(case.N, case.K, **options) for _ in range(number)]
        calls = [lambda w=w: x @ w.T for w in weights]
    else:
        B, context = len(case.rows), max(context for context, _ in case.rows)
        q = torch.randn(B, case.K * case.G, case.max_query_len, case.H, **options)
        number = num_copies(4 * B * case.K * context * case.H, l2_bytes)
        pairs = [torch.randn(2, B, case.K, context, case.H, **options) for _ in range(number)]
        attend = torch.nn.functional.scaled_dot_product_attention
        calls = [lambda p=p: attend(q, p[0], p[1], enable_gqa=True) for p in pairs]
    times = []
    for previous, call in itertools.islice(zip(calls[-1:] + calls, calls, strict=False), SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        previous()  # so that the timed call is queued behind work, and its launch is hidden
        start.record()  # type: ignore[no-untyped-call]
        call()
        end.record()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(np.median(times))
