"""Do the kernels, run by interpreting their bodies, serve the same tokens as XLA?"""

from functools import cache

import jax
import jax.numpy as jnp

from helios_jax.engine import Engine, EngineConfig
from helios_jax.model import init_params
from helios_jax.model.forms import ServingForm, serving_form
from helios_jax.outputs import CompletionOutput
from helios_jax.quant import Scheme, rtn
from helios_jax.sampling import SamplingParams
from pallas_kernels import dispatch
from tests import tiny

# One row at a time, one chunk size: two programs of the model.
CONFIG = dict(
    max_model_len=64, max_num_seqs=1, max_num_rows=2, max_num_batched_tokens=32,
    kv_cache_memory_bytes=1 << 18, kv_cache_dtype="fp8_e4m3", max_rounds=4,
)  # fmt: skip
NUM_TOKENS = 20
PROMPTS = ([7, 70, 170, 3], list(range(41, 79)))
# Sums of 16-bit numbers in another order, and an FP8 code here and there that rounds the other way.
NEAR_TIE = 0.1
TOLERANCE = 0.2


@cache
def form() -> ServingForm:
    """INT4 linears, the head's too, in the form of a GPU: the kernels multiply 16-bit numbers."""
    config = tiny.config(num_layers=1, num_heads=2, num_kv_heads=1, tie_word_embeddings=False)
    params = init_params(config, jax.random.key(3), jnp.bfloat16)

    def place(path, leaf):
        if path[-1].key == "kernel":
            return rtn(3 * leaf.T, Scheme(group_size=32))
        return leaf

    params = jax.tree_util.tree_map_with_path(place, params)
    return serving_form(config, params, "int4", "gpu")


def serve(backend: str):
    """Greedy outputs of each prompt, and the backends by which each op was served."""
    dispatch._in_use.clear()
    engine = Engine(
        form(), tiny.tokenizer(), model_config=form().model.config,
        config=EngineConfig(**CONFIG, backend=backend), seed=0,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    outputs = engine.generate(PROMPTS, [greedy] * len(PROMPTS))
    used = {op: {choice.backend for choice in found} for op, found in dispatch.in_use().items()}
    return [output.outputs[0] for output in outputs], used


def test_interpreted_kernels_serve_the_tokens_of_xla():
    """INT4 linears and FP8 KV: all three kernels, in prefill and decoding."""
    expected, by_xla = serve("xla")
    found, by_interpreting = serve("interpret")
    ops = ("int4_matmul", "append_kv", "paged_attention")
    assert by_xla == {op: {"xla"} for op in ops}
    assert by_interpreting == {op: {"interpret"} for op in ops}
    num_equal = sum(compare(*outputs) for outputs in zip(expected, found, strict=True))
    assert num_equal >= 1.5 * NUM_TOKENS


def compare(expected: CompletionOutput, found: CompletionOutput) -> int:
    """Checks tokens and log-probabilities up to a near-tie; how many tokens are equal."""
    assert len(expected.token_ids) == len(found.token_ids) == NUM_TOKENS
    assert len({*found.token_ids}) > NUM_TOKENS / 2, "the model repeats itself"
    for i, (a, b) in enumerate(zip(expected.token_ids, found.token_ids, strict=True)):
        at, other = expected.logprobs[i], found.logprobs[i]
        if a != b:
            first, second = sorted((each.logprob for each in at.values()), reverse=True)[:2]
            assert first - second < NEAR_TIE, f"token {i}: {a} by XLA, {b} by the kernels: {at}"
            return i
        assert abs(at[a].logprob - other[a].logprob) < TOLERANCE, f"token {i}: {at}, {other}"
    return NUM_TOKENS
