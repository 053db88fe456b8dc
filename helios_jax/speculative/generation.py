"""Speculative generation without an engine: prompts to tokens in one program.

    speculative_round(...)     one draft and its verification, for every row
    speculative_generate(...)  rounds under `lax.while_loop` until every row has finished

A round is the engine's decode round, and made of the same parts:

    controller.choose -> proposer.propose -> run_rows over the last known token and the drafts
    -> verify -> end_rows -> proposer.observe, controller.update, record_round

Between rounds, the cache holds the keys and values of num_known - 1 tokens of each running row: of
all known ones but the last, which the next round's pass takes in together with the drafts. What a
pass wrote for rejected drafts lies beyond that and is overwritten.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache.paged import KVPools, init_pools
from helios_jax.config import require
from helios_jax.model import Transformer
from helios_jax.sampling import (
    LENGTH,
    RUNNING,
    Logprobs,
    SamplingArrays,
    TokenHistory,
    end_rows,
    init_history,
    init_logprobs,
    score_tokens,
    update_history,
)
from helios_jax.speculative.acceptance import AcceptanceRule, accept
from helios_jax.speculative.controller import FixedLength
from helios_jax.speculative.draft_model import DraftModel
from helios_jax.speculative.passes import PagedRows, logits_of, private_rows, run_rows
from helios_jax.speculative.proposer import (
    Proposer,
    ProposerState,
    RoundRows,
    Verified,
    no_draft,
    only_tokens,
)
from helios_jax.speculative.telemetry import AcceptanceTelemetry, init_telemetry, record_round
from helios_jax.speculative.verification import RoundRecord, verify
from pallas_kernels.kv_format import FORMATS


@dataclass(frozen=True)
class Speculation:
    """Who proposes, how many, and who decides; static under jit.

    Attributes:
      proposer: see `proposer`.
      max_num_draft_tokens: room in a round, J; 0 is plain decoding.
      intermediate_lengths: between 0 and J, ascending. An engine compiles a pass over no drafts and
        one over J, and one for each of these; a round takes the shortest that holds its longest
        draft. Worth it where a pass costs what its tokens cost (a CPU) and drafts differ in length.
      controller: see `controller`.
      rule: see `acceptance`.
    """

    proposer: Proposer
    max_num_draft_tokens: int = 4
    controller: Any = FixedLength()
    rule: AcceptanceRule = accept
    intermediate_lengths: tuple[int, ...] = ()

    def __post_init__(self):
        require(
            type(self.max_num_draft_tokens) is int and self.max_num_draft_tokens >= 0,
            f"max_num_draft_tokens={self.max_num_draft_tokens!r}: must be an integer >= 0; 0 does "
            "not speculate",
        )
        lengths = self.pass_lengths
        require(
            self.intermediate_lengths == () or list(lengths) == sorted(set(lengths)),
            f"intermediate_lengths={self.intermediate_lengths}: must ascend, between 0 and "
            f"max_num_draft_tokens={self.max_num_draft_tokens}",
        )

    @property
    def pass_lengths(self) -> tuple[int, ...]:
        """Draft tokens that there are passes for."""
        return (0, *self.intermediate_lengths, self.max_num_draft_tokens)


class SpeculationParams(NamedTuple):
    """The arrays that go with it: proposer, its parameters; costs, the controller's."""

    proposer: Any = None
    costs: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpeculativeState:
    """What lies between two rounds of B rows; donate it when jitting.

    Attributes:
      pools: the target's keys and values, of num_known - 1 tokens a running row.
      proposer, controller: their memory.
      tokens_BS: int32, prompt and output of each row, anything beyond.
      num_prompt_B, num_known_B: int32, tokens of the prompt, and of both.
      max_known_B: int32, the row ends with this many.
      history: what penalties and bad words need; None where no row has any.
      hidden_BD: see `RoundRows`.
      logprobs: of output tokens, N = S - T of them; None unless asked for.
      finish_reason_B: int32, as `sampling.finish` names them.
      is_spoilt_B: bool, rows whose last round met a NaN that may have been a draft token's: they
        may have got no token, and draft none in the next round.
      telemetry: see there.
      num_rounds: int32 scalar.
    """

    pools: KVPools
    proposer: ProposerState
    controller: Any
    tokens_BS: Array
    num_prompt_B: Array
    num_known_B: Array
    max_known_B: Array
    history: TokenHistory | None
    hidden_BD: Array
    logprobs: Logprobs | None
    finish_reason_B: Array
    is_spoilt_B: Array
    telemetry: AcceptanceTelemetry
    num_rounds: Array

    @property
    def running_B(self) -> Array:
        return self.finish_reason_B == RUNNING


