"""What do the engine's steps cost on this machine? Fitted to the steps of a measured run.

A step is planned and read (`step`), may prefill a chunk (`chunk`, and `token` for each token that
is computed, padding included) and decodes in rounds (`round`; `many` where more rows than two use
the other form of a CPU's weights; `row` for each row of the compiled batch; `kv` for each cached
token that is read). Non-negative least squares on the steps' relative errors; steps that take
several times as long as the others say they should (something else ran) are left out.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from helios_jax.config import require
from helios_jax.engine.core import STREAMED_ROUNDS
from helios_jax.engine.variants import MIN_CHUNK_TOKENS
from helios_jax.replay.engine_client import StepRecord
from helios_jax.scheduler import SchedulerConfig

# Of a chunk's tokens on a CPU, so many are computed at a time; see `StepConfig.tile_tokens`.
_TILE_TOKENS = 256
_OUTLIER = 3.0


@dataclass(frozen=True)
class StepCosts:
    """Seconds; a step-time function of `simulate`, hashable as jit wants it.

    Attributes:
      step_seconds, chunk_seconds, token_seconds, round_seconds, many_seconds, row_seconds,
        kv_seconds: see the module.
      max_num_batched_tokens: of the engine; its chunks come in sizes of 32 times a power of four.
    """

    step_seconds: float
    chunk_seconds: float
    token_seconds: float
    round_seconds: float
    many_seconds: float
    row_seconds: float
    kv_seconds: float
    max_num_batched_tokens: int = 512

    def __call__(
        self, *, num_tokens: Any, num_decode: Any, decode_kv_tokens: Any, num_rounds: Any,
        **counts: Any,
    ) -> Array:  # fmt: skip
        chunk = num_tokens - num_decode
        padded = padded_tokens(chunk, self.max_num_batched_tokens)
        rows = jnp.exp2(jnp.ceil(jnp.log2(jnp.maximum(num_decode, 1))))
        a_round = (
            self.round_seconds
            + self.many_seconds * (rows > 2)
            + self.row_seconds * rows
            + self.kv_seconds * decode_kv_tokens
        )
        once = self.step_seconds + self.chunk_seconds * (chunk > 0) + self.token_seconds * padded
        return once / num_rounds + jnp.where(num_decode > 0, a_round, 0.0)


def to_json(costs: StepCosts, config: SchedulerConfig) -> dict[str, Any]:
    """The costs and the engine that they are of: what `helios simulate --costs` reads."""
    limits = dataclasses.asdict(config)
    # JSON has no infinity.
    limits = {name: None if value == math.inf else value for name, value in limits.items()}
    return {"schema": 1, "costs": dataclasses.asdict(costs), "scheduler": limits}


def scheduler_from_json(fields: Mapping[str, Any]) -> SchedulerConfig:
    """The engine's scheduler as `simulate` needs it; a ValueError for something else.

    Its steps end after `STREAMED_ROUNDS` rounds, since every request streams in a replay.
    """
    limits = fields.get("scheduler")
    names = {field.name for field in dataclasses.fields(SchedulerConfig)}
    require(
        isinstance(limits, Mapping) and set(limits) == names,
        f"costs: scheduler must be an object of {', '.join(sorted(names))}",
    )
    assert isinstance(limits, Mapping)
    values: Any = {name: math.inf if value is None else value for name, value in limits.items()}
    return simulated(SchedulerConfig(**values))


def simulated(config: SchedulerConfig) -> SchedulerConfig:
    """An engine's scheduler with the rounds that its steps have while somebody streams."""
    return dataclasses.replace(config, max_rounds=min(config.max_rounds, STREAMED_ROUNDS))


def costs_from_json(fields: Mapping[str, Any]) -> StepCosts:
    """The costs of `to_json`; a ValueError for something else."""
    names = {field.name for field in dataclasses.fields(StepCosts)}
    costs = fields.get("costs")
    require(
        isinstance(costs, Mapping) and set(costs) == names,
        f"costs: must be an object of {', '.join(sorted(names))}; `helios replay --costs` writes "
        "such a file",
    )
    return StepCosts(**costs)  # pyright: ignore[reportCallIssue]


def padded_tokens(chunk: Any, max_num_batched_tokens: int) -> Any:
    """Tokens that a chunk of so many is computed as: whole tiles of the program that runs it."""
    size = float(MIN_CHUNK_TOKENS)
    sizes = []
    while size < max_num_batched_tokens:
        sizes.append(size)
        size *= 4
    sizes.append(float(max_num_batched_tokens))
    tile: Any = min(sizes[-1], _TILE_TOKENS)
    for each in reversed(sizes):
        tile = jnp.where(chunk <= each, min(each, _TILE_TOKENS), tile)
    return jnp.ceil(chunk / tile) * tile


def fit_costs(steps: Sequence[StepRecord], config: SchedulerConfig) -> StepCosts:
    """The costs that explain the steps best.

    Raises:
      ValueError: too few steps, or an engine that speculates, whose rounds are of another kind.
    """
    from scipy.optimize import nnls

    require(
        config.num_draft_tokens == 0,
        "costs: are fitted to plain decoding; replay without --draft and --prompt-lookup",
    )
    used = [step for step in steps if step.num_rounds or step.num_prefill_tokens]
    require(len(used) >= 20, f"costs: {len(used)} steps are too few to fit; replay 20 or more")
    table = np.array([step[1:] for step in used], float)
    seconds = np.array([step.seconds for step in used])
    rounds, decoded, prefilled, kv = table.T
    rows = np.exp2(np.ceil(np.log2(np.maximum(decoded / np.maximum(rounds, 1), 1))))
    has_chunk = prefilled > 0
    padded = np.asarray(padded_tokens(prefilled, config.max_num_batched_tokens)) * has_chunk
    terms = np.stack(
        [
            np.ones(len(used)), has_chunk, padded, rounds, rounds * (rows > 2), rounds * rows,
            rounds * kv * (decoded > 0),
        ],
        axis=1,
    )  # fmt: skip
    kept = np.ones(len(used), bool)
    found = np.zeros(terms.shape[1])
    for _ in range(3):
        weights = 1 / np.sqrt(seconds[kept])
        found, _ = nnls(terms[kept] * weights[:, None], seconds[kept] * weights)
        kept = seconds <= _OUTLIER * np.maximum(terms @ found, 1e-6)
    names = [field.name for field in dataclasses.fields(StepCosts)]
    values = [*found.tolist(), config.max_num_batched_tokens]
    return StepCosts(**dict(zip(names, values, strict=True)))
