"""Do the kernels, run by interpreting their bodies, serve the same tokens as XLA?"""

from functools import cache

import jax
import jax.numpy as jnp

from helios_jax.engine import Engine, EngineConfig
from helios_jax.model import init_params
from helios_jax.model.forms import ServingForm, serving_form
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
PROMPTS = ([7, 70, 170, 3], list(range(40, 78)))


@cache
def form() -> ServingForm:
    """INT4 linears, the head's too, in the form of a GPU: the kernels multiply 16-bit numbers."""
    config = tiny.config(num_heads=2, num_kv_heads=1, tie_word_embeddings=False)
    params = init_params(config, jax.random.key(3), jnp.bfloat16)

    def place(path, leaf):
        if path[-1].key == "kernel":
            return rtn(8 * leaf.T, Scheme(group_size=32))
        return leaf

    params = jax.tree_util.tree_map_with_path(place, params)
    return serving_form(config, params, "int4", "gpu")


def serve(backend: str, **changes) -> tuple[list[list[int]], dict[str, set[str]]]:
    """Greedy tokens after each prompt, and the backends by which each kernel was served."""
    dispatch._in_use.clear()
    engine = Engine(
        form(), tiny.tokenizer(), model_config=form().model.config,
        config=EngineConfig(**(CONFIG | dict(backend=backend) | changes)), seed=0,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate(PROMPTS, [greedy] * len(PROMPTS))
    used = {op: {choice.backend for choice in found} for op, found in dispatch.in_use().items()}
    return [output.outputs[0].token_ids for output in outputs], used


def test_x():
    import time

    t = time.time()
    a = serve("xla")
    print(time.time() - t, a)
    t = time.time()
    b = serve("interpret")
    print(time.time() - t, b)
    assert a[0] == b[0]