class SpeculativeOutput(NamedTuple):
    """What `speculative_generate` returns; the first four as `generate` does.

    tokens: int32 [B, max_new_tokens], -1 beyond a row's length.
    lengths: int32 [B].
    logprobs: of the target at each token's position, or None.
    finish_reason: int32 [B].
    telemetry: see `telemetry`.
    num_rounds: int32, target passes after the prompts'.
    """

    tokens: Array
    lengths: Array
    logprobs: Logprobs | None
    finish_reason: Array
    telemetry: AcceptanceTelemetry
    num_rounds: Array


def speculative_generate(
    target: tuple[Transformer, Any],
    draft: Proposer | tuple[Any, Any],
    prompt_tokens: Array,
    prompt_lengths: Array,
    sampling: SamplingArrays,
    max_new_tokens: int,
    *,
    max_num_draft_tokens: int = 4,
    controller: Any = None,
    costs: Any = None,
    rule: AcceptanceRule = accept,
    num_logprobs: int | None = 0,
    kv_dtype: str | None = None,
) -> SpeculativeOutput:
    """`generate` with speculation: tokens of the same law, greedy ones the same, in fewer passes.

    Args:
      target: (model, params).
      draft: a proposer without parameters (`PromptLookup()`, `Proposer()` for none), (proposer,
        params), or (draft model, its params) for a `DraftModel`.
      prompt_tokens, prompt_lengths, sampling, max_new_tokens, num_logprobs: as for `generate`; all
        that `sampling` holds is honoured.
      max_num_draft_tokens: static, J.
      controller: None always drafts J tokens; `AdaptiveLength()` needs `costs`, a `CostTable`.
      rule: decides between p and q; other rules than `accept` do not keep the target's law.
      kv_dtype: static, of `pallas_kernels.kv_format`; None takes the activations' dtype.

    Raises:
      ValueError: arguments that contradict each other, a draft of another vocabulary.
    """
    model, params = target
    proposer, proposer_params = draft if isinstance(draft, tuple) else (draft, None)
    if isinstance(proposer, Transformer):
        proposer = DraftModel(proposer)
    require(
        isinstance(proposer, Proposer),
        f"draft={draft!r}: must be a Proposer, (Proposer, params) or (Transformer, params)",
    )
    speculation = Speculation(
        proposer, max_num_draft_tokens, FixedLength() if controller is None else controller, rule
    )
    proposer.check(model)
    speculation.controller.check(costs, max_num_draft_tokens)
    kv_dtype = jnp.dtype(model.dtype).name if kv_dtype is None else kv_dtype
    require(kv_dtype in FORMATS, f"kv_dtype={kv_dtype!r}: must be one of {tuple(FORMATS)}")
    require(max_new_tokens >= 1, f"max_new_tokens={max_new_tokens}: must be at least 1")
    shapes = {
        "prompt_lengths": jnp.shape(prompt_lengths),
        "sampling": sampling.temperature_B.shape,
    }
    for name, shape in shapes.items():
        require(
            shape == jnp.shape(prompt_tokens)[:1],
            f"{name} has {shape} rows, prompt_tokens {jnp.shape(prompt_tokens)[:1]}: must agree",
        )
    return _generate(
        model, params, SpeculationParams(proposer_params, costs), prompt_tokens, prompt_lengths,
        sampling, speculation=speculation, max_new_tokens=max_new_tokens,
        num_logprobs=num_logprobs, kv_dtype=kv_dtype,
    )  # fmt: skip


