"""Which tiny models are compared with transformers, and what are their weights?

`CASES` holds each model's config.json as its makers would write it, older and newer spellings of
RoPE scaling included; `weights` its tensors, under their Hugging Face names. Both are read by
`generate_references.py`, which asks transformers for the logits, and by the tests, which ask us.
"""

import zlib

import numpy as np

NUM_TOKENS = 24

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_MISTRAL = _LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_QWEN2 = _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
# 4 heads of 24 make 96, not the 64 of the residual stream.
_QWEN3 = _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 24}


def _yarn(**fields) -> dict:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    return {"rope_scaling": scaling | fields}


CASES: dict[str, dict] = {
    # The families.
    "llama2": _LLAMA | {"num_key_value_heads": 4, "num_hidden_layers": 3},
    "llama_no_kv_heads": {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
    "smollm2": _LLAMA
    | {
        "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "llama_one_kv_head": _LLAMA | {"num_key_value_heads": 1, "head_dim": 32},
    "mistral": _MISTRAL | {"sliding_window": None},
    "mistral_window": _MISTRAL | {"sliding_window": 7},
    "qwen2": _QWEN2 | {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "qwen2_window": _QWEN2
    | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "qwen2_window_unused": _QWEN2 | {"use_sliding_window": False, "sliding_window": 5},
    "qwen3": _QWEN3 | {"rms_norm_eps": 1e-6},
    "qwen3_bias_tied": _QWEN3 | {"attention_bias": True, "tie_word_embeddings": True},
    # Activations and biases.
    "gelu": _LLAMA | {"hidden_act": "gelu"},
    "gelu_tanh": _LLAMA | {"hidden_act": "gelu_pytorch_tanh"},
    "gelu_new": _LLAMA | {"hidden_act": "gelu_new"},
    "attention_bias": _LLAMA | {"attention_bias": True},
    "mlp_bias": _LLAMA | {"mlp_bias": True},
    # RoPE scaling.
    "llama3": _LLAMA
    | {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "linear": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "linear_rope_parameters": {k: v for k, v in _LLAMA.items() if k != "rope_theta"}
    | {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}},
    # Transformers grows the base with the sequence; at the longest one both formulas are the same.
    "dynamic": _LLAMA
    | {
        "max_position_embeddings": NUM_TOKENS // 2,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "yarn": _LLAMA | _yarn(),
    "yarn_attention_factor": _LLAMA | _yarn(attention_factor=0.7),
    "yarn_mscale": _LLAMA | _yarn(mscale=1.0, mscale_all_dim=0.5),
    "yarn_one_mscale": _LLAMA | _yarn(mscale=0.8),
    "yarn_no_truncate": _LLAMA | _yarn(truncate=False, beta_fast=3.0, beta_slow=0.5),
    "qwen2_yarn": _QWEN2
    | {
        "max_position_embeddings": 16,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "qwen3_yarn": _QWEN3 | _yarn(),
}  # fmt: skip


def _published(head_dim: int, theta: float, max_position: int, **scaling) -> dict:
    return _LLAMA | {
        "hidden_size": 4 * head_dim,
        "max_position_embeddings": max_position,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


# RoPE as published models have it; only frequencies are compared.
ROPE_CASES: dict[str, dict] = {
    "llama-3.1-8b": _published(
        128, 5e5, 131072, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "llama-3.2-1b": _published(
        64, 5e5, 131072, rope_type="llama3", factor=32.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=8192,
    ),
    "qwen2.5-7b-128k": _published(
        128, 1e6, 32768, type="yarn", factor=4.0, original_max_position_embeddings=32768,
    ),
    "qwen3-8b-128k": _published(
        128, 1e6, 40960, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768,
    ),
    "yarn-llama-2-7b-64k": _published(
        128, 1e4, 65536, type="yarn", factor=16.0, original_max_position_embeddings=4096,
        finetuned=True,
    ),
    "yarn-mscale": _published(
        64, 1e4, 163840, type="yarn", factor=40.0, original_max_position_embeddings=4096,
        beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=1.0,
    ),
    "yarn-no-truncate": _published(
        64, 1.5e5, 131072, rope_type="yarn", factor=32.0, original_max_position_embeddings=4096,
        beta_fast=32.0, beta_slow=1.0, truncate=False,
    ),
    "yarn-factor-1": _published(
        128, 1e6, 32768, rope_type="yarn", factor=1.0, original_max_position_embeddings=32768,
    ),
    "linear-4": _published(128, 1e4, 4096, type="linear", factor=4.0),
    "dynamic-4": _published(128, 1e4, 4096, type="dynamic", factor=4.0),
}  # fmt: skip


def weights(name: str) -> dict[str, np.ndarray]:
    """The float32 tensors of case `name`, [out, in] as Hugging Face has them, without a tied head.

    RandomState, not Generator: numpy promises that its stream never changes.
    """
    config = CASES[name]
    random = np.random.RandomState(zlib.crc32(name.encode()))
    V, D, F = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    num_heads = config["num_attention_heads"]
    H = config.get("head_dim", D // num_heads)
    q_width, kv_width = num_heads * H, config.get("num_key_value_heads", num_heads) * H
    family = config["model_type"]
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    output_bias = config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    tensors = {"model.embed_tokens.weight": random.standard_normal((V, D))}

    def linear(module: str, num_out: int, num_in: int, bias: bool) -> None:
        tensors[f"{module}.weight"] = random.standard_normal((num_out, num_in)) / np.sqrt(num_in)
        if bias:
            tensors[f"{module}.bias"] = 0.3 * random.standard_normal(num_out)

    def norm(module: str, width: int) -> None:
        tensors[f"{module}.weight"] = 1 + 0.2 * random.standard_normal(width)

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        linear(f"{layer}.self_attn.q_proj", q_width, D, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_width, D, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_width, D, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", D, q_width, output_bias)
        linear(f"{layer}.mlp.gate_proj", F, D, mlp_bias)
        linear(f"{layer}.mlp.up_proj", F, D, mlp_bias)
        linear(f"{layer}.mlp.down_proj", D, F, mlp_bias)
        norm(f"{layer}.input_layernorm", D)
        norm(f"{layer}.post_attention_layernorm", D)
        if family == "qwen3":
            norm(f"{layer}.self_attn.q_norm", H)
            norm(f"{layer}.self_attn.k_norm", H)
    norm("model.norm", D)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = 3 * random.standard_normal((V, D)) / np.sqrt(D)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def tokens(name: str) -> np.ndarray:
    """int32 [NUM_TOKENS], the prompt of case `name`."""
    random = np.random.RandomState(zlib.crc32(name.encode()) ^ 1)
    return random.randint(CASES[name]["vocab_size"], size=NUM_TOKENS).astype(np.int32)
