"""How does lm-evaluation-harness drive a model of ours? (`pip install 'helios-jax[eval]'`)

import helios_jax, lm_eval
from helios_jax.calibrate.harness import HeliosLM

llm = helios_jax.load("smollm2-135m")
lm_eval.simple_evaluate(model=HeliosLM(llm), tasks=["piqa"])
"""

import math
from typing import Any

from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

from helios_jax.calibrate.likelihood import likelihoods, split_tokens
from helios_jax.calibrate.scoring import cut_windows, score
from helios_jax.config import require
from helios_jax.llm import LLM
from helios_jax.sampling import SamplingParams

_DEFAULT_MAX_TOKENS = 256


class HeliosLM(LM):
    """The harness's three questions, answered by an LLM."""

    def __init__(self, llm: LLM):
        super().__init__()
        self.llm = llm

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log p(continuation | context), whether it is the greedy one) for each request."""
        sequences = [self._sequence(*request.args) for request in requests]
        found = likelihoods(sequences, self.llm)
        return [(one.log_probability, one.is_greedy) for one in found]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """log p(text), every token scored once with at least half a context before it."""
        return [self._rolling(*request.args) for request in requests]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context up to one of `until`."""
        params = [_sampling(request.args[1]) for request in requests]
        outputs = self.llm.generate([request.args[0] for request in requests], params)
        return [output.outputs[0].text for output in outputs]

    @property
    def tokenizer_name(self) -> str:
        return self.llm.tokenizer.fingerprint()

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.llm.tokenizer.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def _prefix(self) -> list[int]:
        """What stands before the first token of a text that has no context."""
        tokenizer = self.llm.tokenizer
        if tokenizer.bos_token_id is not None:
            return [tokenizer.bos_token_id]
        return [*tokenizer.eos_token_ids][:1]

    def _sequence(self, context: str, continuation: str) -> tuple[list[int], int]:
        if context:
            return split_tokens(context, continuation, self.llm)
        prefix = self._prefix()
        return prefix + self.llm.tokenizer.encode(continuation, False), len(prefix)

    def _rolling(self, text: str) -> float:
        tokens = self._prefix() + self.llm.tokenizer.encode(text, False)
        context = min(self.llm.max_model_len, 2048)
        scores = score(self.llm.model, self.llm.params, cut_windows(tokens, context, context // 2))
        return -math.log(scores.perplexity) * scores.num_tokens


def _sampling(options: dict[str, Any]) -> SamplingParams:
    """The harness's generation options; one that would be ignored is an error."""
    options = dict(options)
    stop = options.pop("until", [])
    temperature = options.pop("temperature", 0.0)
    if not options.pop("do_sample", temperature > 0):
        temperature = 0.0
    fields = {
        name: options.pop(name) for name in ("top_p", "top_k", "min_p", "seed") if name in options
    }
    max_tokens = options.pop("max_gen_toks", _DEFAULT_MAX_TOKENS)
    require(not options, f"generation options {sorted(options)} are not supported; leave them out")
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop=[stop] if isinstance(stop, str) else list(stop),
        **fields,
    )
