"""Measures Helios in this process: `python -m helios_jax.bench.helios_worker JOB RESULT`."""

import json
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import helios_jax
from helios_jax import SamplingParams


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a `Workload.job` on `job["model"]`, through `LLM.generate` as a user would.

    Rates include the host's loop, sampling and detokenisation. The prefill's time is up to the
    first token's arrival on the host; decoding is timed from there, over exactly `output_tokens`
    steps. Everything has run once before, so nothing compiles.
    """
    # Prompts come twice, and are to be computed both times.
    llm = helios_jax.load(
        job["model"],
        dtype=job["dtype"],
        max_num_seqs=max(map(len, job["decode_prompts"])),
        enable_prefix_caching=False,
    )

    def run(prompts: list[list[int]], num_tokens: int):
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params)
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
        return outputs[0].timings

    def decode(prompts: list[list[int]]) -> float:
        # The first token is the prefill's; the timings' tpot is the mean of the others.
        return run(prompts, job["output_tokens"] + 1).tpot_seconds * job["output_tokens"]

    decode_seconds = []
    for prompts in job["decode_prompts"]:
        decode(prompts)
        decode_seconds.append(decode(prompts))
    prefill = [job["prefill_prompt"]]
    run(prefill, 1)
    prefill_seconds = [run(prefill, 1).ttft_seconds for _ in range(job["num_prefills"])]
    return {
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "weights": llm.dtype_report,
        "decode_seconds": decode_seconds,
        "prefill_seconds": statistics.median(prefill_seconds),
    }


if __name__ == "__main__":
    result = measure(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
