"""`helios chat`: a conversation at the terminal, or line by line from a pipe."""

import sys
from typing import Any

from helios_jax.cli import options
from helios_jax.cli.options import Debug

_HELP = "/reset forgets the conversation, /exit (or end of input) leaves, Ctrl-C stops an answer"


def chat(
    model: options.Model = options.DEFAULT_MODEL,
    system: options.System = None,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    kv_watermark: options.KvWatermark = 4000,
    prompt_lookup: options.PromptLookup = None,
    draft: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    max_tokens: options.MaxTokens = 512,
    min_tokens: options.MinTokens = 0,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    debug: Debug = False,
) -> None:
    """Talk with a model.

    Each line is a message; the conversation is kept. /reset forgets it, /exit or the end of input
    leaves. Ctrl-C stops the answer; at the prompt, and where input is piped, it leaves.
    """
    params = options.sampling_params(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    llm = options.load_llm(
        model, dtype=dtype, max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype, kv_watermark=kv_watermark,
        **options.speculating(prompt_lookup, draft, speculative_config),
    )  # fmt: skip
    if llm.tokenizer.chat_template is None:
        raise ValueError(
            f"model={model!r}: has no chat template; use `helios generate --raw`, or a chat model"
        )
    interactive = sys.stdin.isatty()
    if interactive:
        _note(f"[{model}, {llm.dtype_report}; {_HELP}]")
    converse(llm, params, system, interactive)


def converse(llm: Any, params: Any, system: str | None, interactive: bool) -> None:
    """Reads messages until the input ends; an error ends it too unless somebody can react."""
    opening = [{"role": "system", "content": system}] if system is not None else []
    messages = list(opening)
    while (line := _read_line(interactive)) is not None:
        if not line:
            continue
        if line.startswith("/"):
            if line in ("/exit", "/quit"):
                return
            if line == "/reset":
                messages = list(opening)
            else:
                _note(f"[{_HELP}]" if line == "/help" else f"[unknown command {line}; {_HELP}]")
            continue
        question = {"role": "user", "content": line}
        try:
            answer = _answer(llm, [*messages, question], params, interactive)
        except ValueError as error:
            if not interactive:
                raise
            _note(f"[{error}]")
            continue
        if answer:
            messages += [question, {"role": "assistant", "content": answer}]


def _read_line(interactive: bool) -> str | None:
    """The next message without surrounding blanks; None at the end of the input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        import readline  # noqa: F401  (gives input() line editing and a history)
    except ImportError:  # not on every platform
        pass
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None


def _answer(llm: Any, messages: list[dict[str, str]], params: Any, interactive: bool) -> str:
    """Streams the answer to standard output and returns it, or what came before a Ctrl-C."""
    parts: list[str] = []
    try:
        for output in llm.stream_chat(messages, params):
            parts.append(output.text)
            sys.stdout.write(output.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not interactive:
            raise
        _note("\n[stopped; Ctrl-C again leaves]")
        return "".join(parts)
    print(flush=True)
    return "".join(parts)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
