"""What does the scheduler know? The request table, its limits, its counters, and the block pool."""

import dataclasses
import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from helios_jax.cache import blocks
from helios_jax.cache.blocks import BlockPool
from helios_jax.cache.masked import masked_add
from helios_jax.config import require
from helios_jax.scheduler.pace import Pace, init_pace

# Values of `SchedulerState.status_R`.
EMPTY, WAITING, RUNNING, FINISHED = range(4)
NO_LIMIT = np.iinfo(np.int32).max


@dataclass(frozen=True)
class SchedulerConfig:
    """How much there is to share, and the rules of sharing.

    Attributes:
      num_blocks: blocks in the KV pool.
      max_num_rows: R, requests in the table, waiting ones included; more are refused for now.
      max_model_len: tokens of prompt and output at most.
      max_num_seqs: requests running at a time.
      max_num_batched_tokens: tokens of a step's prefill chunk and decoding rows together.
      narrow_block_tokens, wide_block_tokens: tokens per block of rows up to `kv_watermark` tokens
        and of longer ones (8-bit: 16, 16-bit: 8, float32: 4).
      kv_watermark: tokens; 0 makes every row wide, infinity none.
      num_draft_tokens: draft tokens per round at most; 0 decodes plainly.
      max_rounds: decode rounds per step at most.
      max_preemptions: a request preempted this often goes before all that are not aged.
      max_skips: likewise one that did not fit in this many steps in which one behind it did.
      aging_seconds: likewise one that has waited this long.
      headroom: share of the pool left for the growth of running rows when another is admitted.
      prefill_tokens_per_second: what the deadline policy takes a prefill to cost; infinity is none.
    """

    num_blocks: int
    max_num_rows: int = 256
    max_model_len: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    narrow_block_tokens: int = 16
    wide_block_tokens: int = 8
    kv_watermark: float = 4000
    num_draft_tokens: int = 0
    max_rounds: int = 8
    max_preemptions: int = 3
    max_skips: int = 16
    aging_seconds: float = 30.0
    headroom: float = 0.01
    prefill_tokens_per_second: float = math.inf

    def __post_init__(self):
        for name in (
            "num_blocks", "max_num_rows", "max_model_len", "max_num_seqs", "narrow_block_tokens",
            "wide_block_tokens", "max_rounds", "max_preemptions", "max_skips",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}: must be at least 1")
        require(
            self.max_num_seqs <= self.max_num_rows,
            f"max_num_seqs={self.max_num_seqs}: exceeds max_num_rows={self.max_num_rows}, the "
            "table that holds them; lower it or raise max_num_rows",
        )
        require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens}: below "
            f"max_num_seqs={self.max_num_seqs}, so that a full batch leaves prefill nothing; "
            "raise it or lower max_num_seqs",
        )
        require(
            self.wide_block_tokens <= self.narrow_block_tokens
            and self.narrow_block_tokens % self.wide_block_tokens == 0,
            f"wide_block_tokens={self.wide_block_tokens}: must divide "
            f"narrow_block_tokens={self.narrow_block_tokens}, since blocks are of one size",
        )
        require(
            self.num_draft_tokens >= 0, f"num_draft_tokens={self.num_draft_tokens}: must be >=0"
        )
        require(self.kv_watermark >= 0, f"kv_watermark={self.kv_watermark}: must be 0 or more")
        require(self.aging_seconds > 0, f"aging_seconds={self.aging_seconds}: must be above 0")
        require(0 <= self.headroom < 1, f"headroom={self.headroom}: must be in [0, 1)")
        require(
            self.prefill_tokens_per_second > 0,
            f"prefill_tokens_per_second={self.prefill_tokens_per_second}: must be above 0",
        )

    @property
    def max_blocks_per_row(self) -> int:
        """Width M of the block tables."""
        narrow_tokens = min(self.kv_watermark, self.max_model_len)
        wide_tokens = self.max_model_len if self.max_model_len > self.kv_watermark else 0
        # A narrow row may pass the watermark within a round before it migrates.
        narrow_tokens = min(narrow_tokens + 1 + self.num_draft_tokens, self.max_model_len)
        return max(
            math.ceil(narrow_tokens / self.narrow_block_tokens),
            math.ceil(wide_tokens / self.wide_block_tokens),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Limits:
    """`SchedulerConfig` as scalars on the device, int32 unless said: changing one compiles nothing.

    Attributes:
      round_tokens: KV entries that a row may write in a round, 1 + num_draft_tokens.
      step_tokens: and in all rounds of a step.
      headroom_blocks: see `SchedulerConfig.headroom`.
      aging_seconds, prefill_tokens_per_second: float32.
    """

    max_num_seqs: Array
    max_num_batched_tokens: Array
    kv_watermark: Array
    round_tokens: Array
    step_tokens: Array
    max_preemptions: Array
    max_skips: Array
    headroom_blocks: Array
    aging_seconds: Array
    prefill_tokens_per_second: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Counters:
    """What happened since the start; int32 unless said.

    Attributes:
      num_refused: requests that can never fit.
      num_table_full: requests that found no empty row.
      num_admissions: rows that began to run, resumed ones included.
      num_preemptions, num_migrations: rows.
      num_recomputed_tokens: KV entries thrown away in preemptions.
      num_prefix_hit_tokens: KV entries found instead of computed.
      queue_seconds: float32, waiting time of all admissions.
    """

    num_refused: Array
    num_table_full: Array
    num_admissions: Array
    num_preemptions: Array
    num_migrations: Array
    num_recomputed_tokens: Array
    num_prefix_hit_tokens: Array
    queue_seconds: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SchedulerState:
    """The table of R requests and the pool that they share.

    Times are float32 seconds on the host's clock, infinity where there is none; keep them below
    1e4 with `rebase`, where float32 resolves a millisecond. Counts are int32. *Known* tokens are
    those of the prompt and of the output so far; *computed* ones have their keys and values in
    blocks. A running row with one known token that is not computed decodes; with more, it prefills.

    Attributes:
      status_R: EMPTY, WAITING (for the first time or preempted), RUNNING or FINISHED; finished rows
        hold no blocks after `commit`, and are as good as empty.
      request_id_R: the client's number, -1 where empty.
      sequence_R: order of submission.
      num_prompt_R: prompt tokens.
      num_known_R, num_computed_R: see above.
      max_known_R: prompt tokens + max_tokens.
      priority_R: float32, lower is earlier.
      arrival_time_R, deadline_R, first_token_time_R: times; `deadline_R` for the whole answer.
      waiting_since_R: time of arrival or of the last preemption.
      ttft_target_R, tpot_target_R: seconds to the first token and for each later one.
      is_wide_R: whether the row's KV is (or will be) in the wide precision.
      is_aged_R: has waited, was skipped or was preempted too much, see `order`; stays so.
      num_preemptions_R: how often preempted.
      num_skips_R: steps in which a less urgent row was admitted because this one did not fit.
      num_blocks_R, block_table_RM: blocks held; -1 padded.
      hash_RM2: uint32, content hashes of full blocks, from the known tokens.
      num_hashed_R: how many of them are known; 0 after a change of precision.
      num_published_R: blocks that were offered to the prefix table.
      next_sequence: of the next request.
      pool, pace, limits, counters: see there.
      block_tokens: (narrow, wide) tokens per block; static.
      max_chunk_tokens: bound on `max_num_batched_tokens`; static, the width of lists.
    """

    status_R: Array
    request_id_R: Array
    sequence_R: Array
    num_prompt_R: Array
    num_known_R: Array
    num_computed_R: Array
    max_known_R: Array
    priority_R: Array
    arrival_time_R: Array
    deadline_R: Array
    first_token_time_R: Array
    waiting_since_R: Array
    ttft_target_R: Array
    tpot_target_R: Array
    is_wide_R: Array
    is_aged_R: Array
    num_preemptions_R: Array
    num_skips_R: Array
    num_blocks_R: Array
    block_table_RM: Array
    hash_RM2: Array
    num_hashed_R: Array
    num_published_R: Array
    next_sequence: Array
    pool: BlockPool
    pace: Pace
    limits: Limits
    counters: Counters
    block_tokens: tuple[int, int] = field(metadata={"static": True})
    max_chunk_tokens: int = field(metadata={"static": True})

    @property
    def is_waiting_R(self) -> Array:
        return self.status_R == WAITING

    @property
    def is_running_R(self) -> Array:
        return self.status_R == RUNNING

    @property
    def num_output_R(self) -> Array:
        return self.num_known_R - self.num_prompt_R

    @property
    def num_pending_R(self) -> Array:
        """Known tokens that are not computed."""
        return self.num_known_R - self.num_computed_R

    def num_blocks_for(self, num_tokens: Array, is_wide: Array) -> Array:
        """Blocks that hold so many tokens."""
        narrow, wide = self.block_tokens
        return jnp.where(is_wide, -(-num_tokens // wide), -(-num_tokens // narrow))


def init_scheduler(config: SchedulerConfig) -> SchedulerState:
    """An empty table and a free pool."""
    R, M = config.max_num_rows, config.max_blocks_per_row

    def full(value, dtype=jnp.int32) -> Array:
        return jnp.full(R, value, dtype)

    def scalar(value, dtype=jnp.int32) -> Array:
        return jnp.asarray(value, dtype)

    return SchedulerState(
        status_R=full(EMPTY),
        request_id_R=full(-1),
        sequence_R=full(0),
        num_prompt_R=full(0),
        num_known_R=full(0),
        num_computed_R=full(0),
        max_known_R=full(0),
        priority_R=full(0, jnp.float32),
        arrival_time_R=full(0, jnp.float32),
        deadline_R=full(math.inf, jnp.float32),
        first_token_time_R=full(math.inf, jnp.float32),
        waiting_since_R=full(0, jnp.float32),
        ttft_target_R=full(math.inf, jnp.float32),
        tpot_target_R=full(math.inf, jnp.float32),
        is_wide_R=full(False, bool),
        is_aged_R=full(False, bool),
        num_preemptions_R=full(0),
        num_skips_R=full(0),
        num_blocks_R=full(0),
        block_table_RM=jnp.full((R, M), -1, jnp.int32),
        hash_RM2=jnp.zeros((R, M, 2), jnp.uint32),
        num_hashed_R=full(0),
        num_published_R=full(0),
        next_sequence=scalar(0),
        pool=blocks.init_block_pool(config.num_blocks),
        pace=init_pace(),
        limits=init_limits(config),
        counters=init_counters(),
        block_tokens=(config.narrow_block_tokens, config.wide_block_tokens),
        max_chunk_tokens=config.max_num_batched_tokens,
    )


def init_counters() -> Counters:
    """All zero."""
    zeros = {field.name: jnp.int32(0) for field in dataclasses.fields(Counters)}
    return Counters(**zeros | {"queue_seconds": jnp.float32(0)})


def init_limits(config: SchedulerConfig) -> Limits:
    """The limits of `config`, for a state that another configuration of equal shapes made."""

    def scalar(value, dtype=jnp.int32) -> Array:
        return jnp.asarray(value, dtype)

    round_tokens = 1 + config.num_draft_tokens
    return Limits(
        max_num_seqs=scalar(config.max_num_seqs),
        max_num_batched_tokens=scalar(config.max_num_batched_tokens),
        kv_watermark=scalar(min(config.kv_watermark, NO_LIMIT)),
        round_tokens=scalar(round_tokens),
        step_tokens=scalar(round_tokens * config.max_rounds),
        max_preemptions=scalar(config.max_preemptions),
        max_skips=scalar(config.max_skips),
        headroom_blocks=scalar(math.ceil(config.headroom * config.num_blocks)),
        aging_seconds=scalar(config.aging_seconds, jnp.float32),
        prefill_tokens_per_second=scalar(config.prefill_tokens_per_second, jnp.float32),
    )


def rebase(state: SchedulerState, seconds: Array | float) -> SchedulerState:
    """Moves the origin of the clock `seconds` later, and that of `sequence_R` to the oldest row."""
    is_live_R = state.is_waiting_R | state.is_running_R
    oldest = jnp.min(jnp.where(is_live_R, state.sequence_R, state.next_sequence))
    return dataclasses.replace(
        state,
        arrival_time_R=state.arrival_time_R - seconds,
        deadline_R=state.deadline_R - seconds,
        first_token_time_R=state.first_token_time_R - seconds,
        waiting_since_R=state.waiting_since_R - seconds,
        pace=dataclasses.replace(state.pace, last_time=state.pace.last_time - seconds),
        sequence_R=state.sequence_R - oldest,
        next_sequence=state.next_sequence - oldest,
    )


def check_invariants(state: SchedulerState) -> Array:
    """Whether table and pool agree, as a bool; looks at every block, so it is for tests.

    Call it after `schedule` or `commit`: in between, finished rows still hold blocks.
    """
    M = state.block_table_RM.shape[1]
    held_RM = state.block_table_RM >= 0
    references_P = masked_add(
        jnp.zeros_like(state.pool.refcount_P), state.block_table_RM, 1, held_RM
    )
    running_R = state.is_running_R
    room_R = state.num_blocks_R * jnp.where(state.is_wide_R, *state.block_tokens[::-1])
    checks = [
        blocks.check_invariants(state.pool),
        jnp.all(references_P == state.pool.refcount_P),
        jnp.all(held_RM == (jnp.arange(M) < state.num_blocks_R[:, None])),
        jnp.all(running_R | (state.num_blocks_R == 0) | (state.status_R == FINISHED)),
        jnp.all(~running_R | (state.num_computed_R <= room_R)),
        jnp.all(~running_R | (state.num_computed_R < state.num_known_R)),
        jnp.all(~running_R | (state.num_known_R < state.max_known_R)),
        jnp.sum(running_R) <= state.limits.max_num_seqs,
    ]
    return jnp.all(jnp.stack(checks))
