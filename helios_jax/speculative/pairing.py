"""Do a target and a draft belong together: the same tokens, and the weights it was trained for?"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from typing import Any

from helios_jax.config import require
from helios_jax.tokenizer import Tokenizer

# Where a draft's manifest names the target it was distilled for, inside its "source".
TARGET_FINGERPRINT = "target_fingerprint"


def first_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """What first tells two tokenizers apart, in words; None where token ids mean the same.

    Compared are tokens with their ids, merges, and which tokens are special. Sizes may agree and
    ids still be swapped, so they are not enough.
    """
    if target.fingerprint() == draft.fingerprint():
        return None
    for token_id in range(max(target.vocab_size, draft.vocab_size)):
        theirs, ours = target.id_to_token(token_id), draft.id_to_token(token_id)
        if theirs != ours:
            return (
                f"token {token_id} is {theirs!r} in the target and {ours!r} in the draft (they "
                f"have {target.vocab_size} and {draft.vocab_size} tokens)"
            )
    of_target, of_draft = _merges(target), _merges(draft)
    for i in range(max(len(of_target), len(of_draft))):
        theirs, ours = (merges[i] if i < len(merges) else None for merges in (of_target, of_draft))
        if theirs != ours:
            return f"merge {i} is {theirs!r} in the target and {ours!r} in the draft"
    special = sorted(target.special_token_ids ^ draft.special_token_ids)
    if special:
        token_id = special[0]
        of_whom = "target" if token_id in target.special_token_ids else "draft"
        return (
            f"token {token_id} ({target.id_to_token(token_id)!r}) is special in the {of_whom} only"
        )
    # Two spellings of one token in a vocabulary: an id has one of them.
    return "one token has two ids, and they differ"


def require_same_tokens(target: Tokenizer, draft: Tokenizer) -> None:
    """ValueError where a draft's token ids do not mean what the target's mean."""
    difference = first_difference(target, draft)
    require(
        difference is None,
        f"draft model: its tokenizer is not the target's: {difference}; use a draft of the "
        "target's family, or prompt lookup, which needs none",
    )


def params_fingerprint(manifest: Mapping[str, Any]) -> str:
    """What a native checkpoint's parameters are known by, in hexadecimal.

    sha256 over the names and sums of all leaves: other values, another quantisation, another form
    give another one; files and their places do not matter.

    Args:
      manifest: the JSON object of manifest.json.
    """
    leaves = manifest.get("leaves")
    require(
        isinstance(leaves, Mapping)
        and all(isinstance(leaf, Mapping) and "sha256" in leaf for leaf in leaves.values()),
        "manifest: must be a native checkpoint's, with a sum for every leaf; convert the model "
        "with `helios convert`",
    )
    assert isinstance(leaves, Mapping)
    sums = sorted((name, leaf["sha256"]) for name, leaf in leaves.items())
    return hashlib.sha256(json.dumps(sums).encode()).hexdigest()


def named_target(draft_manifest: Mapping[str, Any]) -> str | None:
    """The fingerprint of the target that a draft was distilled for; None where none is named."""
    source = draft_manifest.get("source")
    named = source.get(TARGET_FINGERPRINT) if isinstance(source, Mapping) else None
    return named if isinstance(named, str) else None


def warn_of_other_target(
    target_manifest: Mapping[str, Any], draft_manifest: Mapping[str, Any]
) -> bool:
    """Warns, and is True, where a draft names another target than the one it is given.

    Only a warning: tokens stay exact, but fewer drafts will be accepted.
    """
    named, given = named_target(draft_manifest), params_fingerprint(target_manifest)
    if named is None or named == given:
        return False
    warnings.warn(
        f"the draft was distilled for the target {named}, but runs with {given}: the output stays "
        "exact, but fewer drafts may be accepted; distil it again, or use the target it was made "
        "for",
        UserWarning,
        stacklevel=2,
    )
    return True


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    model = json.loads(tokenizer.backend.to_str())["model"]
    return [
        merge.split(" ") if isinstance(merge, str) else list(merge)
        for merge in model.get("merges", [])
    ]
