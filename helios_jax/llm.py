"""LLM: load a model by name and generate, chat or stream with it."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from helios_jax.config import ModelConfig, require
from helios_jax.engine import Engine, EngineConfig
from helios_jax.engine.requests import Prompt
from helios_jax.model import Transformer
from helios_jax.model.forms import ServingForm, require_whole_model, serving_form
from helios_jax.outputs import RequestOutput, StreamOutput
from helios_jax.sampling import SamplingParams
from helios_jax.scheduler import Urgency
from helios_jax.scheduler.urgency import deadline
from helios_jax.speculative import Speculation, SpeculationParams
from helios_jax.speculative_config import load_speculation
from helios_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from checkpoints_conv import Checkpoint

Message = Mapping[str, Any]


def load(
    model: str | os.PathLike = "smollm2-135m",
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    seed: int | None = None,
    urgency: Urgency = deadline,
    progress: Callable | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    record: str | os.PathLike | None = None,
    **engine_options: Any,
) -> "LLM":
    """Loads a model, fetching and converting it on first use.

    Args:
      model: a known name ("smollm2-135m"), a folder in Hugging Face or native format, a GGUF file,
        or "hf:org/name".
      dtype: the form of the weights, see `helios_jax.model.forms`.
      max_model_len: the longest sequence, prompt and output; None for the model's own.
      max_num_seqs: rows that run together.
      seed: makes the seeds of requests without one reproducible.
      urgency: which request goes first, see `helios_jax.scheduler.urgency`.
      progress: see `helios_jax.hub.resolve`; by default a bar on a terminal.
      speculative_config: who drafts, by vLLM's keys, see `helios_jax.speculative_config`; None for
        nobody. (An object of your own goes to `speculation`, see `LLM`.)
      record: a new file for what `helios_jax.engine.replay` needs to compute the run again.
      engine_options: `kv_cache_dtype`, `kv_watermark`, `kv_cache_memory_bytes`,
        `gpu_memory_utilization`, `max_num_batched_tokens`, `enable_prefix_caching` and the other
        fields of `helios_jax.engine.EngineConfig`.

    Raises:
      ValueError: an unknown model, a damaged checkpoint, an option that cannot be served.
    """
    from checkpoints_conv import open_checkpoint
    from helios_jax.hub import resolve

    path = resolve(os.fspath(model)) if progress is None else resolve(os.fspath(model), progress)
    return load_checkpoint(
        open_checkpoint(path),
        dtype=dtype,
        speculative_config=speculative_config,
        progress=progress,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        seed=seed,
        urgency=urgency,
        record=record,
        **engine_options,
    )


def load_checkpoint(
    checkpoint: "Checkpoint",
    *,
    dtype: str = "auto",
    speculative_config: Mapping[str, Any] | None = None,
    progress: Callable | None = None,
    **options: Any,
) -> "LLM":
    """`load` for a checkpoint that is open, and perhaps changed since.

    Args:
      checkpoint: what `checkpoints_conv.open_checkpoint` gave.
      dtype, speculative_config, progress: see `load`.
      options: of `LLM`.

    Raises:
      ValueError: as `load`.
    """
    from checkpoints_conv import read_params

    require_whole_model(checkpoint.config)
    use_compilation_cache()
    # A tokenizer may know of an end-of-sequence token that the configurations leave out.
    eos = dict.fromkeys((*checkpoint.config.eos_token_ids, *checkpoint.tokenizer.eos_token_ids))
    config = dataclasses.replace(checkpoint.config, eos_token_ids=tuple(eos))
    if speculative_config is not None:
        require(
            "speculation" not in options,
            "speculative_config and speculation: must not both be given",
        )
        speculation, extra = load_speculation(
            speculative_config, checkpoint.path, checkpoint.tokenizer, dtype, progress
        )
        options |= {"speculation": speculation, "speculation_params": extra}
    form = serving_form(config, read_params(checkpoint), dtype)
    return LLM(form, checkpoint.tokenizer, config=config, **options)


class LLM:
    """A model, its tokenizer and the engine that serves requests with them.

    Attributes:
      model, params: what computes, in the form that `dtype` chose; `llm.model.apply(llm.params,
        tokens)` gives logits.
      config: the checkpoint's.
      tokenizer: text to token ids and back.
      dtype_report: which weight form serves.
      engine: what `generate` and `stream` run on; serves requests from many threads.
      max_model_len, max_num_seqs: limits of a request and of those that run together.
    """

    def __init__(
        self,
        form: ServingForm,
        tokenizer: Tokenizer,
        *,
        config: ModelConfig,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        seed: int | None = None,
        urgency: Urgency = deadline,
        speculation: Speculation | None = None,
        speculation_params: SpeculationParams | None = None,
        record: str | os.PathLike | None = None,
        **engine_options: Any,
    ):
        """
        Args:
          form: model, parameters and their dtype, see `model.forms`.
          tokenizer: text to token ids and back.
          config: the checkpoint's.
          max_model_len, max_num_seqs, seed, urgency, engine_options: see `load`.
          speculation, speculation_params, record: see `Engine`.
        """
        self.config = config
        self.tokenizer = tokenizer
        self._form = form
        self.engine = Engine(
            form,
            tokenizer,
            model_config=config,
            config=EngineConfig(
                max_model_len=max_model_len, max_num_seqs=max_num_seqs, **engine_options
            ),
            urgency=urgency,
            seed=seed,
            speculation=speculation,
            speculation_params=speculation_params,
            record=record,
        )
        self.max_model_len = self.engine.max_model_len
        self.max_num_seqs = max_num_seqs

    @property
    def model(self) -> Transformer:
        return self._form.model

    @property
    def params(self) -> dict[str, Any]:
        return self._form.params

    @property
    def dtype_report(self) -> str:
        kv_dtype = self.engine.step_config.narrow_dtype
        return (
            f"{self._form.dtype} on {jax.default_backend()}: {self._form.description}; "
            f"{kv_dtype} KV cache"
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Completes every prompt; the outputs are in the prompts' order.

        Args:
          prompts: text or token ids, one or several.
          sampling_params: for all prompts, or one per prompt; None for the defaults. `max_tokens`
            beyond what `max_model_len` leaves after the prompt is cut down to that.
          progress: show a progress bar over the prompts.

        Raises:
          ValueError: an empty prompt, a token id out of range, a prompt that leaves no room for a
            token, parameters that do not fit; nothing has been generated then.
        """
        prompts, sampling = self._pairs(prompts, sampling_params)
        with _progress_bar(sum(params.n for params in sampling), progress) as advance:
            return self.engine.generate(prompts, sampling, progress=advance)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several: messages are dicts with `role` and `content`.

        The model's chat template turns them into a prompt; `template_variables` reach it (tools,
        add_generation_prompt, chat_template, …).
        """
        single = len(messages) == 0 or isinstance(messages[0], Mapping)
        conversations = [messages] if single else messages
        prompts = [self._render(c, template_variables) for c in conversations]
        return self.generate(prompts, sampling_params, progress=progress)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamOutput]:
        """Completes one prompt (n = 1) and yields text as it comes.

        Arguments are checked at the call, not at the first token. Closing the iterator ends the
        request.
        """
        return self.engine.stream(prompt, sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_variables: Any,
    ) -> Iterator[StreamOutput]:
        """`stream` for a conversation, see `chat`."""
        return self.stream(self._render(messages, template_variables), sampling_params)

    def _render(self, messages, template_variables: dict[str, Any]) -> str:
        return self.tokenizer.apply_chat_template(messages, **template_variables)

    def _pairs(self, prompts, sampling_params):
        """Prompts, and one SamplingParams for each."""
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
            prompts = [prompts]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling = [sampling_params or SamplingParams()] * len(prompts)
        else:
            sampling = list(sampling_params)
        require(
            len(sampling) == len(prompts),
            f"sampling_params has {len(sampling)} entries for {len(prompts)} prompts: give one for "
            "all, or one per prompt",
        )
        return prompts, sampling


def use_compilation_cache() -> None:
    """Keeps compiled programs under the user cache, unless the user has set a place for them."""
    from helios_jax.hub import cache_dir

    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(Path(cache_dir()) / "xla"))
        # The many small programs of a load are worth keeping too.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


@contextlib.contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int], Any]]:
    """Gives a function that advances a rich bar, or one that does nothing."""
    if not shown:
        yield lambda count: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        task = bar.add_task("generate", total=total)
        yield lambda count: bar.advance(task, count)
