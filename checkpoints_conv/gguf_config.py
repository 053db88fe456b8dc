"""Which ModelConfig, and which default sampling values, a GGUF file's metadata stands for."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints_conv.errors import about
from checkpoints_conv.gguf_reader import GgufFile
from helios_jax.config import ModelConfig, RopeConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # mistral and smollm2 are written as "llama"

# Metadata that changes what is computed, and the value under which it does not.
_NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.output_scale": 1.0,
    "attention.sliding_window_pattern": 1,
    "attention.temperature_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "final_logit_softcapping": 0.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scaling.alpha": 0.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}

# general.sampling.* -> SamplingParams
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

# Llama 3's own values: the metadata does not hold them, only their effect (rope_freqs.weight).
_LLAMA3_HIGH, _LLAMA3_ORIGINAL = 4.0, 8192
_FREQUENCY_TOLERANCE = 1e-4


def gguf_config(gguf: GgufFile, tied: bool) -> ModelConfig:
    """The configuration of the model in `gguf`.

    Args:
      tied: whether the head is the embedding; the tensors say that, not the metadata.

    Raises:
      ValueError: naming the file and the metadata that is missing, malformed or not implemented.
    """
    metadata = _Metadata(gguf)
    head_count = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", default=hidden_size // max(head_count, 1))
    metadata.must_equal("attention.value_length", head_dim, "values as long as keys")
    metadata.must_equal("rope.dimension_count", head_dim, "RoPE over the whole head")
    metadata.must_equal("attention.scale", 1 / math.sqrt(max(head_dim, 1)), "1 / sqrt(head_dim)")
    metadata.must_equal("embedding_length_out", hidden_size, "an output as wide as the input")
    context_length = metadata.integer("context_length")
    rope = _rope(metadata, head_dim, context_length)
    if rope.rope_type == "yarn":
        context_length = max(context_length, round(rope.original_max_position * rope.factor))
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else None
    names = gguf.tensors
    try:
        return ModelConfig(
            architecture=metadata.architecture,
            vocab_size=metadata.integer("vocab_size", default=num_tokens),
            hidden_size=hidden_size,
            intermediate_size=metadata.integer("feed_forward_length"),
            num_layers=metadata.integer("block_count"),
            num_heads=head_count,
            num_kv_heads=metadata.integer("attention.head_count_kv", default=head_count),
            head_dim=head_dim,
            max_model_len=context_length,
            rms_norm_eps=_shortest(metadata.number("attention.layer_norm_rms_epsilon")),
            tie_word_embeddings=tied,
            qkv_bias="blk.0.attn_q.bias" in names,
            attention_output_bias="blk.0.attn_output.bias" in names,
            mlp_bias="blk.0.ffn_gate.bias" in names,
            qk_norm=metadata.architecture == "qwen3",
            sliding_window=metadata.integer("attention.sliding_window", default=0) or None,
            rope=rope,
            bos_token_id=next(iter(_token_ids(gguf, "bos")), None),
            # End of sequence, of turn and of message.
            eos_token_ids=_token_ids(gguf, "eos", "eot", "eom"),
        )
    except ValueError as error:
        raise about(gguf.path, error) from None


def gguf_generation(metadata: Mapping[str, Any]) -> dict[str, float | int]:
    """The sampling values that the model's makers recommend, under SamplingParams' names."""
    stated = {
        ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()
    }
    return {
        name: _shortest(value)
        for name, value in stated.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def gguf_metadata(
    config: ModelConfig, architecture: str, generation: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata that `gguf_config` and `gguf_generation` read back as these; no tokenizer.

    Raises:
      ValueError: naming the field that GGUF cannot express.
    """
    values: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_model_len,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta),
        "vocab_size": config.vocab_size,
        **_rope_metadata(config.rope),
    }
    if config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    if config.qk_norm is not (architecture == "qwen3"):
        raise ValueError(
            f"qk_norm={config.qk_norm}: GGUF's {architecture} models cannot have that; write a "
            "native checkpoint"
        )
    if config.activation != "silu":
        raise ValueError(
            f"activation={config.activation!r}: GGUF's {architecture} models have silu; write "
            "another format"
        )
    sampling = {ours: theirs for theirs, ours in _SAMPLING.items()}
    return {f"{architecture}.{key}": value for key, value in values.items()} | {
        f"general.sampling.{sampling[name]}": value
        for name, value in generation.items()
        if name in sampling
    }


