"""A smaller model as proposer: how does it keep up with the tokens that its target keeps?

The draft has KV pools of its own under the target's block ids. `num_computed` entries of a row are
right; known tokens beyond them are pending. Before a row drafts it takes in what is pending:

- after a round that kept n of g drafts, n < g: its entries end where the kept drafts do, so the
  recovered token is pending;
- after one that kept all: the last draft token was never fed, so it and the bonus token are;
- after rounds without drafts (its length was 0, its row was resumed): all their tokens, taken in
  `catch_up_tokens` at a time until at most two are left.

So 1 <= num_known - num_computed always holds of a running row, and 1 or 2 after a round it drafted
in. The first pass of a round takes one or two tokens a row and gives the first draft token;
each further token costs a pass of one. Rejected entries are rolled back by counting less.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from helios_jax.cache.paged import KVPools, KVScales, init_pools
from helios_jax.config import require
from helios_jax.model import Transformer
from helios_jax.speculative.draft_vocabulary import (
    ReducedParams,
    model_params,
    to_draft,
    to_target,
)
from helios_jax.speculative.drafting import draw_drafts
from helios_jax.speculative.passes import PagedRows, logits_of, run_rows
from helios_jax.speculative.proposer import Draft, Proposer, ProposerState, RoundRows, Verified


class DraftCache(NamedTuple):
    """pools: the draft's keys and values; scales: of its 8-bit ones, None for 1."""

    pools: KVPools
    scales: KVScales | None


