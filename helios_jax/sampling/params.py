"""What may a request ask of sampling: `SamplingParams`, vLLM's names, defaults and meanings."""

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from helios_jax.config import require

if TYPE_CHECKING:
    import numpy as np

    from helios_jax.sampling.arrays import SamplingArrays

# Below this temperature a row is greedy: the tempered distribution is one-hot in float32 anyway.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20
# Of numbers: further computation stays finite in float32.
MAX_NUMBER = 1e30


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and when they end.

    Attributes:
      n: how many outputs to draw for the prompt; must be 1 when greedy.
      temperature: divides the logits; below 1e-5 the row is greedy, and top_k, top_p and min_p have
        no effect on it.
      top_p: keep the smallest set of most probable tokens whose mass reaches top_p; in (0, 1].
      top_k: keep the k most probable tokens; 0 or -1 keeps all.
      min_p: keep tokens at least min_p times as probable as the most probable one; in [0, 1].
      repetition_penalty: divides positive and multiplies negative logits of tokens that are in the
        prompt or the output; > 0, 1 is none (arXiv 1909.05858).
      presence_penalty: subtracted from the logit of a token that is in the output; in [-2, 2].
      frequency_penalty: subtracted once per occurrence in the output; in [-2, 2].
      logit_bias: added to the logits of these token ids; finite.
      allowed_token_ids: the only ids that may be drawn; None allows all.
      bad_words: strings that must not be produced; `tokenize_bad_words` turns them into ids.
      bad_words_token_ids: token sequences whose last id is barred where the output ends with the
        ids before it.
      max_tokens: output tokens at most; None leaves max_model_len as the only limit.
      min_tokens: output tokens before an end-of-sequence or stop token may be drawn.
      stop: strings that end the output.
      stop_token_ids: ids that end the output, beside the model's end-of-sequence ids.
      include_stop_str_in_output: keep the stop string in the text.
      ignore_eos: the end-of-sequence ids do not end the output.
      seed: a 64-bit integer makes the tokens reproducible, whatever the batch; None or -1 draws a
        fresh one. The n outputs of a prompt use seed, seed + 1, ...
      logprobs: how many of the most probable tokens to report per output token, 0 to 20, or -1 for
        the whole vocabulary; the drawn token is always reported. None reports nothing.
      prompt_logprobs: the same for the prompt's tokens.
      detokenize: turn the tokens into text; stop strings need it.
      skip_special_tokens: leave special tokens out of the text.

    Sequences are stored as tuples, a single stop string as a tuple of one.

    Raises:
      ValueError: a value breaks its rule; the message names argument, value, rule and remedy.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self):
        self._check_filters()
        self._check_lengths()
        self._check_tokens()
        self._check_strings()
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**63 - 1, "use a 64-bit seed, or None for a fresh one")
            if self.seed == -1:
                self._set("seed", None)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(
                    name, -1, MAX_LOGPROBS, "use -1 for the whole vocabulary, None for none"
                )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken instead of a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes a logit."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def tokenize_bad_words(self, encode: Callable[[str], Sequence[int]]) -> "SamplingParams":
        """These parameters with `bad_words_token_ids` filled from `bad_words`.

        Args:
          encode: text to token ids, without special tokens.

        Each word is barred as it stands and, where a leading space makes it another token sequence
        of the same length (a word in mid-sentence), in that form too.
        """
        sequences: list[tuple[int, ...]] = []
        for word in self.bad_words:
            bare = tuple(encode(word.lstrip()))
            spaced = tuple(encode(" " + word.lstrip()))
            require(
                len(bare) > 0,
                f"bad_words contains {word!r}: the tokenizer gives it no token, so it cannot be "
                "barred; remove it",
            )
            sequences.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences.append(spaced)
        return dataclasses.replace(self, bad_words_token_ids=tuple(sequences))

    def to_arrays(
        self,
        batch: int,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        rng: "np.random.Generator | None" = None,
    ) -> "SamplingArrays":
        """These parameters for a batch of `batch` rows, the n outputs of a prompt side by side.

        Row i is output i % n of its prompt: with a seed it uses seed + i % n, so that a prompt's
        tokens do not depend on what else is in the batch; without one every row gets its own.

        Args:
          batch: rows (B), a multiple of n.
          vocab_size: the model's (V); token ids are checked against it.
          eos_token_ids: the model's end-of-sequence ids.
          rng: source of the seeds of unseeded rows; None takes fresh entropy.
        """
        from helios_jax.sampling.arrays import stack_sampling

        require(
            batch >= 1 and batch % self.n == 0,
            f"batch={batch}: must be a positive multiple of n={self.n}, one row per output",
        )
        rows = [self.output(i) for i in range(self.n)] * (batch // self.n)
        return stack_sampling(rows, vocab_size=vocab_size, eos_token_ids=eos_token_ids, rng=rng)

    def output(self, index: int) -> "SamplingParams":
        """The parameters of the prompt's output `index` alone: n = 1 and its own seed."""
        if self.n == 1:
            return self
        seed = None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63
        return dataclasses.replace(self, n=1, seed=seed)

    def _check_filters(self) -> None:
        self._integer("n", 1, None, "ask for at least one output")
        self._number("temperature", "use 0 for greedy decoding, 1 for the model's own distribution")
        require(
            self.temperature >= 0,
            f"temperature={self.temperature}: must be >= 0; use 0 for greedy decoding",
        )
        self._number("top_p", "use 1 to keep every token")
        require(
            0 < self.top_p <= 1,
            f"top_p={self.top_p}: must be in (0, 1]; use 1 to keep every token, temperature=0 for "
            "greedy decoding",
        )
        self._integer("top_k", -1, None, "use 0 or -1 to keep every token")
        self._number("min_p", "use 0 to keep every token")
        require(
            0 <= self.min_p <= 1,
            f"min_p={self.min_p}: must be in [0, 1]; use 0 to keep every token",
        )
        self._number("repetition_penalty", "use 1 for none")
        require(
            self.repetition_penalty >= 1 / MAX_NUMBER,
            f"repetition_penalty={self.repetition_penalty}: must be > 0, and at least "
            f"{1 / MAX_NUMBER:g}; use 1 for none",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = self._number(name, "use 0 for none")
            require(-2 <= value <= 2, f"{name}={value}: must be in [-2, 2]; use 0 for none")
        require(
            self.n == 1 or not self.greedy,
            f"n={self.n} with temperature={self.temperature}: greedy outputs are all the same; "
            "use n=1, or a temperature above 0",
        )

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, 2**31 - 1, "use None for as many as fit the model")
        self._integer("min_tokens", 0, 2**31 - 1, "use 0 for no minimum")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens}: must be <= max_tokens={self.max_tokens}; lower one or "
            "raise the other",
        )

    def _check_tokens(self) -> None:
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            require(
                len(allowed) > 0,
                "allowed_token_ids=[]: must name at least one id; use None to allow every token",
            )
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            require(
                isinstance(self.logit_bias, Mapping),
                f"logit_bias={self.logit_bias!r}: must map token ids to numbers",
            )
            ids = [_token_id("logit_bias", key) for key in self.logit_bias]
            for token, bias in zip(ids, self.logit_bias.values(), strict=True):
                require(
                    _is_number(bias) and abs(bias) <= MAX_NUMBER,
                    f"logit_bias[{token}]={bias!r}: must be a finite number; use -100 to all but "
                    "bar a token, allowed_token_ids to bar the others for certain",
                )
            biases = [float(bias) for bias in self.logit_bias.values()]
            self._set("logit_bias", dict(zip(ids, biases, strict=True)))
        if self.bad_words_token_ids is not None:
            words = tuple(
                _token_ids("bad_words_token_ids", word, unique=False)
                for word in self.bad_words_token_ids
            )
            require(
                all(words),
                "bad_words_token_ids contains an empty sequence: each must hold at least one id; "
                "remove it",
            )
            self._set("bad_words_token_ids", words)

    def _check_strings(self) -> None:
        stop = self.stop
        self._set("stop", (stop,) if isinstance(stop, str) else tuple(stop or ()))
        require(
            not isinstance(self.bad_words, str),
            f"bad_words={self.bad_words!r}: must be a list of strings; put the word into a list",
        )
        self._set("bad_words", tuple(self.bad_words or ()))
        for name, blank in (("stop", ""), ("bad_words", " ")):
            for text in getattr(self, name):
                require(
                    isinstance(text, str) and text.strip(blank) != "",
                    f"{name} contains {text!r}: must hold non-empty strings only; remove it",
                )
        require(
            self.detokenize or not self.stop,
            f"stop={list(self.stop)} with detokenize=False: stop strings are found in the text; "
            "use stop_token_ids, or detokenize=True",
        )

    def _number(self, name: str, remedy: str) -> float:
        value = getattr(self, name)
        require(
            _is_number(value) and abs(value) <= MAX_NUMBER,
            f"{name}={value!r}: must be a finite number, at most {MAX_NUMBER:g}; {remedy}",
        )
        self._set(name, float(value))
        return float(value)

    def _integer(self, name: str, low: int, high: int | None, remedy: str) -> None:
        value = getattr(self, name)
        rule = f">= {low}" if high is None else f"in {low}..{high}"
        require(
            _is_integer(value) and value >= low and (high is None or value <= high),
            f"{name}={value!r}: must be an integer {rule}; {remedy}",
        )
        self._set(name, int(value))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _token_id(name: str, token: Any) -> int:
    require(
        _is_integer(token) and 0 <= token < 2**31,
        f"{name} contains {token!r}: must hold token ids, integers >= 0",
    )
    return int(token)


def _token_ids(name: str, tokens: Sequence[int] | None, unique: bool = True) -> tuple[int, ...]:
    ids = tuple(_token_id(name, token) for token in (() if tokens is None else tokens))
    return tuple(dict.fromkeys(ids)) if unique else ids
