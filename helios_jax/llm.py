"""LLM: load a model by name and generate, chat or stream with it."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from helios_jax.config import ModelConfig, require
from helios_jax.engine.requests import Prompt, check_prompt, check_sampling, request_output
from helios_jax.engine.row_progress import Row, RowProgress
from helios_jax.model import Transformer
from helios_jax.model.forms import ServingForm, serving_form
from helios_jax.outputs import RequestOutput, StreamOutput
from helios_jax.sampling import SamplingParams
from helios_jax.static_batch import STEPS_PER_CALL, STEPS_PER_STREAMED_CALL, run_batch
from helios_jax.tokenizer import Tokenizer

Message = Mapping[str, Any]

# A batch holds at most this many padded prompt tokens, so that a prefill's activations stay small.
MAX_BATCH_TOKENS = 4096


def load(
    model: str | os.PathLike = "smollm2-135m",
    *,
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    seed: int | None = None,
    progress: Callable | None = None,
) -> "LLM":
    """Loads a model, fetching and converting it on first use.

    Args:
      model: a known name ("smollm2-135m"), a folder in Hugging Face or native format, a GGUF file,
        or "hf:org/name".
      dtype: the form of the weights, see `helios_jax.model.forms`.
      max_model_len: the longest sequence, prompt and output; None for the model's own.
      max_num_seqs: rows that run together.
      seed: makes the seeds of requests without one reproducible.
      progress: see `helios_jax.hub.resolve`; by default a bar on a terminal.

    Raises:
      ValueError: an unknown model, a damaged checkpoint, an option that cannot be served.
    """
    from checkpoints_conv import open_checkpoint, read_params
    from helios_jax.hub import resolve

    use_compilation_cache()
    path = resolve(os.fspath(model)) if progress is None else resolve(os.fspath(model), progress)
    checkpoint = open_checkpoint(path)
    # A tokenizer may know of an end-of-sequence token that the configurations leave out.
    eos = dict.fromkeys((*checkpoint.config.eos_token_ids, *checkpoint.tokenizer.eos_token_ids))
    config = dataclasses.replace(checkpoint.config, eos_token_ids=tuple(eos))
    return LLM(
        serving_form(config, read_params(checkpoint), dtype),
        checkpoint.tokenizer,
        config=config,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        seed=seed,
    )


class LLM:
    """A model, its tokenizer and the host loop that serves requests with them.

    Attributes:
      model, params: what computes, in the form that `dtype` chose; `llm.model.apply(llm.params,
        tokens)` gives logits.
      config: the checkpoint's.
      tokenizer: text to token ids and back.
      dtype_report: which weight form serves.
      max_model_len, max_num_seqs: limits of a request and of a batch.
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
    ):
        longest = config.max_model_len
        self.max_model_len = longest if max_model_len is None else max_model_len
        require(
            2 <= self.max_model_len <= longest,
            f"max_model_len={max_model_len}: must be in 2..{longest}, the model's own limit",
        )
        require(max_num_seqs >= 1, f"max_num_seqs={max_num_seqs}: must be at least 1")
        self.max_num_seqs = max_num_seqs
        self.config = config
        self.tokenizer = tokenizer
        self._form = form
        self._rng = np.random.default_rng(seed)

    @property
    def model(self) -> Transformer:
        return self._form.model

    @property
    def params(self) -> dict[str, Any]:
        return self._form.params

    @property
    def dtype_report(self) -> str:
        return f"{self._form.dtype} on {jax.default_backend()}: {self._form.description}"

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
        return self._run(*self._requests(prompts, sampling_params), show_progress=progress)

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
        requests, sampling = self._requests([prompt], sampling_params)
        require(
            sampling[0].n == 1,
            f"n={sampling[0].n}: a stream has one output; use generate() for more",
        )
        return self._stream(requests[0], sampling[0])

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

    def _requests(self, prompts, sampling_params):
        """Checked prompts as (text or None, token ids), and one SamplingParams for each."""
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
        requests = [
            check_prompt(prompt, self.tokenizer, self.config, self.max_model_len, f"prompt {index}")
            for index, prompt in enumerate(prompts)
        ]
        return requests, [check_sampling(params, self.tokenizer) for params in sampling]

    def _run(self, requests, sampling, show_progress: bool) -> list[RequestOutput]:
        started = time.perf_counter()
        rows = [
            (i, j, Row(ids, params.output(j)))
            for i, ((_, ids), params) in enumerate(zip(requests, sampling, strict=True))
            for j in range(params.n)
        ]
        finished: dict[tuple[int, int], RowProgress] = {}
        with _progress_bar(len(rows), show_progress) as advance:
            for batch in self._batches(rows):
                *_, done = self._batch([row for _, _, row in batch], STEPS_PER_CALL)
                finished.update(((i, j), row) for (i, j, _), row in zip(batch, done, strict=True))
                advance(len(batch))
        return [
            request_output(text, ids, [finished[i, j] for j in range(params.n)], started)
            for i, ((text, ids), params) in enumerate(zip(requests, sampling, strict=True))
        ]

    def _batches(self, rows):
        """Rows of similar prompt length together, at most `max_num_seqs` of them."""
        batch: list = []
        for row in sorted(rows, key=lambda row: len(row[2].prompt_token_ids)):
            width = len(row[2].prompt_token_ids)
            full = len(batch) == self.max_num_seqs or (len(batch) + 1) * width > MAX_BATCH_TOKENS
            if batch and full:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    def _batch(self, rows: list[Row], steps_per_call: int) -> Iterator[list[RowProgress]]:
        return run_batch(
            self._form,
            self.tokenizer,
            rows,
            max_model_len=self.max_model_len,
            rng=self._rng,
            steps_per_call=steps_per_call,
        )

    def _stream(self, request, params: SamplingParams) -> Iterator[StreamOutput]:
        started = time.perf_counter()
        text, ids = request
        for (row,) in self._batch([Row(ids, params)], STEPS_PER_STREAMED_CALL):
            if row.finish_reason is None:
                yield StreamOutput(row.new_text, row.new_token_ids)
            else:
                output = request_output(text, ids, [row], started)
                yield StreamOutput(row.new_text, row.new_token_ids, row.finish_reason, output)


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
