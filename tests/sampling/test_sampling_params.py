"""SamplingParams and its arrays: vLLM's defaults, refusals that say what to do, padded rows."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from helios_jax.sampling import (
    SamplingParams,
    SamplingShapes,
    is_stop_token,
    sampling_shapes,
    stack_sampling,
)

BAD = [
    (dict(n=0), "n=0", ">= 1"),
    (dict(n=2, temperature=0), "n=2", "greedy"),
    (dict(temperature=math.nan), "temperature=nan", "finite"),
    (dict(temperature=math.inf), "temperature=inf", "finite"),
    (dict(temperature=-0.1), "temperature=-0.1", ">= 0"),
    (dict(temperature="hot"), "temperature='hot'", "number"),
    (dict(temperature=True), "temperature=True", "number"),
    (dict(top_p=0), "top_p=0", "(0, 1]"),
    (dict(top_p=2), "top_p=2", "(0, 1]"),
    (dict(top_p=math.nan), "top_p=nan", "finite"),
    (dict(top_k=-2), "top_k=-2", ">= -1"),
    (dict(top_k=1.5), "top_k=1.5", "integer"),
    (dict(top_k=True), "top_k=True", "integer"),
    (dict(min_p=-0.1), "min_p=-0.1", "[0, 1]"),
    (dict(min_p=1.1), "min_p=1.1", "[0, 1]"),
    (dict(repetition_penalty=0), "repetition_penalty=0", "> 0"),
    # Finite here, but not in float32.
    (dict(temperature=1e300), "temperature=1e+300", "at most 1e+30"),
    (dict(repetition_penalty=1e-300), "repetition_penalty=1e-300", "at least 1e-30"),
    (dict(logit_bias={3: -1e300}), "logit_bias[3]", "finite"),
    (dict(presence_penalty=2.1), "presence_penalty=2.1", "[-2, 2]"),
    (dict(frequency_penalty=-2.1), "frequency_penalty=-2.1", "[-2, 2]"),
    (dict(logit_bias={-1: 0.0}), "logit_bias", "-1"),
    (dict(logit_bias={3: math.inf}), "logit_bias[3]", "finite"),
    (dict(logit_bias=[3]), "logit_bias", "map"),
    (dict(allowed_token_ids=[]), "allowed_token_ids", "None"),
    (dict(allowed_token_ids=[1.0]), "allowed_token_ids", "1.0"),
    (dict(bad_words="word"), "bad_words='word'", "list"),
    (dict(bad_words=[" "]), "bad_words", "non-empty"),
    (dict(bad_words_token_ids=[[]]), "bad_words_token_ids", "empty"),
    (dict(max_tokens=0), "max_tokens=0", "1.."),
    (dict(max_tokens=-1), "max_tokens=-1", "1.."),
    (dict(min_tokens=-1), "min_tokens=-1", "0.."),
    (dict(min_tokens=17), "min_tokens=17", "max_tokens=16"),
    (dict(stop=""), "stop", "non-empty"),
    (dict(stop=["a", 3]), "stop", "3"),
    (dict(stop="a", detokenize=False), "stop", "detokenize"),
    (dict(stop_token_ids=[-1]), "stop_token_ids", "-1"),
    (dict(seed=2**63), "seed", "64-bit"),
    (dict(seed=1.5), "seed=1.5", "integer"),
    (dict(logprobs=21), "logprobs=21", "20"),
    (dict(prompt_logprobs=-2), "prompt_logprobs=-2", "-1..20"),
]


@pytest.mark.parametrize("arguments, named, rule", BAD, ids=[str(case[0]) for case in BAD])
def test_a_bad_value_is_refused_with_its_name_and_rule(arguments, named, rule):
    with pytest.raises(ValueError) as error:
        SamplingParams(**arguments)
    assert named in str(error.value) and rule in str(error.value)


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1, 1.0, 1.0, 0, 0.0,
    )  # fmt: skip
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (
        16, 0, None, None,
    )  # fmt: skip
    assert not params.has_penalties and not params.greedy
    with pytest.raises(TypeError):
        SamplingParams(beam_width=4)  # pyright: ignore[reportCallIssue]


def test_values_are_normalised():
    params = SamplingParams(stop="a", stop_token_ids=[3, 2, 3], seed=-1, top_k=np.int64(4))
    assert params.stop == ("a",) and params.stop_token_ids == (3, 2)
    assert params.seed is None and type(params.top_k) is int
    assert SamplingParams(temperature=1e-6).greedy and not SamplingParams(temperature=1e-4).greedy
    assert SamplingParams(stop=None, max_tokens=None).stop == ()  # pyright: ignore[reportArgumentType]


def test_bad_words_are_tokenised_with_and_without_a_leading_space():
    table = {"foo": [1, 2], " foo": [3, 2], "bar": [4], " bar": [9, 4], "": []}
    params = SamplingParams(bad_words=["foo", " bar"])
    assert params.tokenize_bad_words(table.__getitem__).bad_words_token_ids == (
        (1, 2), (3, 2), (4,),
    )  # fmt: skip
    with pytest.raises(ValueError, match="tokenize_bad_words"):
        params.to_arrays(1, vocab_size=10)
    with pytest.raises(ValueError, match="no token"):
        params.tokenize_bad_words(lambda text: [])


def test_ids_are_checked_against_the_vocabulary():
    for arguments in (
        dict(stop_token_ids=[10]),
        dict(allowed_token_ids=[10]),
        dict(logit_bias={10: 1.0}),
        dict(bad_words_token_ids=[[1, 10]]),
    ):
        name = next(iter(arguments))
        with pytest.raises(ValueError, match=f"{name} contains 10: must be in 0..9"):
            SamplingParams(**arguments).to_arrays(1, vocab_size=10)
    with pytest.raises(ValueError, match="eos_token_ids"):
        SamplingParams().to_arrays(1, vocab_size=10, eos_token_ids=[10])


def test_absent_parts_are_none_and_present_ones_are_padded():
    plain = SamplingParams(top_k=-1, max_tokens=None).to_arrays(2, vocab_size=10)
    assert plain.top_k_B.tolist() == [0, 0] and plain.max_tokens_B.tolist() == [2**31 - 1] * 2
    absent = (plain.min_tokens, plain.penalties, plain.logit_bias, plain.allowed_BV)
    assert absent == (None,) * 4 and plain.bad_words_BWX is None
    rows = [
        SamplingParams(),
        SamplingParams(logit_bias={1: 2.0, 3: 4.0, 5: 6.0}, allowed_token_ids=[7], top_k=99),
        SamplingParams(bad_words_token_ids=[[1], [2, 3, 4]], presence_penalty=1, min_tokens=2),
    ]
    arrays = stack_sampling(rows, vocab_size=10, eos_token_ids=(2,))
    assert arrays.top_k_B.tolist() == [0, 10, 0]
    assert arrays.logit_bias is not None and arrays.bad_words_BWX is not None
    assert arrays.logit_bias.ids_BI.tolist() == [[-1] * 4, [1, 3, 5, -1], [-1] * 4]
    assert arrays.logit_bias.values_BI.tolist()[1] == [2, 4, 6, 0]
    assert arrays.allowed_BV is not None and arrays.allowed_BV.sum(1).tolist() == [10, 1, 10]
    assert arrays.bad_words_BWX.tolist()[2] == [[-1, -1, -1, 1], [-1, 2, 3, 4]]
    assert arrays.min_tokens is not None
    assert arrays.min_tokens.suppressed_ids_BE.tolist() == [[-1], [-1], [2]]


def test_stop_tokens_and_what_min_tokens_bars():
    rows = [
        SamplingParams(stop_token_ids=[5], min_tokens=1),
        SamplingParams(stop_token_ids=[5], min_tokens=1, ignore_eos=True),
        SamplingParams(),
    ]
    arrays = stack_sampling(rows, vocab_size=10, eos_token_ids=(2, 7))
    assert arrays.stop_token_ids_BE.tolist() == [[2, 7, 5, -1], [5, -1, -1, -1], [2, 7, -1, -1]]
    assert arrays.min_tokens is not None
    assert arrays.min_tokens.suppressed_ids_BE.tolist() == [
        [2, 7, 5, -1], [2, 7, 5, -1], [-1] * 4,
    ]  # fmt: skip
    for tokens, expected in (
        ([7, 7, 7], [True, False, True]),
        ([5, 5, 5], [True, True, False]),
        ([-1, -1, -1], [False] * 3),
    ):
        assert is_stop_token(arrays, np.array(tokens)).tolist() == expected
    without = SamplingParams().to_arrays(1, vocab_size=10)
    assert is_stop_token(without, np.array([3])).tolist() == [False]


def test_seeds():
    seeded = SamplingParams(seed=-5, n=3).to_arrays(6, vocab_size=10)
    words = [[(seed % 2**64) >> 32, seed % 2**32] for seed in (-5, -4, -3)]
    assert seeded.seed_B2.tolist() == words * 2
    assert SamplingParams(seed=2**63 - 1, n=2, temperature=1).output(1).seed == -(2**63)
    fresh = SamplingParams().to_arrays(4, vocab_size=10).seed_B2.tolist()
    again = SamplingParams().to_arrays(4, vocab_size=10).seed_B2.tolist()
    assert len({tuple(row) for row in fresh + again}) == 8
    replayed = [
        SamplingParams().to_arrays(2, vocab_size=10, rng=np.random.default_rng(3)).seed_B2.tolist()
        for _ in range(2)
    ]
    assert replayed[0] == replayed[1]
    with pytest.raises(ValueError, match="batch=4: must be a positive multiple of n=3"):
        SamplingParams(n=3).to_arrays(4, vocab_size=10)
    with pytest.raises(ValueError, match="n=3: a row is one output"):
        stack_sampling([SamplingParams(n=3)], vocab_size=10)


def test_shapes_make_room_and_refuse_what_does_not_fit():
    small, large = SamplingParams(logit_bias={1: 1.0}), SamplingParams(presence_penalty=1)
    both = sampling_shapes([small]) | sampling_shapes([large])
    assert both == SamplingShapes(num_bias_ids=1, penalties=True)
    arrays = [stack_sampling([row], vocab_size=10, shapes=both) for row in (small, large)]
    shapes = [[leaf.shape for leaf in jax.tree.leaves(row)] for row in arrays]
    assert shapes[0] == shapes[1]
    with pytest.raises(ValueError, match="too small"):
        stack_sampling([large], vocab_size=10, shapes=SamplingShapes())
    with pytest.raises(ValueError, match="at least one row"):
        stack_sampling([], vocab_size=10)


def test_params_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # pyright: ignore[reportAttributeAccessIssue]
