"""What is to happen to each linear of a model?"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from helios_jax.config import require
from helios_jax.quant import GptqOptions, Scheme

METHODS = ("rtn", "awq", "gptq")
SKIP = "skip"


@dataclass(frozen=True)
class Rule:
    """An exception: linears whose name matches `pattern` get `scheme`; None leaves them as stored.

    Names are paths in the parameters tree without "kernel": `layers_3/ffn/down`, `lm_head`,
    `embed`. Patterns are those of the shell: `*/ffn/down`, `layers_[01]/*`.
    """

    pattern: str
    scheme: Scheme | None

    @classmethod
    def parse(cls, text: str, default: Scheme) -> "Rule":
        """PATTERN=skip, PATTERN=BITS or PATTERN=BITS:GROUP_SIZE; the rest as in `default`."""
        pattern, _, value = text.rpartition("=")
        bits, _, group_size = value.partition(":")
        try:
            require(bool(pattern), "no pattern")
            if value == SKIP:
                return cls(pattern, None)
            changes = {"bits": int(bits)} | ({"group_size": int(group_size)} if group_size else {})
            return cls(pattern, dataclasses.replace(default, **changes))
        except ValueError as error:
            raise ValueError(
                f"rule {text!r}: must be PATTERN=skip, PATTERN=BITS or PATTERN=BITS:GROUP_SIZE "
                f"({error})"
            ) from None


# The head decides every token, and a tied embedding is the head.
DEFAULT_RULES = (Rule("embed", None), Rule("lm_head", None))


@dataclass(frozen=True)
class Recipe:
    """How a model is quantised.

    Attributes:
      method: one of `METHODS`, for the linears of the layers. The head and the embedding, where a
        rule has them quantised, are rounded to nearest: the first is not followed by anything that
        could make up for it, the second has no inputs.
      scheme: of every linear that no rule names.
      rules: the last one that matches counts.
      gptq: for method "gptq".
    """

    method: str = "awq"
    scheme: Scheme = Scheme()
    rules: tuple[Rule, ...] = DEFAULT_RULES
    gptq: GptqOptions = GptqOptions()

    def __post_init__(self):
        require(self.method in METHODS, f"method={self.method!r}: must be one of {METHODS}")

    def scheme_of(self, name: str) -> Scheme | None:
        """The scheme of one linear, or None where it stays as it is."""
        matching = [rule.scheme for rule in self.rules if fnmatchcase(name, rule.pattern)]
        return matching[-1] if matching else self.scheme

    def check(self, in_features: dict[str, int]) -> None:
        """Raises ValueError unless every linear can be quantised as asked and every rule is used.

        Args:
          in_features: input channels of every linear of the model, by name.
        """
        for rule in self.rules:
            if rule not in DEFAULT_RULES and not _matches(rule.pattern, in_features):
                tied = rule.pattern == "lm_head" and "embed" in in_features
                remedy = (
                    "this model's head is its embedding, name `embed`"
                    if tied
                    else f"names are like {', '.join(_examples(in_features))}"
                )
                raise ValueError(f"rule {rule.pattern!r}: matches no linear; {remedy}")
        for name, channels in in_features.items():
            scheme = self.scheme_of(name)
            if scheme is not None:
                scheme.check(name, channels)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, for manifests and reports."""
        fields = dataclasses.asdict(self)
        if self.method != "gptq":
            del fields["gptq"]
        return fields


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _examples(names: Iterable[str]) -> Sequence[str]:
    return [name for name in names if name.startswith("layers_0/") or "layers_" not in name]
