"""Measures llama.cpp (xllamacpp) in this process: `python llama_cpp_worker.py JOB RESULT`.

Stands alone, so that an interpreter without Helios can run it.
"""

import json
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp  # pyright: ignore[reportMissingImports]

_QUIET = -1


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a `Workload.job` through llama.cpp's server engine, called directly, without HTTP.

    The times are llama.cpp's own (`timings`): a prompt's evaluation, and generation from the first
    token on. The prompts of a batch go in as one request and are evaluated as one batch, so all
    rows decode together from the first step; the engine reports the first row's times.
    """
    num_tokens = job["output_tokens"] + 1
    batches = job["decode_prompts"]
    longest = max(len(batches[0][0]) + num_tokens, len(job["prefill_prompt"]) + 1)
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_parallel = max(map(len, batches))
    # The context is shared out evenly; llama.cpp rounds each share up to multiples of 256.
    params.n_ctx = params.n_parallel * -(-longest // 256) * 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["num_threads"]
    params.verbosity = _QUIET
    server = xllamacpp.Server(params)

    def run(prompts: list[list[int]], num_tokens: int) -> tuple[float, float]:
        answer = server.handle_completions(
            {
                "prompt": prompts if len(prompts) > 1 else prompts[0],
                "n_predict": num_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                # At temperature 0 the other samplers could not change the token.
                "samplers": ["temperature"],
                "cache_prompt": False,
            }
        )
        timings = answer["timings"]
        assert [row["finish_reason"] for row in answer["choices"]] == ["length"] * len(prompts)
        assert (timings["prompt_n"], timings["predicted_n"]) == (len(prompts[0]), num_tokens)
        return timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3

    decode_seconds = []
    for prompts in batches:
        run(prompts, num_tokens)
        decode_seconds.append(run(prompts, num_tokens)[1])
    prefill = [job["prefill_prompt"]]
    run(prefill, 1)
    prefill_seconds = [run(prefill, 1)[0] for _ in range(job["num_prefills"])]
    features = [
        flag.split("=")[0].strip()
        for flag in xllamacpp.get_system_info().split(":", 1)[-1].split("|")
        if flag.strip().endswith("= 1")
    ]
    return {
        "versions": {"xllamacpp": version("xllamacpp")},
        "weights": f"the GGUF file as it is; built with {', '.join(features)}",
        "decode_seconds": decode_seconds,
        "prefill_seconds": statistics.median(prefill_seconds),
    }


if __name__ == "__main__":
    result = measure(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
