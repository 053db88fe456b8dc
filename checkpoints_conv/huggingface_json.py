"""Which config.json and generation_config.json state a ModelConfig in Hugging Face's words?"""

from typing import Any

from checkpoints_conv.huggingface_config import ACTIVATIONS, ARCHITECTURES, SAMPLING
from helios_jax.config import ModelConfig, RopeConfig


def huggingface_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json, which `huggingface_config` reads back as the same config.

    Args:
      dtype: the name of the weights' dtype ("bfloat16").

    Raises:
      ValueError: naming the field that no supported architecture can express.
    """
    family = _family(config)
    names = {ours: theirs for theirs, ours in reversed(ARCHITECTURES.items())}
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    values: dict[str, Any] = {
        "architectures": [names[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": _max_positions(config),
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": activations[config.activation],
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope.theta,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if family in ("llama", "qwen3"):
        values["attention_bias"] = config.attention_output_bias
    if family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if family == "mistral":
        values["sliding_window"] = config.sliding_window
    if family in ("qwen2", "qwen3"):
        values |= {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "max_window_layers": 0 if config.sliding_window is not None else config.num_layers,
        }
    scaling = _rope_scaling(config.rope)
    return values | ({"rope_scaling": scaling} if scaling is not None else {})


def generation_json(config: ModelConfig, generation: dict[str, Any]) -> dict[str, Any]:
    """generation_config.json: the recommended sampling values and the special tokens."""
    theirs = {ours: name for name, ours in SAMPLING.items()}
    values = {theirs[name]: value for name, value in generation.items() if name in theirs}
    if values.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        values["do_sample"] = values.get("temperature", 1) != 0
    tokens = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _one_or_list(config.eos_token_ids),
    }
    return values | {name: value for name, value in tokens.items() if value is not None}


def _family(config: ModelConfig) -> str:
    """The architecture whose fixed parts are the config's.

    GGUF calls Mistral "llama"; a window tells them apart.
    """
    family = config.architecture
    if family == "llama" and config.sliding_window is not None:
        family = "mistral"
    biases = {
        "llama": {(False, False), (True, True)},
        "mistral": {(False, False)},
        "qwen2": {(True, False)},
        "qwen3": {(False, False), (True, True)},
    }
    found = (config.qkv_bias, config.attention_output_bias)
    for name, value, allowed in (
        ("qkv_bias, attention_output_bias", found, biases[family]),
        ("mlp_bias", config.mlp_bias, {False, True} if family == "llama" else {False}),
        ("qk_norm", config.qk_norm, {family == "qwen3"}),
    ):
        if value not in allowed:
            raise ValueError(
                f"{name}={value}: Hugging Face's {family} models cannot have that; write a native "
                "checkpoint or GGUF"
            )
    return family


def _max_positions(config: ModelConfig) -> int:
    if config.rope.rope_type in ("linear", "dynamic"):
        return round(config.max_model_len / config.rope.factor)
    return config.max_model_len


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.rope_type == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.rope_type, "factor": rope.factor}
    if rope.rope_type != "linear":
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.rope_type == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.rope_type == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        optional = {
            "attention_factor": rope.attention_factor,
            "mscale": rope.mscale or None,
            "mscale_all_dim": rope.mscale_all_dim or None,
            "truncate": None if rope.truncate else False,
        }
        scaling |= {name: value for name, value in optional.items() if value is not None}
    return scaling


def _one_or_list(tokens: tuple[int, ...]) -> int | list[int] | None:
    return list(tokens) if len(tokens) > 1 else next(iter(tokens), None)
