"""Which ModelConfig, and which default sampling values, a Hugging Face folder's JSON stands for.

Absent keys take the defaults of transformers' configuration class of the architecture.
"""

import math
from pathlib import Path
from typing import Any

from checkpoints_conv.json_files import read_json
from helios_jax.config import ModelConfig, RopeConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
# generation_config.json -> SamplingParams
_SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_ROPE_NUMBERS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_ROPE_OTHER = (
    "type",
    "rope_type",
    "rope_theta",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "truncate",
    "finetuned",
)
_DEFAULT_WINDOW = 4096
_MAX_POSITIONS = 2**31 - 1
_QWEN3_HEAD_DIM = 128


def huggingface_config(folder: Path) -> ModelConfig:
    """The configuration of the model in `folder`, from config.json and generation_config.json.

    Raises:
      ValueError: naming the file and the key that is missing, malformed or not implemented.
    """
    fields = _Fields(folder / "config.json", read_json(folder / "config.json"))
    architecture = _architecture(fields)
    fields.refuse_quantized()
    fields.must_equal("partial_rotary_factor", 1.0)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    max_position = fields.integer("max_position_embeddings")
    num_layers = fields.integer("num_hidden_layers")
    head_dim = fields.integer("head_dim", default=0)
    if not head_dim and architecture == "qwen3":
        head_dim = _QWEN3_HEAD_DIM
    if not head_dim:
        if num_heads < 1 or hidden_size % num_heads:
            raise fields.refused("hidden_size", f"a multiple of num_attention_heads={num_heads}")
        head_dim = hidden_size // num_heads
    activation = fields.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise fields.refused("hidden_act", f"one of {tuple(ACTIVATIONS)}")
    attention_bias = fields.boolean("attention_bias", default=False)
    rope = _rope(fields, max_position)
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.integer(
                "num_key_value_heads", default=num_heads if architecture == "llama" else None
            ),
            head_dim=head_dim,
            max_model_len=_max_model_len(rope, max_position),
            rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
            activation=ACTIVATIONS[activation],
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            qkv_bias=architecture == "qwen2" or attention_bias,
            attention_output_bias=attention_bias and architecture in ("llama", "qwen3"),
            mlp_bias=architecture == "llama" and fields.boolean("mlp_bias", default=False),
            qk_norm=architecture == "qwen3",
            sliding_window=_sliding_window(fields, architecture, num_layers),
            rope=rope,
            bos_token_id=fields.optional_integer("bos_token_id"),
            eos_token_ids=_eos_token_ids(folder, fields),
        )
    except ValueError as error:
        raise fields.wrap(error) from None


def huggingface_generation(folder: Path) -> dict[str, float | int]:
    """The sampling values that the model's makers recommend, under SamplingParams' names."""
    fields = _generation_fields(folder)
    stated = {ours: (theirs, fields.get(theirs, None)) for theirs, ours in _SAMPLING.items()}
    for theirs, value in stated.values():
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise fields.refused(theirs, "a finite number")
    return {ours: value for ours, (_, value) in stated.items() if value is not None}


def _architecture(fields: "_Fields") -> str:
    """The family, from `architectures` or else `model_type`."""
    names = fields.get("architectures", None)
    if names is None:
        model_type = fields.get("model_type", None)
        if model_type not in ARCHITECTURES.values():
            raise fields.refused("model_type", f"one of {tuple(ARCHITECTURES.values())}")
        return model_type
    if not isinstance(names, list) or len(names) != 1 or names[0] not in tuple(ARCHITECTURES):
        raise fields.refused("architectures", f"one of {tuple(ARCHITECTURES)}")
    return ARCHITECTURES[names[0]]


def _sliding_window(fields: "_Fields", architecture: str, num_layers: int) -> int | None:
    """The window of every layer, or None; a model that mixes both kinds of layers is refused.

    Qwen applies it only with use_sliding_window, and only from layer max_window_layers on.
    """
    qwen = architecture in ("qwen2", "qwen3")
    if architecture == "llama" or "sliding_window" in fields.nulls:
        return None
    if qwen and not fields.boolean("use_sliding_window", default=False):
        return None
    kinds = fields.get("layer_types", ["sliding_attention"])
    if not isinstance(kinds, list):
        raise fields.refused("layer_types", "a list")
    if qwen and "layer_types" not in fields.values:
        num_full = min(fields.integer("max_window_layers", default=28), num_layers)
        kinds = ["full_attention"] * (num_full > 0) + ["sliding_attention"] * (
            num_full < num_layers
        )
    if all(kind == "full_attention" for kind in kinds):
        return None
    if any(kind != "sliding_attention" for kind in kinds):
        shown = sorted(set(map(str, kinds)))
        raise fields.refused(
            "sliding_window", f"the same in every layer; here the layers are of kinds {shown}"
        )
    return fields.integer("sliding_window", default=_DEFAULT_WINDOW)


