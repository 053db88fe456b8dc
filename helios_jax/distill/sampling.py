"""Which sequences does the target generate, at the temperatures that it will serve?

Sequence i of a run has the prompt i (modulo their number), its seed from the run's and i, and the
temperatures in turn, so that a prompt has another one each time; a shard is sampled by an engine
that holds nothing else. So what is in a shard hangs on its number alone, and a run that was killed
goes on where it was.

In float32 the shards of a killed and resumed run have the same bits. In the faster forms a row's
rounding depends on which rows share its step, which hangs on time: shards may differ in near-ties,
and a resumed run keeps those it has.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from helios_jax.config import require
from helios_jax.distill import store as stores
from helios_jax.distill.store import Store
from helios_jax.distill.teacher import Teacher
from helios_jax.llm import LLM
from helios_jax.sampling import SamplingParams

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class SamplingPlan:
    """What is sampled.

    Attributes:
      num_sequences: in all.
      temperatures: taken in turn; those that the target will serve.
      max_tokens: longest answer.
      top_k: of the teacher's distribution that are kept; None for all of it.
      keep_hidden: the teacher's hidden states too, 2 * hidden_size bytes a token: a draft head
        learns from them.
      sequences_per_shard: sampled, labelled and written together.
      seed: of everything drawn.
    """

    num_sequences: int = 2000
    temperatures: tuple[float, ...] = (0.0, 0.5, 1.0)
    max_tokens: int = 256
    top_k: int | None = 32
    keep_hidden: bool = False
    sequences_per_shard: int = 64
    seed: int = 0

    def __post_init__(self):
        for name in ("num_sequences", "max_tokens", "sequences_per_shard"):
            value = getattr(self, name)
            require(value >= 1, f"{name}={value}: must be at least 1")
        require(self.top_k is None or self.top_k >= 1, f"top_k={self.top_k}: must be at least 1")
        require(
            bool(self.temperatures) and all(t >= 0 for t in self.temperatures),
            f"temperatures={self.temperatures}: must be one or more numbers of at least 0",
        )

    @property
    def num_shards(self) -> int:
        return -(-self.num_sequences // self.sequences_per_shard)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; without `keep_hidden` where it is False: older plans have none."""
        fields = dataclasses.asdict(self) | {"temperatures": list(self.temperatures)}
        return {name: value for name, value in fields.items() if name != "keep_hidden" or value}

    def params(self, index: int, num_prompts: int) -> SamplingParams:
        """Of sequence `index`."""
        turn = index % num_prompts + index // num_prompts
        return SamplingParams(
            temperature=self.temperatures[turn % len(self.temperatures)],
            max_tokens=self.max_tokens,
            seed=(self.seed * 1_000_003 + index) % 2**32,
            detokenize=False,
        )


def sample(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    plan: SamplingPlan,
    folder: Path,
    identity: dict[str, Any],
    progress: Progress = lambda done, total: None,
    warn: Callable[[str], None] = lambda message: None,
) -> Store:
    """Samples the shards that `folder` lacks; a store of all of them.

    Args:
      llm: the target, loaded without prefix caching, as it would make a shard hang on earlier ones.
      prompts: token ids of each.
      identity: what else the samples depend on: the target, the prompts.
      progress: called with (shards done, shards in all).
      warn: told of damaged shards; they are sampled again.

    Raises:
      ValueError: no prompts, or a folder with other samples.
      OSError: the disk is full; what was done stays.
    """
    require(bool(prompts), "prompts: must hold at least one")
    require(
        not llm.engine.config.enable_prefix_caching,
        "enable_prefix_caching=True: a shard would depend on those before it; load the target with "
        "enable_prefix_caching=False",
    )
    plan_of = {"plan": plan.to_dict()}
    with stores.open_store(folder, {**identity, **plan_of}) as store:
        for path in store.damaged:
            warn(f"{path}: does not match the sum in its name; it is sampled again")
        teacher = Teacher(llm.model, llm.params, plan.top_k, plan.keep_hidden)
        for shard in range(plan.num_shards):
            progress(shard, plan.num_shards)
            if shard not in store:
                store.write(shard, sample_shard(llm, teacher, prompts, plan, shard))
        progress(plan.num_shards, plan.num_shards)
        return store


def sample_shard(
    llm: LLM, teacher: Teacher, prompts: Sequence[Sequence[int]], plan: SamplingPlan, shard: int
) -> list[stores.Sequence]:
    """The sequences of one shard, labelled."""
    first = shard * plan.sequences_per_shard
    indices = range(first, min(first + plan.sequences_per_shard, plan.num_sequences))
    asked = [list(prompts[index % len(prompts)]) for index in indices]
    params = [plan.params(index, len(prompts)) for index in indices]
    outputs = llm.generate(asked, params)
    tokens = [
        [*prompt, *output.outputs[0].token_ids]
        for prompt, output in zip(asked, outputs, strict=True)
    ]
    labels = teacher.label([(row, len(prompt)) for row, prompt in zip(tokens, asked, strict=True)])
    return [
        stores.Sequence(np.asarray(row, np.int32), len(prompt), one.temperature, label)
        for row, prompt, one, label in zip(tokens, asked, params, labels, strict=True)
    ]