@partial(
    jax.jit, static_argnames=("model", "speculation", "max_new_tokens", "num_logprobs", "kv_dtype")
)
def _generate(
    model: Transformer, params: Any, extra: SpeculationParams, prompt_tokens: Array,
    prompt_lengths: Array, sampling: SamplingArrays, *, speculation: Speculation,
    max_new_tokens: int, num_logprobs: int | None, kv_dtype: str,
) -> SpeculativeOutput:  # fmt: skip
    kv, state = begin(
        (model, params), speculation, extra, prompt_tokens, prompt_lengths, sampling,
        max_new_tokens=max_new_tokens, num_logprobs=num_logprobs, kv_dtype=kv_dtype,
    )  # fmt: skip

    def turn(state: SpeculativeState) -> SpeculativeState:
        return speculative_round((model, params), speculation, extra, kv, sampling, state)[0]

    state = lax.while_loop(lambda state: jnp.any(state.running_B), turn, state)
    lengths_B = state.num_known_B - state.num_prompt_B
    place_N = jnp.arange(max_new_tokens)
    index_BN = jnp.minimum(state.num_prompt_B[:, None] + place_N, state.tokens_BS.shape[1] - 1)
    tokens_BN = jnp.take_along_axis(state.tokens_BS, index_BN, axis=1)
    tokens_BN = jnp.where(place_N < lengths_B[:, None], tokens_BN, -1)
    return SpeculativeOutput(
        tokens_BN, lengths_B, state.logprobs, state.finish_reason_B, state.telemetry,
        state.num_rounds,
    )  # fmt: skip


def begin(
    target: tuple[Transformer, Any],
    speculation: Speculation,
    extra: SpeculationParams,
    tokens_BT: Array,
    lengths_B: Array,
    sampling: SamplingArrays,
    *,
    max_new_tokens: int,
    num_logprobs: int | None = None,
    kv_dtype: str = "float32",
) -> tuple[PagedRows, SpeculativeState]:
    """Runs the prompts up to their last tokens, which the first round takes in.

    Each row owns the blocks of T + max_new_tokens tokens in pools that nobody else uses.

    Args:
      tokens_BT, lengths_B: prompts, padded on the right; a row of length 0 is padding of the batch
        and finished from the start.
    """
    model, params = target
    B, T = tokens_BT.shape
    tokens_BT, lengths_B = tokens_BT.astype(jnp.int32), lengths_B.astype(jnp.int32)
    kv = private_rows(B, T + max_new_tokens, kv_dtype)
    pools = init_pools(model.config, kv.num_blocks)
    proposer = speculation.proposer.init_state(B, kv.num_blocks)
    starts_B = jnp.zeros(B, jnp.int32)
    counts_B = jnp.maximum(lengths_B - 1, 0)
    hidden_BD = jnp.zeros((B, model.config.hidden_size), model.dtype)
    if T > 1:
        before_BT = tokens_BT[:, :-1]
        hidden_BTD, pools = run_rows(model, params, pools, kv, before_BT, starts_B, counts_B)
        last_B11 = jnp.maximum(counts_B - 1, 0)[:, None, None]
        last_BD = jnp.take_along_axis(hidden_BTD, last_B11, axis=1)[:, 0]
        hidden_BD = jnp.where(counts_B[:, None] > 0, last_BD, 0).astype(model.dtype)
        if speculation.max_num_draft_tokens:
            proposer = speculation.proposer.prefill(
                extra.proposer, proposer, kv, before_BT, starts_B, counts_B
            )
    max_new_B = jnp.minimum(sampling.max_tokens_B, max_new_tokens)
    return kv, SpeculativeState(
        pools=pools,
        proposer=proposer,
        controller=speculation.controller.init_state(B),
        tokens_BS=jnp.pad(tokens_BT, ((0, 0), (0, max_new_tokens))),
        num_prompt_B=lengths_B,
        num_known_B=lengths_B,
        max_known_B=lengths_B + max_new_B,
        history=init_history(tokens_BT, lengths_B, sampling, vocab_size=model.config.vocab_size),
        hidden_BD=hidden_BD,
        logprobs=None if num_logprobs is None else init_logprobs(B, max_new_tokens, num_logprobs),
        finish_reason_B=jnp.where(lengths_B > 0, RUNNING, LENGTH).astype(jnp.int32),
        is_spoilt_B=jnp.zeros(B, bool),
        telemetry=init_telemetry(speculation.max_num_draft_tokens),
        num_rounds=jnp.int32(0),
    )


