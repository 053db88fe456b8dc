"""How many tokens should a row draft in its next round?

With acceptance a, a round of g draft tokens emits (1 - a^(g+1)) / (1 - a) tokens (arXiv 2211.17192,
equation 1) and costs a pass over g + 1 tokens and g draft steps. `AdaptiveLength` takes the g with
the most tokens per second. Its estimate of a is the row's own: seeded rows draft alike alone and in
any batch. (Costs are shared; where they are measured anew while serving, seeded rows' tokens
depend on when.)
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from helios_jax.config import require


@dataclass(frozen=True)
class FixedLength:
    """The interface of a controller, and its simplest case: always as many as there is room for.

    A controller is frozen and hashable (static under jit). `costs` is any pytree of arrays, so that
    its values change without compiling; this one needs none.
    """

    def check(self, costs: Any, max_num_draft_tokens: int) -> None:
        """Raises ValueError where `costs` do not fit."""

    def init_state(self, num_rows: int) -> Any:
        """A pytree of arrays whose first axis is B, for rows just begun."""
        return ()

    def choose(self, costs: Any, state: Any, num_rows: int, max_num_draft_tokens: int) -> Array:
        """Tokens to draft, int32 [B] in 0..max_num_draft_tokens."""
        return jnp.full(num_rows, max_num_draft_tokens, jnp.int32)

    def update(self, state: Any, num_draft_B: Array, num_accepted_B: Array, live_B: Array) -> Any:
        """The state after a round that drafted and kept so many tokens in rows that are `live`."""
        return state


class CostTable(NamedTuple):
    """Measured times; only their ratios count.

    draft_seconds: float32 scalar, one draft step.
    verify_seconds_T: float32 [J + 1], a target pass over 1..J + 1 tokens a row.
    """

    draft_seconds: Array
    verify_seconds_T: Array


def assumed_costs(max_num_draft_tokens: int, draft_cost: float) -> CostTable:
    """Where nothing was measured: a pass costs 1 whatever its tokens, a draft step `draft_cost`."""
    require(draft_cost >= 0, f"draft_cost={draft_cost}: must be >= 0, a share of a target pass")
    return CostTable(
        jnp.asarray(draft_cost, jnp.float32), jnp.ones(max_num_draft_tokens + 1, jnp.float32)
    )


def expected_tokens(acceptance_B: Array, max_num_draft_tokens: int) -> Array:
    """(1 - a^(g+1)) / (1 - a) for g = 0..J as the sum of a^i, exact at a = 1 too: [B, J + 1]."""
    place_T = jnp.arange(max_num_draft_tokens + 1)
    return jnp.cumsum(acceptance_B[:, None] ** place_T, axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowAcceptance:
    """What a row's rounds have shown. Zeros are a row just begun.

    Attributes:
      num_tested_B, num_accepted_B: float32, exponentially weighted sums over draft tokens that the
        target looked at: those accepted, and the first rejected one.
      num_idle_B: int32, rounds since the row last drafted.
    """

    num_tested_B: Array
    num_accepted_B: Array
    num_idle_B: Array


@dataclass(frozen=True)
class AdaptiveLength:
    """The length with the most expected tokens per second, from the row's own acceptance.

    a = (accepted + prior) / (tested + prior's weight), both sums decaying by `decay` per tested
    token. A row whose best length is 0 drafts `probe_tokens` every `probe_interval` rounds
    nonetheless, so that it can come back.

    Attributes:
      prior_acceptance, prior_tokens: what a new row is believed to accept, and how many tested
        tokens that belief is worth.
      decay: weight of a tested token against the next; 0.95 remembers about 20.
      probe_interval, probe_tokens: see above; an interval of 0 never probes.
    """

    prior_acceptance: float = 0.7
    prior_tokens: float = 4.0
    decay: float = 0.95
    probe_interval: int = 16
    probe_tokens: int = 1

    def __post_init__(self):
        require(
            0 <= self.prior_acceptance <= 1,
            f"prior_acceptance={self.prior_acceptance}: must be in [0, 1]",
        )
        require(self.prior_tokens > 0, f"prior_tokens={self.prior_tokens}: must be above 0")
        require(0 < self.decay < 1, f"decay={self.decay}: must be between 0 and 1")
        require(
            self.probe_interval >= 0 and self.probe_tokens >= 1,
            f"probe_interval={self.probe_interval}, probe_tokens={self.probe_tokens}: must be >= 0 "
            "(0 never probes) and >= 1",
        )

    def check(self, costs: Any, max_num_draft_tokens: int) -> None:
        require(
            isinstance(costs, CostTable),
            f"costs={costs!r}: AdaptiveLength needs a CostTable; measure one, or use assumed_costs",
        )
        shape = jnp.shape(costs.verify_seconds_T)
        require(
            shape == (max_num_draft_tokens + 1,),
            f"costs.verify_seconds_T has shape {shape}: must be ({max_num_draft_tokens + 1},), a "
            f"pass over 1 to max_num_draft_tokens + 1 tokens",
        )

    def init_state(self, num_rows: int) -> RowAcceptance:
        zeros_B = jnp.zeros(num_rows, jnp.float32)
        return RowAcceptance(zeros_B, zeros_B, jnp.zeros(num_rows, jnp.int32))

    def acceptance(self, state: RowAcceptance) -> Array:
        """The estimate of a, float32 [B] in [0, 1]."""
        # The prior fades as the sums fill up: at most 1 / (1 - decay) tested tokens are remembered.
        left_B = jnp.maximum(1 - state.num_tested_B * (1 - self.decay), 0.0)
        prior_B = self.prior_tokens * left_B
        accepted_B = state.num_accepted_B + prior_B * self.prior_acceptance
        return accepted_B / jnp.maximum(state.num_tested_B + prior_B, 1e-6)

    def choose(
        self, costs: CostTable, state: RowAcceptance, num_rows: int, max_num_draft_tokens: int
    ) -> Array:
        J = max_num_draft_tokens
        seconds_T = costs.verify_seconds_T + jnp.arange(J + 1) * costs.draft_seconds
        rate_BT = expected_tokens(self.acceptance(state), J) / seconds_T
        best_B = jnp.argmax(rate_BT, axis=1).astype(jnp.int32)
        if self.probe_interval:
            probes_B = (best_B == 0) & (state.num_idle_B >= self.probe_interval)
            best_B = jnp.where(probes_B, min(self.probe_tokens, J), best_B)
        return best_B

    def update(
        self, state: RowAcceptance, num_draft_B: Array, num_accepted_B: Array, live_B: Array
    ) -> RowAcceptance:
        num_draft_B = jnp.where(live_B, num_draft_B, 0)
        num_accepted_B = jnp.where(live_B, num_accepted_B, 0)
        tested_B = jnp.minimum(num_accepted_B + 1, num_draft_B).astype(jnp.float32)
        # The weight of i tokens, the newest whole: 1 + decay + ... + decay^(i - 1).
        accepted_B = num_accepted_B.astype(jnp.float32)
        is_rejected_B = (tested_B - accepted_B).astype(jnp.float32)
        faded_B = self.decay**tested_B
        weight = 1 / (1 - self.decay)
        new_accepted_B = self.decay**is_rejected_B * (1 - self.decay**accepted_B) * weight
        return RowAcceptance(
            num_tested_B=faded_B * state.num_tested_B + (1 - faded_B) * weight,
            num_accepted_B=faded_B * state.num_accepted_B + new_accepted_B,
            num_idle_B=jnp.where(num_draft_B > 0, 0, state.num_idle_B + live_B.astype(jnp.int32)),
        )
