"""Which options do several verbs share, and what is made of them?

Sampling options have vLLM's names, and `SamplingParams` checks their values. The defaults differ
where a person at a terminal wants something else than a server: temperature 0, so that the same
command prints the same text, and room for a whole answer.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from helios_jax.config import ModelConfig
    from helios_jax.sampling import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
_SAMPLING = "Sampling"
LOADING = "Model"


def _remember_debug(context: typer.Context, wanted: bool) -> None:
    if wanted:
        context.ensure_object(dict)["debug"] = True


def _option(flag: str, panel: str | None, help: str, **more: Any) -> Any:
    return typer.Option(flag, rich_help_panel=panel, help=help, **more)


Debug = Annotated[bool, _option("--debug", None, "Show tracebacks.", callback=_remember_debug)]

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        rich_help_panel=LOADING,
        help="A known name, hf:org/name[@revision], hf:org/name/file.gguf, or a local path.",
    ),
]
Dtype = Annotated[
    str,
    _option("--dtype", LOADING, "Form of the weights: auto (fastest near-lossless), float32, …"),
]
MaxModelLen = Annotated[
    int | None,
    _option("--max-model-len", LOADING, "Longest sequence, prompt included; default: the model's"),
]

KvCacheDtype = Annotated[
    str,
    _option(
        "--kv-cache-dtype", LOADING,
        "Of keys and values: fp8_e4m3, fp8_e5m2, int8, bfloat16, float16, float32, or auto.",
    ),
]  # fmt: skip
KvWatermark = Annotated[
    float,
    _option(
        "--kv-watermark", LOADING,
        "With an 8-bit KV cache: sequences longer than this use bfloat16; 0: all, inf: none.",
    ),
]  # fmt: skip

PromptLookup = Annotated[
    int | None,
    _option(
        "--prompt-lookup", LOADING,
        "Speculate: draft this many tokens by looking up what followed in the text so far.",
    ),
]  # fmt: skip
DraftModel = Annotated[
    str | None,
    _option(
        "--draft", LOADING,
        "Speculate: this draft model or head drafts, up to 4 a round; default: the shipped one.",
    ),
]  # fmt: skip
SpeculativeConfig = Annotated[
    str | None,
    _option(
        "--speculative-config", LOADING,
        'vLLM\'s JSON, such as {"model": "…", "num_speculative_tokens": 5}.',
    ),
]  # fmt: skip

System = Annotated[str | None, typer.Option("--system", help="A system message, for chat models.")]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Ask as a chat message, or continue the bare text. Default: chat where the model has "
        "a chat template.",
        show_default=False,
    ),
]
Stats = Annotated[bool, typer.Option("--stats/--no-stats", help="Print timings on standard error.")]

PlotPath = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw it too: .png, .svg or .pdf; needs 'plots'."),
]

MaxTokens = Annotated[int, _option("--max-tokens", _SAMPLING, "Longest answer, in tokens.")]
MinTokens = Annotated[int, _option("--min-tokens", _SAMPLING, "Shortest answer, in tokens.")]
Temperature = Annotated[
    float, _option("--temperature", _SAMPLING, "0 takes the likeliest token; 1 draws as trained.")
]
TopP = Annotated[float, _option("--top-p", _SAMPLING, "Draw from the likeliest mass top_p.")]
TopK = Annotated[int, _option("--top-k", _SAMPLING, "Draw from the k likeliest; 0: from all.")]
MinP = Annotated[
    float, _option("--min-p", _SAMPLING, "Drop tokens less likely than min_p times the best.")
]
Seed = Annotated[int | None, _option("--seed", _SAMPLING, "Makes drawn tokens reproducible.")]
Stop = Annotated[
    list[str] | None, _option("--stop", _SAMPLING, "A string that ends the answer; repeatable.")
]
IgnoreEos = Annotated[
    bool, _option("--ignore-eos", _SAMPLING, "Go on after the end-of-sequence token.")
]
RepetitionPenalty = Annotated[
    float, _option("--repetition-penalty", _SAMPLING, "Above 1: disfavour tokens seen so far.")
]
PresencePenalty = Annotated[
    float, _option("--presence-penalty", _SAMPLING, "Subtracted for tokens in the answer so far.")
]
FrequencyPenalty = Annotated[
    float, _option("--frequency-penalty", _SAMPLING, "Subtracted once per earlier occurrence.")
]


def sampling_params(stop: list[str] | None, **options: Any) -> "SamplingParams":
    """The options as `SamplingParams`; ValueError for a value that breaks its rule."""
    from helios_jax.sampling import SamplingParams

    return SamplingParams(stop=stop or [], **options)


def speculating(
    prompt_lookup: int | None, draft: str | None, speculative_config: str | None
) -> dict[str, Any]:
    """What the three options mean to `load_llm`; ValueError where they contradict each other."""
    given = [name for name in (prompt_lookup, draft, speculative_config) if name is not None]
    if len(given) > 1:
        raise ValueError(
            f"prompt_lookup={prompt_lookup}, draft={draft!r}, speculative_config="
            f"{speculative_config!r}: one of them says who drafts; leave the others out"
        )
    if prompt_lookup is not None:
        config: Any = {"method": "ngram", "num_speculative_tokens": prompt_lookup}
    elif draft is not None:
        config = {"model": draft}
    elif speculative_config is not None:
        try:
            config = json.loads(speculative_config)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"speculative_config={speculative_config!r}: is not JSON: {error}"
            ) from None
        if not isinstance(config, dict):
            raise ValueError(f"speculative_config={speculative_config!r}: must be a JSON object")
    else:
        return {}
    return {"speculative_config": config}


def read_prompt(prompt: str) -> str:
    """The prompt, or standard input without its last newline, as in a shell's $(...)."""
    if prompt != "-":
        return prompt
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt on standard input: must be UTF-8; {error}") from error


def check_folder(name: str, path: Path | None) -> None:
    """ValueError where a file could not be written there."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"{name}={str(path)!r}: its folder must exist")


def check_plot(path: Path | None) -> None:
    """ValueError where a picture could not be drawn, before the work it shows is done."""
    check_folder("plot", path)
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"plot={str(path)!r}: needs matplotlib; pip install 'helios-jax[plots]', or leave "
            "--plot out"
        )


def bare_config(name: str) -> "ModelConfig | None":
    """The configuration where `name` stands for nothing but one: no weights to load."""
    from helios_jax.replay import MODELS

    if name in MODELS:
        return MODELS[name]
    folder = Path(name)
    if not (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        return None
    from checkpoints_conv.huggingface_config import huggingface_config

    return huggingface_config(folder)


def load_llm(model: str, **loading: Any) -> Any:
    """`helios_jax.load`, with a progress bar where the model is pulled first."""
    import helios_jax

    return helios_jax.load(model, **loading)
