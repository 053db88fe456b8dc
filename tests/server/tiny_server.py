"""Serves the tiny model in a process of its own: `python -m tests.server.tiny_server '{...}'`."""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax

from helios_jax.llm import LLM
from helios_jax.server.config import ServerConfig
from helios_jax.server.run import run_server
from helios_jax.server.telemetry import log_to_stderr
from tests import tiny

_PATHS = ("tls_cert", "tls_key", "tls_client_ca", "auth_token_file")


def make_llm(options: dict[str, Any]) -> LLM:
    """The tiny model; "nan": its logits are not numbers, "seconds": it takes so long to load."""
    time.sleep(options.pop("seconds", 0))
    is_nan = options.pop("nan", False)
    llm = tiny.llm(**options)
    if is_nan:
        params = llm.engine.form.params["params"]
        params["final_norm"] = jax.tree.map(lambda x: x * math.nan, params["final_norm"])
    return llm


def main() -> None:
    job = json.loads(sys.argv[1])
    server = {"port": 0, "metrics_port": 0, "model_name": "tiny", "warm_up": False} | job["server"]
    for name in _PATHS:
        if name in server:
            server[name] = Path(server[name])
    log_to_stderr("json")
    run_server(ServerConfig(**server), lambda: make_llm(job["llm"]))


if __name__ == "__main__":
    main()
