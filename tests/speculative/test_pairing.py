"""Which drafts are refused for a target, which are warned of, and what is said."""

import warnings

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from helios_jax.speculative.pairing import (
    first_difference,
    named_target,
    params_fingerprint,
    require_same_tokens,
    warn_of_other_target,
)
from helios_jax.tokenizer import Tokenizer

TOKENS = ["a", "b", "c", "ab", "bc"]
MERGES = [("a", "b"), ("b", "c")]


def tokenizer(tokens=TOKENS, merges=MERGES, special=("<s>",), **facts):
    backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=list(merges)))
    backend.add_tokens([token for token in ("<s>", "</s>") if token not in special])
    backend.add_special_tokens(list(special))
    return Tokenizer(backend, **facts)


BOTH = ("<s>", "</s>")


@pytest.mark.parametrize(
    "draft, message",
    [
        (
            {"tokens": ["a", "c", "b", "ab", "bc"], "special": BOTH},
            r"token 1 is 'b' in the target and 'c' in the draft \(they have 7 and 7 tokens\)",
        ),
        (
            {"tokens": [*TOKENS, "d"], "special": BOTH},
            r"token 5 is '<s>' in the target and 'd' in the draft \(they have 7 and 8 tokens\)",
        ),
        (
            {"merges": MERGES[::-1], "special": BOTH},
            r"merge 0 is \['a', 'b'\] in the target and \['b', 'c'\] in the draft",
        ),
        ({"merges": MERGES[:1], "special": BOTH}, r"merge 1 is \['b', 'c'\] .* and None in the dr"),
    ],
    ids=["swapped", "one more", "order of merges", "a merge less"],
)
def test_the_first_difference_is_named_and_refused(draft, message):
    target = tokenizer(special=BOTH)
    with pytest.raises(ValueError, match=message):
        require_same_tokens(target, tokenizer(**draft))


def test_special_tokens_count():
    def with_special(*special):
        backend = Backend(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=MERGES))
        backend.add_tokens(["<s>"]) if "<s>" not in special else backend.add_special_tokens(["<s>"])
        return Tokenizer(backend)

    difference = first_difference(with_special("<s>"), with_special())
    assert difference == "token 5 ('<s>') is special in the target only"


def test_what_ends_a_text_is_no_difference():
    target, draft = tokenizer(special=BOTH), tokenizer(special=BOTH, eos_token_ids=(6,))
    assert first_difference(target, draft) is None
    require_same_tokens(target, draft)


def manifest(source=None, **sums):
    leaves = {name: {"kind": "array", "sha256": value} for name, value in sums.items()}
    return {"source": source or {}, "leaves": leaves}


def test_a_draft_for_other_weights_is_warned_of_with_both_fingerprints():
    target, other = manifest(embed="1", norm="2"), manifest(embed="1", norm="3")
    made_for, given = params_fingerprint(other), params_fingerprint(target)
    assert made_for != given == params_fingerprint(manifest(norm="2", embed="1"))
    draft = manifest({"target_fingerprint": made_for}, embed="9")
    with pytest.warns(UserWarning, match=f"distilled for the target {made_for}.* with {given}"):
        assert warn_of_other_target(target, draft)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not warn_of_other_target(other, draft)
        assert not warn_of_other_target(target, manifest(embed="9")), "names no target"
    assert named_target(draft) == made_for and named_target(target) is None


def test_a_manifest_without_sums_is_refused():
    with pytest.raises(ValueError, match="must be a native checkpoint's"):
        params_fingerprint({"leaves": {"embed": {"kind": "array"}}})
