"""What is XLA told when it compiles a model's programs, per platform?"""

from typing import Any

COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    # The vector width that int8 rows want (1.4x).
    "cpu": {"xla_cpu_prefer_vector_width": "512"},
    # XLA takes the pools that a kernel writes to for new ones, finds the memory too small for one
    # pair a layer, and computes things repeatedly to save some: in a round of 32 layers and 64 rows
    # that was 121 of 752 launches. With ten times the memory it sees no need.
    "gpu": {"xla_gpu_memory_limit_slop_factor": 1000},
}
