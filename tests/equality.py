"""The one rule for when two greedy continuations count as equal.

Equal in float32 mode, or the first difference sits where the top two logits differ by less than
`NEAR_TIE`; at most one such exception per `TOKENS_PER_EXCEPTION` tokens, and they are printed.
"""

import jax.numpy as jnp
import numpy as np

NEAR_TIE = 1e-3
TOKENS_PER_EXCEPTION = 2000


class EqualityRule:
    """Collects comparisons; `check` fails where they break the rule.

    Args:
      model, params: float32, to judge near-ties with.
      near_tie, max_exceptions: for other forms, whose roundings are larger; None for the rule's.
    """

    def __init__(self, model, params, near_tie=NEAR_TIE, max_exceptions: int | None = None):
        self.model, self.params = model, params
        self.near_tie, self.max_exceptions = near_tie, max_exceptions
        self.num_tokens = 0
        self.exceptions: list[str] = []

    def compare(self, prompt, expected, found) -> None:
        """Compares two continuations (token ids) of `prompt`."""
        expected, found = list(map(int, expected)), list(map(int, found))
        self.num_tokens += len(expected)
        if expected == found:
            return
        pairs = list(zip(expected, found, strict=False))
        where = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        sequence = jnp.asarray([[*prompt, *expected[:where]]], jnp.int32)
        logits_V = np.asarray(self.model.apply(self.params, sequence)[0, -1])
        top = np.sort(logits_V)[-2:]
        gap = float(top[1] - top[0])
        assert gap < self.near_tie, (
            f"token {where}: expected {expected[where:][:3]}, found {found[where:][:3]}, and the "
            f"top two logits differ by {gap:.4f}, no near-tie"
        )
        self.exceptions.append(f"token {where} of {len(expected)}, gap {gap:.1e}")

    def check(self) -> None:
        print(f"near-ties: {len(self.exceptions)} in {self.num_tokens} tokens: {self.exceptions}")
        allowed = self.max_exceptions
        if allowed is None:
            allowed = max(1, self.num_tokens // TOKENS_PER_EXCEPTION)
        assert len(self.exceptions) <= allowed, self.exceptions
