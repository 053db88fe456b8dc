"""What do passes and draft steps cost on this machine? Measured, for `AdaptiveLength`."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax.cache.paged import init_pools
from helios_jax.model.compiler import COMPILER_OPTIONS
from helios_jax.sampling import SamplingParams, stack_sampling
from helios_jax.speculative.controller import CostTable
from helios_jax.speculative.generation import Speculation
from helios_jax.speculative.passes import logits_of, private_rows, run_rows
from helios_jax.speculative.proposer import RoundRows

_WARM_UP, _TIMED = 2, 9


def measure_costs(
    target: tuple[Any, Any],
    speculation: Speculation,
    proposer_params: Any = None,
    *,
    num_rows: int = 1,
    kv_dtype: str = "float32",
    backend: str | None = None,
) -> CostTable:
    """The shortest of a few timed runs of the target's passes and of the proposer, in turn, so that
    a draft finds its weights where a pass of the target has left them: in no cache.

    The shortest, since other work on the machine only ever adds: a median taken in a busy moment
    made a pass over two tokens seem 1.7 times as dear as one over one token, instead of 1.1, and
    prompt lookup drafted wrongly ever after. Everything is compiled before.

    A round of g draft tokens has the pass of the shortest of `Speculation.pass_lengths` that holds
    them, so only those are timed. Rows are as good as empty: reading a long context costs a pass
    the same whatever its tokens. A pass is timed with its logits, a draft step as the J-th part of
    a greedy draft of J tokens.

    Args:
      target: (model, params).
      num_rows: of the batch that is timed.
      kv_dtype, backend: of the target's pass.
    """
    model, params = target
    J, lengths = speculation.max_num_draft_tokens, speculation.pass_lengths
    kv = private_rows(num_rows, 2 * J + 4, kv_dtype)
    starts_B = jnp.full(num_rows, 1, jnp.int32)
    options = COMPILER_OPTIONS.get(jax.default_backend())

    @partial(jax.jit, donate_argnums=0, static_argnums=2, compiler_options=options)
    def run_pass(pools, params, num_tokens: int):
        tokens_BT = jnp.zeros((num_rows, num_tokens), jnp.int32)
        counts_B = jnp.full(num_rows, num_tokens, jnp.int32)
        hidden_BTD, pools = run_rows(model, params, pools, kv, tokens_BT, starts_B, counts_B)
        return pools, jnp.argmax(logits_of(model, params, hidden_BTD), axis=-1)

    greedy = [SamplingParams(temperature=0.0, seed=0)] * num_rows
    rows = RoundRows(
        tokens_BS=jnp.zeros((num_rows, 2 * J + 4), jnp.int32),
        num_known_B=starts_B + 1,
        num_output_B=jnp.zeros(num_rows, jnp.int32),
        sampling=stack_sampling(greedy, vocab_size=model.config.vocab_size),
        history=None,
        hidden_BD=jnp.zeros((num_rows, model.config.hidden_size), model.dtype),
        kv=kv,
        vocab_size=model.config.vocab_size,
    )

    @partial(jax.jit, donate_argnums=0, compiler_options=options)
    def draft(state, params, rows):
        wanted_B = jnp.full(num_rows, J, jnp.int32)
        draft, state = speculation.proposer.propose(params, state, rows, wanted_B, J)
        return state, draft.tokens_BJ

    drafting = speculation.proposer.init_state(num_rows, kv.num_blocks)
    begun = jax.tree.map(np.array, drafting.rows)

    def target_pass(state, num_tokens: int):
        pools, drafting = state
        pools, result = run_pass(pools, params, num_tokens)
        return (pools, drafting), result

    def from_the_start(state):
        pools, drafting = state
        drafting, tokens_BJ = draft(drafting, proposer_params, rows)
        return (pools, drafting._replace(rows=jax.tree.map(jnp.array, begun))), tokens_BJ

    runs = [*(partial(target_pass, num_tokens=length + 1) for length in lengths), from_the_start]
    state = init_pools(model.config, kv.num_blocks), drafting
    *passes, draft_seconds = _shortest(runs, state)
    seconds = dict(zip(lengths, passes, strict=True))
    verify_T = [min(s for length, s in seconds.items() if length >= g) for g in range(J + 1)]
    return CostTable(
        draft_seconds=jnp.float32(draft_seconds / J),
        verify_seconds_T=jnp.asarray(verify_T, jnp.float32),
    )


def _shortest(runs: Sequence[Callable[[Any], tuple[Any, Any]]], state: Any) -> list[float]:
    """Seconds of each warm run, which pass `state` on."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(_WARM_UP + _TIMED):
        for run, mine in zip(runs, times, strict=True):
            started = time.perf_counter()
            state, result = run(state)
            jax.block_until_ready((state, result))
            mine.append(time.perf_counter() - started)
    return [min(mine[_WARM_UP:]) for mine in times]
