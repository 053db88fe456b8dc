"""How text becomes token ids and token ids become text."""

from helios_jax.tokenizer.stream import IncrementalDecoder, StopOutput, StopStringMatcher
from helios_jax.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDecoder", "StopOutput", "StopStringMatcher", "Tokenizer"]
