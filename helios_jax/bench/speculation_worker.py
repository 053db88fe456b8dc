"""Runs prompts without and with speculation: `python -m …speculation_worker JOB RESULT`.

One engine of each kind, the same weights, one request at a time; which comes first alternates. A
run during which anything was compiled is repeated. Nothing is found in a prefix cache. Answers end
where those of `helios_jax.load` do.
"""

import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helios_jax import SamplingParams, load
from helios_jax.engine import Engine
from helios_jax.speculative import Speculation

# A prompt may need another variant of the step than those before; a few runs find them all.
_MAX_RUNS = 4
_COUNTED = ("num_draft_tokens", "num_accepted_tokens", "num_verifications", "num_rounds")


def measure(job: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """{versions, weights, speculation, costs, acceptance, prompts}, see `bench.speculation`."""
    ours = load(
        job["model"], dtype=job["dtype"], speculative_config=job["speculative_config"], seed=0,
        kv_cache_dtype=job["kv_cache_dtype"], max_num_seqs=1, enable_prefix_caching=False,
    ).engine  # fmt: skip
    speculation = ours.step_config.speculation
    if speculation is None:
        raise ValueError(
            f"speculative_config={job['speculative_config']}: drafts nothing; "
            "num_speculative_tokens must be at least 1"
        )
    plain = Engine(
        ours.form, ours.tokenizer, model_config=ours.model_config, config=ours.config, seed=0
    )
    engines = {"plain": plain, "speculative": ours}
    return {
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "weights": ours.form.description,
        "speculation": describe(speculation),
        "costs": jax.tree.map(lambda x: np.asarray(x).tolist(), ours.speculation_params.costs),
        "prompts": compare(engines, job, progress),
        "acceptance": _by_position(engines["speculative"]),
    }


def describe(speculation: Speculation) -> str:
    """Its fields, functions by their names."""
    fields = (
        f"{name}={getattr(value, '__qualname__', None) or repr(value)}"
        for name, value in vars(speculation).items()
    )
    return f"Speculation({', '.join(fields)})"


def compare(
    engines: dict[str, Engine], job: dict[str, Any], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every request of the job on both engines: {category, plain, speculative, is_equal,
    difference (of unequal greedy answers, see `first_difference`, else None), is_compiled}."""
    params = SamplingParams(
        temperature=job["temperature"], max_tokens=job["output_tokens"], seed=job["seed"]
    )
    found = []
    for index, request in enumerate(job["requests"]):
        progress(f"prompt {index + 1} of {len(job['requests'])} ({request['category']})")
        names = list(engines) if index % 2 == 0 else [*engines][::-1]
        prompt = _text(request, engines["plain"])
        runs = {name: _run(engines[name], prompt, params) for name in names}
        asked = [run.pop("prompt_token_ids") for run in runs.values()][0]
        ids = {name: run.pop("token_ids") for name, run in runs.items()}
        is_equal = ids["plain"] == ids["speculative"]
        difference = None
        if not is_equal and job["temperature"] == 0:
            difference = first_difference(engines["plain"], asked, *ids.values())
        found.append(
            {
                "category": request["category"],
                **runs,
                "is_equal": is_equal,
                "difference": difference,
                "is_compiled": any(run.pop("is_compiled") for run in runs.values()),
            }
        )
    return found


def first_difference(
    engine: Engine, prompt_ids: Sequence[int], some: Sequence[int], others: Sequence[int]
) -> dict[str, Any]:
    """Where two answers first differ: {index, margin}.

    index counts the answer's tokens from 0; margin is by how much the target's largest logit there
    exceeds the next one, computed over all tokens before at once and without a cache. Answers are
    alike up to there, so that it does not matter whose tokens come before.
    """
    pairs = zip(some, others, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))
    tokens_BT = jnp.asarray([[*prompt_ids, *some[:index]]], jnp.int32)
    logits_V = engine.form.model.apply(engine.form.params, tokens_BT)[0, -1]
    first, second = jax.lax.top_k(logits_V.astype(jnp.float32), 2)[0].tolist()
    return {"index": index, "margin": first - second}


def _text(request: dict[str, Any], engine: Engine) -> str:
    if "messages" in request:
        return engine.tokenizer.apply_chat_template(request["messages"], add_generation_prompt=True)
    return request["prompt"]


def _run(engine: Engine, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """One request alone, again where something was compiled meanwhile."""
    for _ in range(_MAX_RUNS):
        num_programs, before = engine.num_programs, engine.metrics()
        [output] = engine.generate([prompt], [params])
        is_compiled = engine.num_programs != num_programs
        if not is_compiled:
            break
    after = engine.metrics()
    return {
        "prompt_token_ids": output.prompt_token_ids,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_tokens": len(output.outputs[0].token_ids),
        "ttft_seconds": output.timings.ttft_seconds,
        "total_seconds": output.timings.total_seconds,
        **{key: after.get(key, 0) - before.get(key, 0) for key in _COUNTED},
        "token_ids": output.outputs[0].token_ids,
        "is_compiled": is_compiled,
    }


def _by_position(engine: Engine) -> list[dict[str, int]]:
    """Tokens proposed and accepted at each place in a draft, repeated runs included."""
    report = engine.acceptance()
    assert report is not None, "requests were served"
    return [place._asdict() for place in report.by_position]


if __name__ == "__main__":
    result = measure(
        json.loads(Path(sys.argv[1]).read_text()), lambda line: print(line, file=sys.stderr)
    )
    Path(sys.argv[2]).write_text(json.dumps(result))
