"""What an opened checkpoint is, whichever format it came from."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from checkpoints_conv.errors import about
from checkpoints_conv.kv_scales import KvScales
from checkpoints_conv.tree import Leaf, Path, checked_leaves
from helios_jax.config import ModelConfig
from helios_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from helios_jax.speculative import DraftVocabulary


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its description is in memory, its tensors are still on the disk.

    Attributes:
      path: the file or folder.
      format: "gguf", "huggingface" or "native".
      config: the model's configuration.
      generation: the sampling values that the model's makers recommend, under SamplingParams'
        names (temperature, top_p, ...); {} if none.
      num_tensors: leaves that `tensors` yields.
      nbytes: bytes of all those leaves together.
      read_leaves, read_tokenizer: how the format reads them.
      describe_source: the format and files that the weights first came from, JSON-ready; sums of
        the files may be taken.
      kv_scales: what an FP8 KV cache of this model multiplies by, or None.
      draft_vocabulary: of a draft model that has few of its target's tokens, or None.
    """

    path: FilePath
    format: str
    config: ModelConfig
    generation: dict[str, Any]
    num_tensors: int
    nbytes: int
    read_leaves: Callable[[], Iterator[tuple[Path, Leaf]]]
    read_tokenizer: Callable[[], Tokenizer]
    describe_source: Callable[[], dict[str, Any]]
    kv_scales: KvScales | None = None
    draft_vocabulary: "DraftVocabulary | None" = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on first use; where that fails, a ValueError names the file."""
        try:
            return self.read_tokenizer()
        except ValueError as error:
            raise about(self.path, error) from error
        except (KeyError, TypeError) as error:  # values of other types than a tokenizer's
            raise ValueError(
                f"{self.path}: the tokenizer's values are malformed: {error}"
            ) from error

    def tensors(self) -> Iterator[tuple[Path, Leaf]]:
        """Every leaf of the parameters tree with its path: a numpy array, or a QuantTensor of them.

        One leaf is in memory at a time (one layer at a time for a native checkpoint), as long as
        the caller keeps none. The leaves are checked against `config` on the way.

        Raises:
          ValueError: naming the leaf that is damaged, missing or not what `config` asks for.
        """
        return checked_leaves(str(self.path), self.read_leaves(), self.config)
