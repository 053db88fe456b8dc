"""How do requests enter the table, and leave it before their end?"""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from helios_jax.cache.masked import get_any, masked_set, ranks
from helios_jax.scheduler.release import release_rows
from helios_jax.scheduler.state import EMPTY, FINISHED, RUNNING, WAITING, SchedulerState

# Answers of `submit`.
ABSENT, ACCEPTED, NEVER_FITS, TABLE_FULL = range(-1, 3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Requests:
    """Up to N requests; `request_id_N` is -1 where there is none. Fields as in `SchedulerState`.

    Attributes:
      num_prompt_N, max_tokens_N: int32, at least 1 each; their sum is at most max_model_len.
      hash_NM2: uint32, hashes of the prompt's full blocks at the precision of `is_wide_prompt`,
        (0, 0) elsewhere; all zero for a request that shares nothing.
    """

    request_id_N: Array
    num_prompt_N: Array
    max_tokens_N: Array
    priority_N: Array
    arrival_time_N: Array
    deadline_N: Array
    ttft_target_N: Array
    tpot_target_N: Array
    hash_NM2: Array


def init_requests(num_requests: int, max_blocks_per_row: int) -> Requests:
    """N absent requests without targets, on the host: fill in what is there."""

    def full(value, dtype) -> Array:
        return np.full(num_requests, value, dtype)  # pyright: ignore[reportReturnType]

    return Requests(
        request_id_N=full(-1, np.int32),
        num_prompt_N=full(1, np.int32),
        max_tokens_N=full(1, np.int32),
        priority_N=full(0, np.float32),
        arrival_time_N=full(0, np.float32),
        deadline_N=full(math.inf, np.float32),
        ttft_target_N=full(math.inf, np.float32),
        tpot_target_N=full(math.inf, np.float32),
        hash_NM2=np.zeros((num_requests, max_blocks_per_row, 2), np.uint32),  # pyright: ignore[reportArgumentType]
    )


def is_wide_prompt(state: SchedulerState, num_prompt: Array | int) -> Array:
    """Whether a prompt of this length starts in the wide precision."""
    return num_prompt > state.limits.kv_watermark


def submit(state: SchedulerState, requests: Requests) -> tuple[SchedulerState, Array, Array]:
    """Puts requests into empty rows, where they wait.

    One that cannot fit even alone (its last KV entry included: prompt + max_tokens - 1, at the
    precision of that length) is refused for good; one that finds no row may be tried again.

    Returns:
      The state, the row of each request (int32 [N], -1 if refused or absent), and why: ACCEPTED,
      NEVER_FITS, TABLE_FULL or ABSENT.
    """
    R, M = state.block_table_RM.shape
    present_N = requests.request_id_N >= 0
    max_known_N = requests.num_prompt_N + requests.max_tokens_N
    ends_wide_N = max_known_N - 1 > state.limits.kv_watermark
    needed_N = state.num_blocks_for(max_known_N - 1, ends_wide_N)
    fits_N = needed_N <= jnp.minimum(state.pool.num_blocks, M)
    empty_R = (state.status_R == EMPTY) | (state.status_R == FINISHED)
    rows_by_rank_R = masked_set(jnp.full(R, -1), ranks(empty_R), jnp.arange(R), empty_R)
    wanted_N = present_N & fits_N
    rank_N = ranks(wanted_N)
    row_N = jnp.where(wanted_N & (rank_N < R), get_any(rows_by_rank_R, rank_N), -1)
    taken_N = row_N >= 0
    answer_N = jnp.select(
        [~present_N, ~fits_N, ~taken_N], [ABSENT, NEVER_FITS, TABLE_FULL], ACCEPTED
    )

    def put(array: Array, values: Array | float) -> Array:
        return masked_set(array, row_N, jnp.asarray(values, array.dtype), taken_N)

    num_hashed_N = jnp.sum(jnp.any(requests.hash_NM2 != 0, axis=-1), axis=-1, dtype=jnp.int32)
    counters = dataclasses.replace(
        state.counters,
        num_refused=state.counters.num_refused + jnp.sum(answer_N == NEVER_FITS, dtype=jnp.int32),
        num_table_full=state.counters.num_table_full
        + jnp.sum(answer_N == TABLE_FULL, dtype=jnp.int32),
    )
    state = dataclasses.replace(
        state,
        status_R=put(state.status_R, WAITING),
        request_id_R=put(state.request_id_R, requests.request_id_N),
        sequence_R=put(state.sequence_R, state.next_sequence + rank_N),
        num_prompt_R=put(state.num_prompt_R, requests.num_prompt_N),
        num_known_R=put(state.num_known_R, requests.num_prompt_N),
        num_computed_R=put(state.num_computed_R, 0),
        max_known_R=put(state.max_known_R, max_known_N),
        priority_R=put(state.priority_R, requests.priority_N),
        arrival_time_R=put(state.arrival_time_R, requests.arrival_time_N),
        deadline_R=put(state.deadline_R, requests.deadline_N),
        first_token_time_R=put(state.first_token_time_R, math.inf),
        waiting_since_R=put(state.waiting_since_R, requests.arrival_time_N),
        ttft_target_R=put(state.ttft_target_R, requests.ttft_target_N),
        tpot_target_R=put(state.tpot_target_R, requests.tpot_target_N),
        is_wide_R=put(state.is_wide_R, is_wide_prompt(state, requests.num_prompt_N)),
        is_aged_R=put(state.is_aged_R, False),
        num_preemptions_R=put(state.num_preemptions_R, 0),
        num_skips_R=put(state.num_skips_R, 0),
        num_published_R=put(state.num_published_R, 0),
        hash_RM2=masked_set(state.hash_RM2, row_N, requests.hash_NM2, taken_N),
        num_hashed_R=put(state.num_hashed_R, num_hashed_N),
        next_sequence=state.next_sequence + jnp.sum(taken_N, dtype=jnp.int32),
        counters=counters,
    )
    return state, row_N, answer_N


def abort(state: SchedulerState, request_ids_N: Array) -> SchedulerState:
    """Ends the requests with these numbers (-1 padded), waiting or running; their blocks are freed.

    Numbers that the table does not hold (any more) are passed over.
    """
    is_live_R = (state.status_R == WAITING) | (state.status_R == RUNNING)
    named_RN = (state.request_id_R[:, None] == request_ids_N) & (request_ids_N >= 0)
    aborted_R = is_live_R & jnp.any(named_RN, axis=1)
    status_R = jnp.where(aborted_R, FINISHED, state.status_R)
    return release_rows(dataclasses.replace(state, status_R=status_R))
