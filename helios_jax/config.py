"""What a model is: frozen, hashable configurations whose checks say what to change.

Field names follow the glossary; `checkpoints_conv` maps Hugging Face's and GGUF's onto them.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def _is_integer(value: Any) -> bool:
    # Python's True is an int, but no count.
    return type(value) is int


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(
            _is_finite(value) and value > 0,
            f"{name}={value!r}: must be a finite number greater than 0",
        )


def _require_counts(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(_is_integer(value) and value >= 1, f"{name}={value!r}: must be an integer >= 1")


def _require_flags(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(type(value) is bool, f"{name}={value!r}: must be True or False")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, rotate-half convention (Hugging Face), arXiv 2104.09864.

    Attributes:
      theta: base of the frequencies.
      rope_type: "default", "linear" (positions divided by `factor`), "dynamic" (NTK-aware: theta
        grows with the sequence beyond `original_max_position`), "llama3" (low frequencies divided
        by `factor`) or "yarn" (arXiv 2309.00071).
      factor: the stretch, >= 1.
      original_max_position: positions the model was trained for before stretching.
      low_freq_factor, high_freq_factor: llama3's band limits.
      beta_fast, beta_slow: yarn's band limits, in rotations.
      attention_factor: yarn's multiplier of cos and sin; None means 0.1 ln(factor) + 1.
      mscale, mscale_all_dim: yarn's DeepSeek-style multipliers; 0 means absent.
      truncate: yarn rounds its band limits to whole dimensions.
    """

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def __post_init__(self):
        require(
            self.rope_type in ROPE_TYPES,
            f"rope_type={self.rope_type!r}: must be one of {ROPE_TYPES}; this RoPE scaling is not "
            "implemented, and ignoring it would give wrong text",
        )
        _require_positive(
            self, "theta", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"
        )
        _require_flags(self, "truncate")
        require(
            _is_finite(self.factor) and self.factor >= 1,
            f"rope factor={self.factor!r}: must be a finite number >= 1",
        )
        if self.attention_factor is not None:
            _require_positive(self, "attention_factor")
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            require(
                _is_finite(value) and value >= 0, f"{name}={value!r}: must be a finite number >= 0"
            )
        if self.rope_type in ("dynamic", "llama3", "yarn"):
            value = self.original_max_position
            require(
                _is_integer(value) and value >= 1,
                f"original_max_position={value!r}: rope_type={self.rope_type!r} needs the length "
                "the model was trained for (original_max_position_embeddings), an integer >= 1",
            )
        if self.rope_type == "llama3":
            require(
                self.high_freq_factor > self.low_freq_factor,
                f"high_freq_factor={self.high_freq_factor}: must be greater than "
                f"low_freq_factor={self.low_freq_factor}",
            )
        if self.rope_type == "yarn":
            require(
                self.beta_fast > self.beta_slow,
                f"beta_fast={self.beta_fast}: must be greater than beta_slow={self.beta_slow}",
            )
            require(self.theta > 1, f"theta={self.theta}: rope_type='yarn' needs more than 1")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention and a gated MLP.

    Attributes:
      architecture: the family, one of `ARCHITECTURES`; what is computed depends on the other fields
        alone, this one names the checkpoint's tensor layout.
      vocab_size: rows of the embedding (V).
      hidden_size: width of the residual stream (D).
      intermediate_size: width of the MLP (F).
      num_layers, num_heads, num_kv_heads, head_dim: L, N, K, H; N is a multiple of K.
      max_model_len: the longest sequence, prompt and output together.
      rms_norm_eps: added to the mean square.
      activation: of the MLP's gate, one of `ACTIVATIONS`.
      tie_word_embeddings: the head is the transposed embedding.
      qkv_bias, attention_output_bias, mlp_bias: which linears carry a bias.
      qk_norm: RMS norm over each head of q and k before RoPE (Qwen3).
      sliding_window: positions a query sees, itself included; None for all.
      rope: rotary position embedding.
      bos_token_id: None where the model has none.
      eos_token_ids: the union of config.json's and generation_config.json's.
      is_draft_head: not a transformer but a `DraftHead`: its layers are MLPs on the hidden states
        of a target of the same hidden_size, and what is said about attention is left unused.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float = 1e-5
    activation: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    rope: RopeConfig = RopeConfig()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    is_draft_head: bool = False

    def __post_init__(self):
        require(
            self.architecture in ARCHITECTURES,
            f"architecture={self.architecture!r}: must be one of {ARCHITECTURES}",
        )
        require(
            self.activation in ACTIVATIONS,
            f"activation={self.activation!r}: must be one of {ACTIVATIONS}",
        )
        _require_counts(
            self, "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_model_len",
        )  # fmt: skip
        _require_positive(self, "rms_norm_eps")
        _require_flags(
            self, "tie_word_embeddings", "qkv_bias", "attention_output_bias", "mlp_bias", "qk_norm",
            "is_draft_head",
        )  # fmt: skip
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads={self.num_kv_heads}: must divide num_heads={self.num_heads}",
        )
        require(self.head_dim % 2 == 0, f"head_dim={self.head_dim}: RoPE needs an even number")
        require(
            self.rope.rope_type != "dynamic" or self.head_dim > 2,
            f"head_dim={self.head_dim}: rope_type='dynamic' needs more than 2",
        )
        window = self.sliding_window
        require(
            window is None or (_is_integer(window) and window >= 1),
            f"sliding_window={window!r}: must be an integer >= 1, or None for full attention",
        )
        named = {"bos_token_id": self.bos_token_id} if self.bos_token_id is not None else {}
        named |= {f"eos_token_ids[{i}]": token for i, token in enumerate(self.eos_token_ids)}
        for name, token in named.items():
            require(
                _is_integer(token) and 0 <= token < self.vocab_size,
                f"{name}={token!r}: must be in 0..{self.vocab_size - 1} (vocab_size), an integer",
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict that `from_dict` turns back into an equal config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "ModelConfig":
        """The inverse of `to_dict`; an unknown or missing field is a ValueError that names it."""
        rope = fields.get("rope", {})
        require(isinstance(rope, dict), f"configuration field rope={rope!r}: must be an object")
        eos = fields.get("eos_token_ids", ())
        require(
            isinstance(eos, list | tuple),
            f"configuration field eos_token_ids={eos!r}: must be a list",
        )
        converted = {"rope": _build(RopeConfig, rope, "rope."), "eos_token_ids": tuple(eos)}
        return _build(cls, fields | converted, "")


def _build(cls: type, fields: dict[str, Any], prefix: str) -> Any:
    known = {field.name: field for field in dataclasses.fields(cls)}
    for name in fields:
        require(
            name in known,
            f"unknown configuration field {prefix + name!r}: known are {sorted(known)}",
        )
    for name, field in known.items():
        required = field.default is dataclasses.MISSING
        require(name in fields or not required, f"missing configuration field {prefix + name!r}")
    return cls(**fields)
