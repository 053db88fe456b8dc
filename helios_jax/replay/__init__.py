"""How would the scheduler have served recorded traffic?

Measured with `helios simulate TRACE.csv --load 0.6 --load 0.8 --load 1.0 --max-model-len 16384` on
two traces of github.com/Azure/AzurePublicDataset (LLM inference 2023): Llama-3-8B with INT4 weights
and FP8 KV on an H100 at 60% of its data sheet, half of the requests wanting their first token in
1 s and having priority, the others in 8 s. A load of 1 is what the machine takes at its fullest.
Share of TTFT targets met / preemptions per 100 requests / thousands of tokens computed again:

    trace, load                   deadline              fcfs              priority
    code (8,819, bursty)   0.6    91.2% / 0 / 0         39.0% / 0 / 0     47.2% / 0 / 0
                           0.8    85.7% / 0 / 0         10.9% / 0 / 0     25.8% / 0 / 0
                           1.0    82.2% / 0 / 0          4.0% / 0 / 0      7.2% / 0 / 0
    conv (19,366, steady)  0.6    100.0% / 0.1 / 37     99.7% / 0 / 0     100.0% / 0.6 / 129
                           0.8    98.5% / 2.0 / 666     71.4% / 0 / 0     68.3% / 7.5 / 1,783
                           1.0    96.0% / 3.5 / 1,113   26.9% / 0 / 0     17.0% / 7.7 / 1,758
    … 8 GB of KV cache     0.8    98.6% / 2.1 / 714     75.1% / 0.4 / 47  56.7% / 30 / 4,892
                           1.0    95.6% / 6.2 / 1,825   26.3% / 4.5 / 722 12.3% / 39 / 6,355

What deadline gives up, it gives up for long: at load 1 of code the slowest twentieth waits 170 s,
with fcfs 83 s. A policy takes 3 to 6 s for code, 11 to 17 s for conv (one core of AMD Zen 5, jax
0.12.0.1).
"""

from helios_jax.replay.lanes import (
    Lane,
    compile_lanes,
    highest_load,
    is_lower_bound,
    simulate_lanes,
)
from helios_jax.replay.machine import (
    BLOCK_TOKENS,
    MODELS,
    Drafts,
    Machine,
    RooflineSeconds,
    deal_targets,
    machine,
    saturation_seconds,
)
from helios_jax.replay.prompts import make_prompts, read_text
from helios_jax.replay.recorded import read_burstgpt_csv, read_recorded, read_trace
from helios_jax.replay.serving import Client, ReplayRequest, Run, Served, State, Update, serve
from helios_jax.replay.simulate import Outcome, Targets, simulate, summarize
from helios_jax.replay.stream_client import StreamClient
from helios_jax.replay.traces import Trace, read_azure_csv, read_mooncake_jsonl

__all__ = [
    "BLOCK_TOKENS",
    "Client",
    "Drafts",
    "Lane",
    "MODELS",
    "Machine",
    "Outcome",
    "ReplayRequest",
    "RooflineSeconds",
    "Run",
    "Served",
    "State",
    "StreamClient",
    "Targets",
    "Trace",
    "Update",
    "compile_lanes",
    "deal_targets",
    "highest_load",
    "is_lower_bound",
    "machine",
    "make_prompts",
    "read_azure_csv",
    "read_burstgpt_csv",
    "read_mooncake_jsonl",
    "read_recorded",
    "read_text",
    "read_trace",
    "saturation_seconds",
    "serve",
    "simulate",
    "simulate_lanes",
    "summarize",
]
