"""Do vLLM's options give the proposer that they name, and is a draft that does not fit refused?"""

import json

import jax
import pytest

import helios_jax
from checkpoints_conv import convert, open_checkpoint
from helios_jax.speculative import AdaptiveLength, DraftModel, FixedLength, PromptLookup
from helios_jax.speculative_config import load_speculation
from tests.checkpoints.tiny_checkpoints import (
    random_weights,
    tiny_config,
    write_huggingface,
    write_tokenizer,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A native checkpoint."""
    folder = tmp_path_factory.mktemp("target")
    config = tiny_config()
    source = write_huggingface(folder / "source", config, random_weights(config))
    convert(source, folder / "model")
    return folder / "model"


def load(config, target):
    return load_speculation(config, target, open_checkpoint(target).tokenizer, "float32")


def test_prompt_lookup(target):
    config = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3}
    speculation, extra = load(config, target)
    assert speculation.proposer == PromptLookup(max_ngram=3, min_ngram=2)
    assert speculation.max_num_draft_tokens == 6 and extra.proposer is None
    assert speculation.controller == AdaptiveLength()
    assert speculation.pass_lengths == (0, 1, 4, 6)
    speculation, _ = load({"method": "ngram"}, target)
    assert speculation.max_num_draft_tokens == 10
    one, _ = load({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 1}, target)
    assert one.pass_lengths == (0, 1)
    assert one.proposer == PromptLookup(max_ngram=1, min_ngram=1)


def test_a_draft_model(target, tmp_path):
    config = {"model": str(target), "num_speculative_tokens": 2, "controller": "fixed"}
    speculation, extra = load(config, target)
    assert isinstance(speculation.proposer, DraftModel)
    assert speculation.controller == FixedLength() and speculation.pass_lengths == (0, 2)
    assert jax.tree.leaves(extra.proposer)
    llm = helios_jax.load(
        str(target), dtype="float32", max_num_seqs=1, speculative_config={"model": str(target)}
    )
    assert llm.engine.step_config.num_draft_tokens == 4
    assert isinstance(llm.engine.step_config.speculation.proposer, DraftModel)


def test_the_shipped_draft_is_refused_by_other_models(target):
    with pytest.raises(ValueError, match="its tokenizer is not the target's"):
        load({"model": "default"}, target)


def test_a_draft_of_other_tokens_or_for_another_target(target, tmp_path):
    config = tiny_config(vocab_size=40, bos_token_id=38, eos_token_ids=(39,))
    other = write_huggingface(tmp_path / "other", config, random_weights(config))
    write_tokenizer(other, 40)
    with pytest.raises(ValueError, match="its tokenizer is not the target's: token 38"):
        load({"model": str(other)}, target)

    distilled = tmp_path / "distilled"
    convert(target, distilled)
    manifest = json.loads((distilled / "manifest.json").read_text())
    manifest["source"]["target_fingerprint"] = "0" * 64
    (distilled / "manifest.json").write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match="distilled for the target 000"):
        load({"model": str(distilled)}, target)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"method": "eagle"}, "method='eagle': must be 'ngram'"),
        ({}, "method=None: must be 'ngram'"),
        ({"method": "ngram", "model": "m"}, "prompt lookup takes none"),
        ({"method": "draft_model"}, "a draft model needs one"),
        ({"method": "ngram", "num_tokens": 3}, "'num_tokens' is unknown; must be one of method"),
        ({"method": "ngram", "controller": "pid"}, "controller='pid': must be one of fixed"),
        ({"method": "ngram", "prompt_lookup_max": 0}, "min_ngram=0, max_ngram=0: must be"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "max_num_draft_tokens=-1"),
    ],
)
def test_what_names_nobody_is_refused(target, config, message):
    with pytest.raises(ValueError, match=message):
        load(config, target)
