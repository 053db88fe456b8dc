"""Measuring openly: generation, serving many requests, and from a process's first instruction.

    compare(workload, against)     decode and prefill rates of every engine, processes in turn
    measure_serving(workload)      requests one by one, together and mixed, and what they wait for
    measure_speculation(workload)  prompts of a file without and with drafts, by category
    measure_server(workload)       streams over gRPC beside the engine in process
    measure_cold_start(model)      time to the first token of a fresh process, and its memory

Every engine runs in processes of its own (`*_worker.py`), so that no engine's threads, memory or
warm caches meet another's; this package itself imports neither jax nor torch. `results` holds
the measurements that the README quotes.
"""

from helios_jax.bench.cold_start import measure_cold_start
from helios_jax.bench.comparison import compare
from helios_jax.bench.engines import PEERS
from helios_jax.bench.server import ServerWorkload, describe_server, measure_server
from helios_jax.bench.serving import measure_serving
from helios_jax.bench.serving_workload import ServingWorkload
from helios_jax.bench.speculation import SpeculationWorkload, measure_speculation
from helios_jax.bench.workload import Workload

__all__ = [
    "PEERS",
    "ServerWorkload",
    "ServingWorkload",
    "SpeculationWorkload",
    "Workload",
    "compare",
    "describe_server",
    "measure_cold_start",
    "measure_server",
    "measure_serving",
    "measure_speculation",
]