def _rope_metadata(rope: RopeConfig) -> dict[str, Any]:
    """RoPE scaling; llama3's is the tensor rope_freqs.weight."""
    if rope.rope_type in ("default", "llama3"):
        return {}
    if rope.rope_type not in ("linear", "yarn"):
        raise ValueError(
            f"rope_type={rope.rope_type!r}: GGUF cannot express it; write another format"
        )
    values: dict[str, Any] = {
        "rope.scaling.type": rope.rope_type,
        "rope.scaling.factor": float(rope.factor),
    }
    if rope.rope_type == "linear":
        return values
    if rope.mscale or rope.mscale_all_dim or not rope.truncate:
        raise ValueError(
            "rope mscale, mscale_all_dim and truncate=False: GGUF cannot express them; write "
            "another format"
        )
    values["rope.scaling.original_context_length"] = rope.original_max_position
    values["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
    values["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    if rope.attention_factor is not None:
        usual = 0.1 * math.log(rope.factor) + 1
        values["rope.scaling.attn_factor"] = rope.attention_factor / usual
    return values


def _token_ids(gguf: GgufFile, *kinds: str) -> tuple[int, ...]:
    """The stated special tokens of these kinds, each once."""
    tokens: dict[int, None] = {}
    for kind in kinds:
        key = f"tokenizer.ggml.{kind}_token_id"
        token = gguf.metadata.get(key)
        if token is not None and type(token) is not int:
            raise ValueError(f"{gguf.path}: metadata {key}={token!r}: must be an integer")
        if token is not None:
            tokens[token] = None
    return tuple(tokens)


def _shortest(value: float | int) -> float | int:
    """A float32 as the decimal its writer meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(metadata: "_Metadata", head_dim: int, context_length: int) -> RopeConfig:
    theta = _shortest(metadata.number("rope.freq_base", default=10_000.0))
    factor = metadata.number("rope.scaling.factor", default=0.0)
    factor = _shortest(factor or metadata.number("rope.scale_linear", default=1.0) or 1.0)
    stated = metadata.text("rope.scaling.type", default="linear")
    scaling = "none" if stated == "linear" and factor == 1 else stated
    if scaling not in ("none", "linear", "yarn"):
        raise metadata.refused("rope.scaling.type", stated, "one of 'none', 'linear', 'yarn'")
    factors = _frequency_factors(metadata.gguf, head_dim)
    try:
        if factors is not None:
            if scaling != "none":
                raise ValueError(
                    f"both tensor 'rope_freqs.weight' and rope scaling {scaling!r} are given: "
                    "their combination is not implemented"
                )
            return _llama3_rope(theta, factors)
        if scaling == "none":
            return RopeConfig(theta=theta)
        if scaling == "linear":
            return RopeConfig(theta=theta, rope_type="linear", factor=factor)
        original = metadata.integer("rope.scaling.original_context_length", default=context_length)
        multiplier = metadata.number("rope.scaling.attn_factor", default=1.0)
        return RopeConfig(
            theta=theta,
            rope_type="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=_shortest(metadata.number("rope.scaling.yarn_beta_fast", default=32.0)),
            beta_slow=_shortest(metadata.number("rope.scaling.yarn_beta_slow", default=1.0)),
            # llama.cpp multiplies its own 0.1 ln(factor) + 1 by attn_factor.
            attention_factor=None
            if multiplier == 1 or factor <= 0
            else multiplier * (0.1 * math.log(factor) + 1),
        )
    except ValueError as error:
        raise about(metadata.gguf.path, error) from None


def _frequency_factors(gguf: GgufFile, head_dim: int) -> np.ndarray | None:
    """What rope_freqs.weight divides each RoPE frequency by: float64 [H / 2]; None without it."""
    tensor = gguf.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ValueError(
            f"{gguf.path}: tensor 'rope_freqs.weight' has type {tensor.type.name} and shape "
            f"{tensor.shape}: must be F32 of shape {(head_dim // 2,)}"
        )
    return gguf.read(tensor.name).view("<f4").astype(np.float64)


def _llama3_rope(theta: float, factors: np.ndarray) -> RopeConfig:
    """The llama3 scaling whose division of each frequency is `factors`, or a ValueError.

    The formula leaves wavelengths below original / high_freq_factor alone, divides the frequencies
    of those above original / low_freq_factor by `factor`, and in between by
    1 / ((1 - s) / factor + s), with s = (original / wavelength - low) / (high - low). s is linear
    in 1 / wavelength, so two dimensions in between determine it up to a common multiple of the
    three parameters; low_freq_factor is set to 1.
    """
    if np.all(factors == 1):
        return RopeConfig(theta=theta)
    factor = _shortest(float(factors.max()))
    candidates = [(_LLAMA3_HIGH, _LLAMA3_ORIGINAL)]
    between = (factors > 1) & (factors < factor)
    if np.isfinite(theta) and theta > 0 and between.sum() >= 2:
        rotations = 1 / _wavelengths(theta, factors.size)[between]
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(rotations, smooth, 1)
        if slope > 0 and intercept < 0:
            high = round(1 - 1 / float(intercept), 3)
            candidates.append((high, max(round(-slope / intercept), 1)))
    for high, original in candidates:
        rope = RopeConfig(
            theta=theta,
            rope_type="llama3",
            factor=factor,
            original_max_position=original,
            low_freq_factor=1.0,
            high_freq_factor=high,
        )
        expected = llama3_frequency_factors(rope, factors.size)
        if np.allclose(factors, expected, rtol=_FREQUENCY_TOLERANCE, atol=0):
            return rope
    raise ValueError(
        "tensor 'rope_freqs.weight' does not follow the llama3 formula for any factor, "
        f"low_freq_factor and high_freq_factor (its largest value is {factor}); other RoPE factors "
        "per dimension are not implemented"
    )


def llama3_frequency_factors(rope: RopeConfig, num_frequencies: int) -> np.ndarray:
    """What llama3 scaling divides each RoPE frequency by: float64 [H / 2]."""
    turns = rope.original_max_position / _wavelengths(rope.theta, num_frequencies)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = np.clip((turns - rope.low_freq_factor) / span, 0, 1) if span else turns >= 1
    return 1 / ((1 - smooth) / rope.factor + smooth)


def _wavelengths(theta: float, num_frequencies: int) -> np.ndarray:
    return 2 * np.pi * theta ** (np.arange(num_frequencies) / num_frequencies)


class _Metadata:
    """Typed access to the metadata of the file's own architecture."""

    def __init__(self, gguf: GgufFile):
        self.gguf = gguf
        architecture = gguf.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"{gguf.path}: general.architecture={architecture!r}: must be one of "
                f"{ARCHITECTURES}; this model is not implemented"
            )
        self.architecture: str = architecture
        if gguf.metadata.get("split.count", 1) not in (0, 1):
            raise ValueError(
                f"{gguf.path}: is one part of a model split into "
                f"{gguf.metadata['split.count']} files; merge them with llama.cpp's "
                "llama-gguf-split --merge"
            )
        for key, neutral in _NEUTRAL.items():
            self.must_equal(key, neutral, repr(neutral))

    def get(self, key: str, default: Any = None) -> Any:
        value = self.gguf.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ValueError(f"{self.gguf.path}: metadata {self.architecture}.{key!s} is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer >= 0; a list of one per layer, all equal, counts as one."""
        value = self.get(key, default)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise self.refused(key, value, "the same in every layer")
            value = value[0]
        if type(value) is not int or value < 0:
            raise self.refused(key, value, "an integer >= 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.refused(key, value, "a finite number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if type(value) is not str:
            raise self.refused(key, value, "text")
        return value

    def must_equal(self, key: str, neutral: Any, rule: str) -> None:
        """Refuses a stated value other than `neutral`: ignoring it would give wrong text."""
        value = self.get(key, neutral)
        same = type(value) in (bool, int, float) and math.isclose(value, neutral, rel_tol=1e-6)
        if not same:
            raise self.refused(key, value, rule)

    def refused(self, key: str, value: Any, rule: str) -> ValueError:
        shown = repr(value)
        return ValueError(
            f"{self.gguf.path}: metadata {self.architecture}.{key}="
            f"{shown if len(shown) < 80 else shown[:80] + '...'}: must be {rule}; "
            "anything else is not implemented"
        )