@dataclass(frozen=True)
class DraftModel(Proposer):
    """Drafts with a model of the target's vocabulary; `params` are the model's.

    Or of some of its tokens: `params` are then `ReducedParams`, and `num_target_tokens` is set.

    Attributes:
      model: a `Transformer`. Beyond its max_model_len it drafts nothing.
      greedy: draft the most probable token even where the row samples; q is then one-hot.
      min_confidence: see `draw_drafts`; 0 for none.
      catch_up_tokens: tokens of a row taken in at a time when it has fallen behind.
      num_target_tokens: tokens of the target that it reads, where it has a `DraftVocabulary`; None
        where its ids are the target's.

    State: shared is a `DraftCache`, rows is num_computed_B.
    """

    model: Transformer
    greedy: bool = False
    min_confidence: float = 0.0
    catch_up_tokens: int = 16
    num_target_tokens: int | None = None

    def __post_init__(self):
        require(
            0 <= self.min_confidence <= 1,
            f"min_confidence={self.min_confidence}: must be in [0, 1]; use 0 for none",
        )
        require(
            self.catch_up_tokens >= 1,
            f"catch_up_tokens={self.catch_up_tokens}: must be at least 1",
        )

    def check(self, model: Transformer) -> None:
        """Vocabularies may be padded to different sizes; `pairing` compares their tokens."""
        mine, theirs = self.num_target_tokens or self.model.config.vocab_size, model.config
        for name in ("bos_token_id", "eos_token_ids"):
            ids = getattr(theirs, name)
            ids = ids if isinstance(ids, tuple) else () if ids is None else (ids,)
            require(
                all(token < mine for token in ids),
                f"draft model: its vocab_size={mine} does not hold the target's "
                f"{name}={ids} (vocab_size={theirs.vocab_size}): the two have different "
                "vocabularies; use a draft of the target's family",
            )

    def init_state(
        self, num_rows: int, num_blocks: int, scales: KVScales | None = None
    ) -> ProposerState:
        cache = DraftCache(init_pools(self.model.config, num_blocks), scales)
        return ProposerState(cache, jnp.zeros(num_rows, jnp.int32))

    def prefill(
        self, params: Any, state: ProposerState, kv: PagedRows, tokens_BT: Array, starts_B: Array,
        counts_B: Array,
    ) -> ProposerState:  # fmt: skip
        cache: DraftCache = state.shared
        kv = dataclasses.replace(kv, scales=cache.scales)
        # Rows whose earlier tokens it lacks would compute entries that are wrong.
        counts_B = jnp.where(starts_B == state.rows, counts_B, 0)
        counts_B = jnp.clip(self.model.config.max_model_len - starts_B, 0, counts_B)
        tokens_BT = to_draft(params, tokens_BT)
        _, pools = run_rows(
            self.model, model_params(params), cache.pools, kv, tokens_BT, starts_B, counts_B
        )
        return ProposerState(cache._replace(pools=pools), state.rows + counts_B)

    def propose(
        self, params: Any, state: ProposerState, rows: RoundRows, num_draft_B: Array,
        max_num_draft_tokens: int,
    ) -> tuple[Draft, ProposerState]:  # fmt: skip
        require(
            isinstance(params, ReducedParams) == (self.num_target_tokens is not None),
            "draft model: ReducedParams and num_target_tokens belong together; give both or none",
        )
        cache: DraftCache = state.shared
        kv = dataclasses.replace(rows.kv, scales=cache.scales)
        known_B = rows.num_known_B
        # The last draft token's predecessor is fed at position known + num_draft - 2.
        limit_B = self.model.config.max_model_len + 1 - known_B
        num_draft_B = jnp.clip(limit_B, 0, num_draft_B)
        drafts_B = num_draft_B > 0

        def run(pools: KVPools, tokens_BT: Array, starts_B: Array, counts_B: Array):
            tokens_BT = to_draft(params, tokens_BT)
            return run_rows(
                self.model, model_params(params), pools, kv, tokens_BT, starts_B, counts_B
            )

        def logits(hidden_BD: Array) -> Array:
            return to_target(params, logits_of(self.model, model_params(params), hidden_BD))

        def known(starts_B: Array, width: int) -> Array:
            index_BT = starts_B[:, None] + jnp.arange(width)
            last = rows.tokens_BS.shape[1] - 1
            return jnp.take_along_axis(rows.tokens_BS, jnp.clip(index_BT, 0, last), axis=1)

        def is_behind(carry: tuple[KVPools, Array]) -> Array:
            return drafts_B & (known_B - carry[1] > 2)

        def catch_up(carry: tuple[KVPools, Array]) -> tuple[KVPools, Array]:
            pools, computed_B = carry
            width = self.catch_up_tokens
            counts_B = jnp.minimum(known_B - computed_B - 1, width)
            counts_B = jnp.where(is_behind(carry), counts_B, 0)
            _, pools = run(pools, known(computed_B, width), computed_B, counts_B)
            return pools, computed_B + counts_B

        carry = lax.while_loop(
            lambda carry: jnp.any(is_behind(carry)), catch_up, (cache.pools, state.rows)
        )

        def start(carry: tuple[KVPools, Array]):
            pools, computed_B = carry
            counts_B = jnp.where(drafts_B, known_B - computed_B, 0)
            hidden_B2D, pools = run(pools, known(computed_B, 2), computed_B, counts_B)
            last_B11 = jnp.maximum(counts_B - 1, 0)[:, None, None]
            hidden_BD = jnp.take_along_axis(hidden_B2D, last_B11, axis=1)[:, 0]
            return logits(hidden_BD), (pools, computed_B + counts_B)

        def forward(carry: tuple[KVPools, Array], tokens_B: Array, place: Array, active_B: Array):
            pools, computed_B = carry
            counts_B = active_B.astype(jnp.int32)
            hidden_B1D, pools = run(pools, tokens_B[:, None], known_B + place, counts_B)
            return logits(hidden_B1D[:, 0]), (pools, computed_B + counts_B)

        draft, (pools, computed_B) = draw_drafts(
            start, forward, carry, rows.sampling, rows.history, rows.num_output_B, num_draft_B,
            max_num_draft_tokens=max_num_draft_tokens, vocab_size=rows.vocab_size,
            greedy=self.greedy, min_confidence=self.min_confidence,
        )  # fmt: skip
        return draft, ProposerState(cache._replace(pools=pools), computed_B)

    def observe(self, params: Any, state: ProposerState, verified: Verified) -> ProposerState:
        """Entries end before the last known token: it was not drafted, or is yet to be fed."""
        kept_B = jnp.minimum(state.rows, verified.num_known_B - 1)
        return state._replace(rows=kept_B)
