"""Times this process from its start: `python -m helios_jax.bench.cold_start_worker JOB RESULT`."""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Imports, loads and streams, as `helios generate` does; seconds since `job["started"]`."""

    def elapsed() -> float:
        return time.time() - job["started"]

    from helios_jax import SamplingParams, load

    import_seconds = elapsed()
    llm = load(job["model"], dtype=job["dtype"])
    load_seconds = elapsed()
    draw = random.Random(job["seed"])
    prompt = [draw.randrange(llm.config.vocab_size) for _ in range(job["prompt_tokens"])]
    num_tokens = job["output_tokens"]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    stream = llm.stream(prompt, params)
    token_ids = list(next(stream).token_ids)
    first_token_seconds = elapsed()
    for output in stream:
        token_ids += output.token_ids
    assert len(token_ids) == num_tokens
    return {
        "import_seconds": import_seconds,
        "load_seconds": load_seconds,
        "first_token_seconds": first_token_seconds,
        "last_token_seconds": elapsed(),
        "weights": llm.dtype_report,
    }


if __name__ == "__main__":
    result = measure(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