def _max_model_len(rope: RopeConfig, max_position: int) -> int:
    """vLLM's rule: positions times the stretch, except where config.json has stretched already."""
    positions = {
        "linear": max_position * rope.factor,
        "dynamic": max_position * rope.factor,
        "yarn": rope.original_max_position * rope.factor,
    }.get(rope.rope_type, max_position)
    if positions > _MAX_POSITIONS:
        raise ValueError(
            f"the model has {positions:g} positions: must be at most {_MAX_POSITIONS}; correct "
            "max_position_embeddings or the RoPE factor"
        )
    return round(positions)


def _rope(fields: "_Fields", max_position: int) -> RopeConfig:
    """RoPE from rope_scaling (type or rope_type) or the newer rope_parameters."""
    old, new = fields.get("rope_scaling", None), fields.get("rope_parameters", None)
    if old is not None and new is not None and old != new:
        raise fields.refused("rope_scaling", "absent, or equal to rope_parameters, where both are")
    name = "rope_scaling" if new is None else "rope_parameters"
    stated = (old if new is None else new) or {}
    if not isinstance(stated, dict):
        raise fields.refused(name, "a JSON object")
    nested = _Fields(fields.path, stated, prefix=f"{name}.")
    for key in stated:
        if key not in _ROPE_NUMBERS and key not in _ROPE_OTHER:
            raise nested.refused(key, "absent: this RoPE parameter is not implemented")
    nested.must_equal("partial_rotary_factor", 1.0)
    rope_type = nested.get("rope_type", nested.get("type", "default"))
    numbers = {
        ours: nested.number(theirs, default=None)
        for theirs, ours in _ROPE_NUMBERS.items()
        if nested.get(theirs, None) is not None
    }
    theta = nested.number("rope_theta", default=fields.number("rope_theta", default=1e4))
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if "factor" not in numbers:
        raise nested.refused("factor", f"given for rope_type={rope_type!r}")
    key = "original_max_position_embeddings"
    original = None if rope_type == "llama3" else max_position
    original = nested.integer(key, default=fields.optional_integer(key) or original)
    try:
        return RopeConfig(
            theta=theta,
            rope_type=rope_type,
            original_max_position=original,
            truncate=nested.boolean("truncate", default=True),
            **numbers,
        )
    except ValueError as error:
        raise fields.wrap(error) from None


def _eos_token_ids(folder: Path, fields: "_Fields") -> tuple[int, ...]:
    """The union of config.json's and generation_config.json's, each an integer or a list."""
    tokens: dict[int, None] = {}
    for source in (fields, _generation_fields(folder)):
        stated = source.get("eos_token_id", None)
        for token in stated if isinstance(stated, list) else [stated]:
            if token is None:
                continue
            if type(token) is not int:
                raise source.refused("eos_token_id", "an integer or a list of integers")
            tokens[token] = None
    return tuple(tokens)


def _generation_fields(folder: Path) -> "_Fields":
    path = folder / "generation_config.json"
    return _Fields(path, read_json(path) if path.exists() else {})


class _Fields:
    """Typed access to the keys of one JSON object; null counts as absent."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = ""):
        self.path = path
        self.prefix = prefix
        self.values = {key: value for key, value in values.items() if value is not None}
        self.nulls = values.keys() - self.values.keys()

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.path}: {self.prefix}{key} is missing")
        if type(value) is not int or value < 0:
            raise self.refused(key, "an integer >= 0")
        return value

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if key in self.values else None

    def number(self, key: str, default: float | None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.refused(key, "a finite number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.refused(key, "true or false")
        return value

    def must_equal(self, key: str, neutral: float) -> None:
        if self.get(key, neutral) != neutral:
            raise self.refused(key, f"{neutral}; anything else is not implemented")

    def refuse_quantized(self) -> None:
        quantization = self.get("quantization_config", None)
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise ValueError(
                f"{self.path}: quantization_config with quant_method={method!r} is not supported "
                "yet: convert from the unquantised checkpoint"
            )

    def wrap(self, error: ValueError) -> ValueError:
        """`error` with the file's name in front, once."""
        text = str(error)
        return error if text.startswith(str(self.path)) else ValueError(f"{self.path}: {text}")

    def refused(self, key: str, rule: str) -> ValueError:
        return ValueError(
            f"{self.path}: {self.prefix}{key}={str(self.get(key, None))[:200]!r}: must be {rule}"
        )
