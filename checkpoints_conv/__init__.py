"""Checkpoints of all formats are read alike, and written in most of them.

Read: native, GGUF, Hugging Face (dense, AWQ, GPTQ, compressed-tensors, FP8).
Written: native, GGUF, Hugging Face (dense, AWQ, GPTQ).
"""

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.converting import check_target, convert, write_checkpoint
from checkpoints_conv.gqa import with_kv_heads
from checkpoints_conv.kv_scales import KvScales
from checkpoints_conv.reading import open_checkpoint, read_params

__all__ = [
    "Checkpoint",
    "KvScales",
    "check_target",
    "convert",
    "open_checkpoint",
    "read_params",
    "with_kv_heads",
    "write_checkpoint",
]
