"""Runs prompts without and with speculation: `python -m …speculation_worker JOB RESULT`.

One engine of each kind, the same weights, one request at a time; which comes first alternates. A
run during which anything was compiled is repeated. Nothing is found in a prefix cache.
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from helios_jax import SamplingParams, hub
from helios_jax.engine import Engine, EngineConfig
from helios_jax.llm import use_compilation_cache
from helios_jax.model.forms import serving_form
from helios_jax.speculative_config import load_speculation

# A prompt may need another variant of the step than those before; a few runs find them all.
_MAX_RUNS = 4
_COUNTED = ("num_draft_tokens", "num_accepted_tokens", "num_verifications", "num_rounds")


def measure(job: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """{versions, weights, speculation, costs, acceptance, prompts}, see `bench.speculation`."""
    from checkpoints_conv import open_checkpoint, read_params

    use_compilation_cache()
    path = hub.resolve(job["model"])
    checkpoint = open_checkpoint(path)
    speculation, extra = load_speculation(
        job["speculative_config"], path, checkpoint.tokenizer, job["dtype"]
    )
    form = serving_form(checkpoint.config, read_params(checkpoint), job["dtype"])

    def engine(**speculating: Any) -> Engine:
        config = EngineConfig(
            kv_cache_dtype=job["kv_cache_dtype"], max_num_seqs=1, enable_prefix_caching=False
        )
        return Engine(
            form, checkpoint.tokenizer, model_config=checkpoint.config, config=config, seed=0,
            **speculating,
        )  # fmt: skip

    engines = {
        "plain": engine(),
        "speculative": engine(speculation=speculation, speculation_params=extra),
    }
    return {
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "weights": form.description,
        "speculation": repr(speculation),
        "costs": jax.tree.map(
            lambda x: np.asarray(x).tolist(), engines["speculative"].speculation_params.costs
        ),
        "prompts": compare(engines, job, progress),
        "acceptance": _by_position(engines["speculative"]),
    }


def compare(
    engines: dict[str, Engine], job: dict[str, Any], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every request of the job on both engines: {category, plain, speculative, is_equal,
    is_compiled}."""
    params = SamplingParams(
        temperature=job["temperature"], max_tokens=job["output_tokens"], seed=job["seed"]
    )
    found = []
    for index, request in enumerate(job["requests"]):
        progress(f"prompt {index + 1} of {len(job['requests'])} ({request['category']})")
        names = list(engines) if index % 2 == 0 else [*engines][::-1]
        prompt = _text(request, engines["plain"])
        runs = {name: _run(engines[name], prompt, params) for name in names}
        ids = [run.pop("token_ids") for run in runs.values()]
        found.append(
            {
                "category": request["category"],
                **runs,
                "is_equal": ids[0] == ids[1],
                "is_compiled": any(run.pop("is_compiled") for run in runs.values()),
            }
        )
    return found


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
