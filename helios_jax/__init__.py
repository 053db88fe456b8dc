"""HELIOS-JAX: LLM inference in JAX, on NVIDIA GPUs and on a CPU."""
