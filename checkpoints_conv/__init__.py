"""Checkpoint import and export: GGUF, Hugging Face safetensors, and the native Orbax format."""
