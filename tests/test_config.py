"""Are configurations refused when they cannot be meant, and kept exactly when stored?"""

import dataclasses
import json
import math

import pytest

from helios_jax.config import ModelConfig, RopeConfig

FIELDS = dict(
    architecture="llama", vocab_size=100, hidden_size=64, intermediate_size=96, num_layers=2,
    num_heads=8, num_kv_heads=4, head_dim=8, max_model_len=128,
)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position=4096)
LLAMA3 = dict(rope_type="llama3", factor=8.0, original_max_position=8192)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope": RopeConfig(**YARN, attention_factor=0.5, truncate=False)},
        {"rope": RopeConfig(**LLAMA3, theta=5e5)},
        {"architecture": "qwen3", "qk_norm": True, "sliding_window": 7, "activation": "gelu"},
        {"bos_token_id": 0, "eos_token_ids": (99, 0), "tie_word_embeddings": True},
    ],
)
def test_round_trip_through_json(changes):
    config = ModelConfig(**FIELDS | changes)
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)


def test_absent_fields_take_their_defaults():
    assert ModelConfig.from_dict(FIELDS) == ModelConfig(**FIELDS)
    given = FIELDS | {"rope": {"theta": 5e5}}
    assert ModelConfig.from_dict(given).rope == RopeConfig(theta=5e5)
    assert given == FIELDS | {"rope": {"theta": 5e5}}, "the argument is left as it was"


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig(**FIELDS).num_layers = 3  # type: ignore[misc]


POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "max_model_len",
)  # fmt: skip


@pytest.mark.parametrize("value", [0, -1, 2.5, 4.0, "4", None, True])
@pytest.mark.parametrize("name", POSITIVE)
def test_counts_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=rf"{name}={value!r}: must be an integer >= 1"):
        ModelConfig(**FIELDS | {name: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architecture": "gpt2"}, r"architecture='gpt2': must be one of \('llama', "),
        ({"activation": "relu"}, r"activation='relu': must be one of \('silu', "),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps=0.0: must be a finite number greater than 0"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan: must be a finite number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5': must be a finite number"),
        ({"num_kv_heads": 3}, "num_kv_heads=3: must divide num_heads=8"),
        ({"num_kv_heads": 16}, "num_kv_heads=16: must divide num_heads=8"),
        ({"head_dim": 7}, "head_dim=7: RoPE needs an even number"),
        ({"sliding_window": 0}, "sliding_window=0: must be an integer >= 1, or None"),
        ({"sliding_window": 1.5}, "sliding_window=1.5: must be an integer >= 1, or None"),
        ({"bos_token_id": 100}, r"bos_token_id=100: must be in 0..99 .*, an integer"),
        ({"bos_token_id": -1}, r"bos_token_id=-1: must be in 0..99 .*, an integer"),
        ({"eos_token_ids": (0, 100)}, r"eos_token_ids\[1\]=100: must be in 0..99 .*, an integer"),
        ({"eos_token_ids": ("0",)}, r"eos_token_ids\[0\]='0': must be in 0..99 .*, an integer"),
        ({"qk_norm": 1}, "qk_norm=1: must be True or False"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be True or False"),
        (
            {"head_dim": 2, "rope": RopeConfig(rope_type="dynamic", factor=2.0,
                                               original_max_position=9)},
            "head_dim=2: rope_type='dynamic' needs more than 2",
        ),
    ],
)  # fmt: skip
def test_models_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**FIELDS | changes)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rope_type": "longrope"}, r"rope_type='longrope': must be one of .* not implemented"),
        ({"rope_type": None}, "rope_type=None: must be one of"),
        ({"theta": 0.0}, "theta=0.0: must be a finite number greater than 0"),
        ({"theta": math.inf}, "theta=inf: must be a finite number"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5: must be a finite number >= 1"),
        ({"rope_type": "linear", "factor": math.nan}, "factor=nan: must be a finite number >= 1"),
        ({"rope_type": "linear", "factor": "4"}, "factor='4': must be a finite number >= 1"),
        ({"rope_type": "dynamic", "factor": 2.0}, "original_max_position=0: .*'dynamic' needs"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position=0: .*'yarn' needs"),
        ({"rope_type": "llama3", "factor": 2.0}, "original_max_position=0: .*'llama3' needs"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "high_freq_factor=4.0: must be greater than low_freq"),
        (LLAMA3 | {"low_freq_factor": 0.0}, "low_freq_factor=0.0: must be a finite number greater"),
        (YARN | {"beta_slow": 32.0}, "beta_fast=32.0: must be greater than beta_slow=32.0"),
        (YARN | {"beta_slow": 0.0}, "beta_slow=0.0: must be a finite number greater than 0"),
        (YARN | {"theta": 1.0}, "theta=1.0: rope_type='yarn' needs more than 1"),
        (YARN | {"attention_factor": 0.0}, "attention_factor=0.0: must be a finite number greater"),
        (YARN | {"attention_factor": math.nan}, "attention_factor=nan: must be a finite number"),
        (YARN | {"mscale": -1.0}, "mscale=-1.0: must be a finite number >= 0"),
        (YARN | {"mscale_all_dim": math.inf}, "mscale_all_dim=inf: must be a finite number >= 0"),
        (YARN | {"truncate": 0}, "truncate=0: must be True or False"),
        (YARN | {"original_max_position": 8.5}, "original_max_position=8.5: .* integer >= 1"),
    ],
)
def test_rope_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        (FIELDS | {"num_experts": 8}, "unknown configuration field 'num_experts': known are"),
        (FIELDS | {"rope": {"base": 1.0}}, "unknown configuration field 'rope.base': known are"),
        (
            {name: FIELDS[name] for name in FIELDS if name != "head_dim"},
            "missing configuration field 'head_dim'",
        ),
        (FIELDS | {"rope": 3}, "configuration field rope=3: must be an object"),
        (FIELDS | {"eos_token_ids": 7}, "configuration field eos_token_ids=7: must be a list"),
    ],
)
def test_stored_fields_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(fields)
