"""A server that notes when its engine hands updates over, for `helios_jax.bench.server`.

`python -m helios_jax.bench.server_worker JOB`; the notes are lines of {"prompt", "tokens", "time"}:
the prompt's first ids, how many tokens there were so far, and when, on `time.monotonic`'s clock.
"""

import json
import sys
import time
from typing import Any, TextIO

import helios_jax
from helios_jax.engine import RequestUpdate
from helios_jax.server.config import ServerConfig
from helios_jax.server.run import run_server
from helios_jax.server.telemetry import log_to_stderr


def note_updates(engine: Any, notes: TextIO) -> None:
    """Makes the engine write down each update before its receiver gets it."""
    submit = engine.submit

    def noting(prompt: list[int], sampling: Any, *, on_update: Any, **options: Any) -> int:
        number = 0

        def note(update: RequestUpdate) -> None:
            nonlocal number
            number += len(update.stream.token_ids)
            entry = {"prompt": prompt[:16], "tokens": number, "time": time.monotonic()}
            notes.write(json.dumps(entry) + "\n")
            on_update(update)

        return submit(prompt, sampling, on_update=note, **options)

    engine.submit = noting


def main() -> None:
    job = json.loads(sys.argv[1])
    log_to_stderr("json")
    with open(job["notes"], "w") as notes:

        def load() -> Any:
            llm = helios_jax.load(job["model"], dtype=job["dtype"], max_num_seqs=job["num_streams"])
            note_updates(llm.engine, notes)
            return llm

        run_server(ServerConfig(model_name=job["model"], port=0), load)


if __name__ == "__main__":
    main()
