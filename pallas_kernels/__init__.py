"""Pallas kernels for NVIDIA GPUs, their XLA references, and what is known of their speed.

    from pallas_kernels.int4_matmul import int4_matmul            W4A16 (and W8A16) product
    from pallas_kernels.paged_attention import paged_attention    over FP8, INT8 or 16-bit blocks
    from pallas_kernels.append_kv import append_kv                quantise and write new KV
    from pallas_kernels.sharding import sharded_int4_matmul, ...  the same on several devices
    from pallas_kernels.dispatch import in_use                    which backend served, and why

Plain arrays in and out; imports jax and numpy only. Each op is a folder: api.py (checks and entry),
problem.py (the checked description), reference.py (plain jnp, the CPU's path), triton.py (the
kernel, one source for sm_80 to sm_90 and jax 0.10.2 to 0.12), config.py (how it is cut), bytes.py
(what it must move), shapes.py (the cases all checks share). Across ops: packing and kv_format
(bits), dispatch, triton_call, devices, tuning and tuned/, predict, sharding.

    python -m pallas_kernels.aot      compiles for GPUs that are not there; gates, table
    python -m pallas_kernels.bench    measures on a GPU; elsewhere checks and prints the byte model

What the compiler shows (CUDA 12.9 assembler, jax 0.12.0.1; the full table is in aot/results/). All
loads of weights, keys and values are asynchronous and, for the models' shapes, of 16 bytes; nothing
spills.

    kernel, H200                        registers  warps/SM  KB in flight/SM  ALU an element
    4096x4096 g128, 16 rows                   120         8               48  2.2 a weight
    4096x4096 g32 with offsets, 16 rows        80         8               40  3.9 a weight
    attention 8x128 FP8, decode               242         8              128  2.6 an element
    attention 8x128 bf16, decode              208         4              128  2.1 an element
    attention 3x64 FP8, decode                107         6               48  3.3 an element

NOTHING HERE HAS RUN ON A GPU YET. Times in tuned/ are marked "predicted": `predict` makes them from
those facts and published latencies. On an H200 it expects the 4-bit product of up to 16 rows at 0.3
(8.7 MB) to 0.8 (250 MB) of the floor, FP8 decode of 8 rows at 4k context at 0.7; the targets are
printed beside them. Correctness rests on interpret mode, on emulating the inline assembly (all
bytes and codes), and on the references' agreement with float64.
"""
