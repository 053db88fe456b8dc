"""`helios generate`: one prompt in, text out."""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from helios_jax.cli import options
from helios_jax.cli.options import Debug


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: options.Model = options.DEFAULT_MODEL,
    system: options.System = None,
    chat: options.Chat = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the RequestOutput as one line of JSON.")
    ] = False,
    stats: options.Stats = True,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    kv_watermark: options.KvWatermark = 4000,
    prompt_lookup: options.PromptLookup = None,
    draft: options.DraftModel = None,
    speculative_config: options.SpeculativeConfig = None,
    max_tokens: options.MaxTokens = 256,
    min_tokens: options.MinTokens = 0,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    n: Annotated[int, typer.Option("--n", help="Answers to draw; needs a temperature.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", help="Report this many per token; needs --json.")
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option("--prompt-logprobs", help="The same for the prompt's tokens.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Generate text.

    The text goes to standard output as it is made, one line of statistics to standard error. An
    instruct model gets the prompt as a chat message, through its chat template; --raw makes it
    continue the prompt instead. A model that is not there yet is pulled first.
    """
    if not as_json and (logprobs is not None or prompt_logprobs is not None):
        raise ValueError(
            f"logprobs={logprobs}, prompt_logprobs={prompt_logprobs}: are reported in JSON only; "
            "add --json"
        )
    text = options.read_prompt(prompt)
    params = options.sampling_params(
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    llm = options.load_llm(
        model, dtype=dtype, max_model_len=max_model_len,
        kv_cache_dtype=kv_cache_dtype, kv_watermark=kv_watermark,
        **options.speculating(prompt_lookup, draft, speculative_config),
    )  # fmt: skip
    text = _as_prompt(llm.tokenizer, text, system, chat)
    if as_json:
        [output] = llm.generate([text], params)
        print(json.dumps(to_json(output), ensure_ascii=False, allow_nan=False))
    elif n > 1:
        [output] = llm.generate([text], params)
        for completion in output.outputs:
            print(f"--- {completion.index}\n{completion.text}")
    else:
        _stream(llm, text, params, stats)


def to_json(value: Any) -> Any:
    """Dataclasses, mappings, sequences and numpy values as what json.dumps takes.

    JSON has no infinities: a logprob that is not finite becomes null.
    """
    if dataclasses.is_dataclass(value):
        return {
            field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's scalars and arrays
        return to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _as_prompt(tokenizer: Any, text: str, system: str | None, chat: bool | None) -> str:
    """What the model reads: the text itself, or the conversation that it begins."""
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        if system is not None:
            raise ValueError(
                f"system={system!r}: needs a chat template; without one (or with --raw), write it "
                "into the prompt"
            )
        return text
    if not text:
        raise ValueError("prompt='': must not be empty; give a text, or - for standard input")
    messages = [{"role": "system", "content": system}] if system is not None else []
    return tokenizer.apply_chat_template([*messages, {"role": "user", "content": text}])


def _stream(llm: Any, prompt: str, params: Any, stats: bool) -> None:
    num_tokens, finish_reason = 0, None
    started = time.perf_counter()
    first = started
    for output in llm.stream(prompt, params):
        if num_tokens == 0 and output.token_ids:
            first = time.perf_counter()
        num_tokens += len(output.token_ids)
        finish_reason = output.finish_reason or finish_reason
        sys.stdout.write(output.text)
        sys.stdout.flush()
    ended = time.perf_counter()
    print(flush=True)
    if stats:
        # The first token's time is the prompt's; what follows is decoding.
        rate = f", {(num_tokens - 1) / (ended - first):.1f} tokens/s" if num_tokens > 1 else ""
        cut = f" (cut at --max-tokens {params.max_tokens})" if finish_reason == "length" else ""
        print(
            f"[{llm.dtype_report}; prompt {len(llm.tokenizer.encode(prompt))} tokens, "
            f"first token {first - started:.2f} s; {num_tokens} tokens{cut}{rate}]",
            file=sys.stderr,
        )
