"""How would the scheduler have served recorded traffic?"""

from helios_jax.replay.machine import (
    BLOCK_TOKENS,
    MODELS,
    Machine,
    deal_targets,
    machine,
    saturation_seconds,
)
from helios_jax.replay.simulate import Outcome, Targets, simulate, summarize
from helios_jax.replay.traces import Trace, read_azure_csv, read_mooncake_jsonl, read_trace

__all__ = [
    "BLOCK_TOKENS",
    "MODELS",
    "Machine",
    "Outcome",
    "Targets",
    "Trace",
    "deal_targets",
    "machine",
    "read_azure_csv",
    "read_mooncake_jsonl",
    "read_trace",
    "saturation_seconds",
    "simulate",
    "summarize",
]
