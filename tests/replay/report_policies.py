"""Which policy meets more first-token targets on a recorded trace? An 8B model on an H100.

python tests/replay/report_policies.py TRACE.csv [--requests N] [--loads 0.8 1.0 1.2]

Half of the requests, drawn with a fixed seed, want their first token within a second, the others
within eight; static priority puts the former first. Step times are the byte model's at 60% of the
data sheet's bandwidth and flops. A load of 1 lets the trace's computation alone take as long as
the trace.
"""

import argparse
import functools
import time

import numpy as np

from helios_jax.config import ModelConfig
from helios_jax.profiler import H100_SXM, Formats, Hardware, kv_bytes_per_token, step_seconds
from helios_jax.replay import Targets, Trace, read_azure_csv, simulate, summarize
from helios_jax.scheduler import SchedulerConfig
from helios_jax.scheduler.urgency import POLICIES

MODEL = ModelConfig(
    "llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_model_len=16_384,
)  # fmt: skip
FORMATS = Formats(weight_bits=4, kv_bits=8)
HARDWARE = Hardware(0.6 * H100_SXM.bytes_per_second, 0.6 * H100_SXM.flops_per_second)
KV_BYTES = 8e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.0, 1.2])
    parser.add_argument("--policies", nargs="+", default=["deadline", "fcfs", "priority"])
    arguments = parser.parse_args()
    trace = read_azure_csv(arguments.trace)
    if arguments.requests:
        kept = slice(arguments.requests)
        trace = Trace(trace.arrival_seconds[kept], trace.num_prompt[kept], trace.num_output[kept])
    is_eager = np.random.default_rng(0).random(len(trace)) < 0.5
    targets = Targets(
        ttft_seconds=np.where(is_eager, 1.0, 8.0), tpot_seconds=np.full(len(trace), 0.1),
        priority=np.where(is_eager, 0, 1),
    )  # fmt: skip
    seconds = functools.partial(step_seconds, MODEL, FORMATS, HARDWARE)
    chunk = 2048
    prefill_rate = chunk / float(
        seconds(num_tokens=chunk, num_sampled=1, kv_tokens=0, attended_tokens=chunk**2 / 2)
    )
    config = SchedulerConfig(
        num_blocks=int(KV_BYTES / (16 * kv_bytes_per_token(MODEL, 8))), max_num_rows=512,
        max_model_len=MODEL.max_model_len, max_num_seqs=128, max_num_batched_tokens=chunk,
        max_rounds=16, prefill_tokens_per_second=prefill_rate, kv_watermark=float("inf"),
    )  # fmt: skip
    work = trace.num_prompt.sum() / prefill_rate
    natural = work / trace.arrival_seconds[-1]
    print(f"{len(trace)} requests, prefill {work:.0f} s of {trace.arrival_seconds[-1]:.0f} s")
    for load in arguments.loads:
        faster = trace.at_load(load / natural)
        for name in arguments.policies:
            start = time.perf_counter()
            outcome = simulate(faster, targets, config, seconds, POLICIES[name])
            summary = summarize(faster, targets, outcome)
            took = time.perf_counter() - start
            values = {k: round(v, 4) for k, v in summary.items()}
            print(f"load {load} {name} ({took:.1f} s with compilation): {values}", flush=True)


if __name__ == "__main__":
    main()