def speculative_round(
    target: tuple[Transformer, Any],
    speculation: Speculation,
    extra: SpeculationParams,
    kv: PagedRows,
    sampling: SamplingArrays,
    state: SpeculativeState,
) -> tuple[SpeculativeState, RoundRecord]:
    """At least one token for every running row; what a row gets depends on that row alone.

    (Only after a NaN that may have come from a draft a row gets none, see `is_spoilt_B`.)
    """
    model, params = target
    J = speculation.max_num_draft_tokens
    proposer, controller = speculation.proposer, speculation.controller
    B, S = state.tokens_BS.shape
    running_B, known_B = state.running_B, state.num_known_B
    num_output_B = known_B - state.num_prompt_B
    room_B = state.max_known_B - known_B

    proposed, draft = state.proposer, no_draft(B, J)
    if J:
        rows = RoundRows(
            tokens_BS=state.tokens_BS,
            num_known_B=known_B,
            num_output_B=num_output_B,
            sampling=sampling,
            history=state.history,
            hidden_BD=state.hidden_BD,
            kv=kv,
            vocab_size=model.config.vocab_size,
        )
        wanted_B = controller.choose(extra.costs, state.controller, B, J)
        # The token after the drafts takes the last room.
        may_draft_B = running_B & ~state.is_spoilt_B
        wanted_B = jnp.where(may_draft_B, jnp.clip(room_B - 1, 0, jnp.minimum(wanted_B, J)), 0)
        draft, proposed = proposer.propose(extra.proposer, proposed, rows, wanted_B, J)
        draft = only_tokens(draft, wanted_B, model.config.vocab_size)

    last_B1 = jnp.take_along_axis(state.tokens_BS, jnp.maximum(known_B - 1, 0)[:, None], axis=1)
    tokens_BT = jnp.concatenate([last_B1, draft.tokens_BJ], axis=1)
    counts_B = jnp.where(running_B, draft.num_draft_B + 1, 0)
    starts_B = jnp.maximum(known_B - 1, 0)
    hidden_BTD, pools = run_rows(model, params, state.pools, kv, tokens_BT, starts_B, counts_B)
    logits_BTV = logits_of(model, params, hidden_BTD)
    record = verify(logits_BTV, draft, sampling, state.history, num_output_B, speculation.rule)

    num_drawn_B = jnp.where(running_B, record.num_drawn_B, 0)
    ended = end_rows(record.drawn_BT, num_drawn_B, sampling, room_B)
    place_T = jnp.arange(J + 1)
    is_kept_BT = place_T < ended.num_tokens_B[:, None]
    row_B1 = jnp.arange(B)[:, None]
    column_BT = jnp.where(is_kept_BT, known_B[:, None] + place_T, S)
    history = state.history
    for t in range(J + 1 if history is not None else 0):
        history = update_history(history, ended.tokens_BT[:, t], is_kept_BT[:, t])
    logprobs = state.logprobs
    if logprobs is not None:
        N = logprobs.chosen_BN.shape[1]
        scored = score_tokens(
            logits_BTV.reshape(B * (J + 1), -1), ended.tokens_BT.reshape(-1),
            logprobs.top_BNK.shape[-1],
        )  # fmt: skip
        output_BT = jnp.where(is_kept_BT, num_output_B[:, None] + place_T, N)
        logprobs = jax.tree.map(
            lambda buffer, new: buffer.at[row_B1, output_BT].set(
                new.reshape(B, J + 1, *new.shape[1:]).astype(buffer.dtype), mode="drop"
            ),
            logprobs,
            scored,
        )
    num_known_B = known_B + ended.num_tokens_B
    verified = Verified(hidden_BTD, ended.num_tokens_B, num_known_B)
    if J:
        proposed = proposer.observe(extra.proposer, proposed, verified)
    last_B11 = jnp.maximum(ended.num_tokens_B - 1, 0)[:, None, None]
    last_hidden_BD = jnp.take_along_axis(hidden_BTD, last_B11, axis=1)[:, 0]
    counted = (record.num_draft_B, record.num_accepted_B, running_B)
    return dataclasses.replace(
        state,
        pools=pools,
        proposer=proposed,
        controller=controller.update(state.controller, *counted),
        tokens_BS=state.tokens_BS.at[row_B1, column_BT].set(ended.tokens_BT, mode="drop"),
        num_known_B=num_known_B,
        history=history,
        hidden_BD=jnp.where(
            (ended.num_tokens_B > 0)[:, None], last_hidden_BD.astype(state.hidden_BD.dtype),
            state.hidden_BD,
        ),
        logprobs=logprobs,
        finish_reason_B=jnp.where(running_B, ended.finish_reason_B, state.finish_reason_B),
        is_spoilt_B=running_B & record.is_spoilt_B,
        telemetry=record_round(state.telemetry, sampling.temperature_B, known_B, *counted),
        num_rounds=state.num_rounds + 1,
    ), record  # fmt: skip
