"""Checkpoints: GGUF, Hugging Face and native ones are read alike; any of them becomes native."""

from checkpoints_conv.checkpoint import Checkpoint
from checkpoints_conv.converting import check_target, convert, write_checkpoint
from checkpoints_conv.reading import open_checkpoint, read_params

__all__ = [
    "Checkpoint",
    "check_target",
    "convert",
    "open_checkpoint",
    "read_params",
    "write_checkpoint",
]
