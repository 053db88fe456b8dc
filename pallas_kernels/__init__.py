"""Pallas kernels for NVIDIA GPUs and their XLA references. Imports jax and numpy only."""
