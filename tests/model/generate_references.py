"""Asks transformers for the values in ../data/model/references.npz; not run by the tests.

    python -m tests.model.generate_references     # torch 2.13.0 (CPU), transformers 5.24.0

The file holds `logits/<case>`, float32 [T, V] with eager attention in float32, and of each RoPE
case `inverse_frequencies/<case>`, float32 [H / 2], and `attention_factor/<case>`.
"""

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.model.reference_models import CASES, ROPE_CASES, tokens, weights

TARGET = Path(__file__).parents[1] / "data" / "model" / "references.npz"


def reference_config(fields: dict):
    return AutoConfig.for_model(**fields)


def reference_logits(name: str) -> np.ndarray:
    config = reference_config(CASES[name])
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    state = {key: torch.from_numpy(value) for key, value in weights(name).items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens(name))[None].long()).logits[0].numpy()


def reference_rope(fields: dict) -> tuple[np.ndarray, float]:
    config = reference_config(fields)
    scaling = config.rope_parameters
    # Dynamic: at the longest sequence, where the base is the one that we use throughout.
    longest = round(config.max_position_embeddings * scaling["factor"])
    function = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    inverse, factor = function(config, torch.device("cpu"), seq_len=longest)
    return inverse.numpy(), factor


def main() -> None:
    values = {
        "tools": np.array(f"torch {torch.__version__}, transformers {transformers.__version__}")
    }
    for name in CASES:
        values[f"logits/{name}"] = reference_logits(name)
    for name, fields in ROPE_CASES.items():
        inverse, factor = reference_rope(fields)
        values[f"inverse_frequencies/{name}"] = inverse
        values[f"attention_factor/{name}"] = np.float64(factor)
    np.savez_compressed(TARGET, **values)


if __name__ == "__main__":
    main()
