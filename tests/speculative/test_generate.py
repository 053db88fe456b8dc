"""Speculative generation against the pure generate(): tokens, ends, logprobs, caches, programs."""

import dataclasses
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax import generate
from helios_jax.cache.paged import init_pools
from helios_jax.model import Transformer, init_params
from helios_jax.sampling import NON_FINITE, STOP, SamplingParams, sampling_shapes, stack_sampling
from helios_jax.speculative import (
    AdaptiveLength,
    CostTable,
    DraftModel,
    PromptLookup,
    Proposer,
    ProposerState,
    Speculation,
    SpeculationParams,
    assumed_costs,
    begin,
    read_acceptance,
    speculative_generate,
    speculative_round,
)
from helios_jax.speculative.draft_model import DraftCache
from tests import tiny
from tests.equality import EqualityRule
from tests.speculative import law

VOCAB, J, NEW = 64, 3, 24
CONFIG = tiny.config(
    vocab_size=VOCAB,
    num_heads=2,
    num_kv_heads=1,
    bos_token_id=None,
    eos_token_ids=(1,),
    tie_word_embeddings=False,
)
MODEL = Transformer(CONFIG)
# The same with fewer positions, so that some rows outgrow the draft.
DRAFT = Transformer(dataclasses.replace(CONFIG, max_model_len=24))
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
EVERYTHING = SamplingParams(
    presence_penalty=0.5, min_tokens=1, logit_bias={0: 1.0, 2: 1.0}, allowed_token_ids=[3],
    bad_words_token_ids=[[1, 2], [3, 4]], stop_token_ids=[5],
)  # fmt: skip
# One shape for all tests, so that they share their programs.
SHAPES = sampling_shapes([EVERYTHING], eos_token_ids=CONFIG.eos_token_ids)
PROMPTS = np.random.default_rng(0).integers(2, VOCAB, size=(4, 9)).astype(np.int32)
LENGTHS = np.array([9, 4, 1, 7], np.int32)
EAGER = assumed_costs(J, 0.0)


@cache
def params_of(seed: int):
    params = init_params(CONFIG, jax.random.key(seed))
    # Larger weights than training starts from, so that the logits differ clearly.
    return jax.tree.map(lambda leaf: leaf * 4 if leaf.ndim == 2 else leaf, params)


def truncated(params):
    """The target without its last layer: what that adds to the residual stream is 0."""
    layer = params["params"]["layers_1"]
    zeroed = {
        part: {**layer[part], name: jax.tree.map(jnp.zeros_like, layer[part][name])}
        for part, name in (("attention", "o"), ("ffn", "down"))
    }
    return {"params": params["params"] | {"layers_1": {**layer, **zeroed}}}


DRAFTS = {
    "the target itself": lambda: params_of(0),
    "a random model": lambda: params_of(1),
    "the target without its last layer": lambda: truncated(params_of(0)),
}


def rows_of(*params: SamplingParams):
    return stack_sampling(
        params, vocab_size=VOCAB, eos_token_ids=CONFIG.eos_token_ids, shapes=SHAPES,
        rng=np.random.default_rng(0),
    )  # fmt: skip


@partial(jax.jit, compiler_options=law.UNOPTIMISED)
def with_draft(params, draft_params, costs, prompts, lengths, sampling):
    return speculative_generate(
        (MODEL, params), (DRAFT, draft_params), prompts, lengths, sampling, NEW, costs=costs,
        max_num_draft_tokens=J, controller=AdaptiveLength(probe_interval=2), num_logprobs=2,
    )  # fmt: skip


@partial(jax.jit, compiler_options=law.UNOPTIMISED)
def with_lookup(params, prompts, lengths, sampling):
    return speculative_generate(
        (MODEL, params), PromptLookup(max_ngram=3, min_ngram=1), prompts, lengths, sampling, NEW,
        max_num_draft_tokens=J, num_logprobs=None,
    )  # fmt: skip


@partial(jax.jit, compiler_options=law.UNOPTIMISED)
def plainly(params, prompts, lengths, sampling):
    return generate(MODEL, params, prompts, lengths, sampling, NEW, num_logprobs=2)


def assert_same(found, expected, prompts=PROMPTS, lengths=LENGTHS, params=None):
    """By the one rule of equality; the reasons for ending too, where the tokens are the same."""
    rule = EqualityRule(MODEL, params_of(0) if params is None else params)
    for b, length in enumerate(lengths):
        ours, theirs = (np.asarray(o.tokens[b])[: o.lengths[b]] for o in (found, expected))
        rule.compare(prompts[b, :length], theirs, ours)
        if list(ours) == list(theirs):
            assert found.finish_reason[b] == expected.finish_reason[b]
            assert np.all(np.asarray(found.tokens[b])[found.lengths[b] :] == -1)
    rule.check()


def drafted_if_all_are_right(num_prompt: int) -> list[int]:
    """Draft tokens by round: no more than have room, nor beyond the draft's max_model_len."""
    drafted, num_known = [], num_prompt
    while (room := num_prompt + NEW - num_known) > 0:
        longest = DRAFT.config.max_model_len + 1 - num_known
        drafted.append(max(0, min(J, room - 1, longest)))
        num_known += drafted[-1] + 1
    return drafted


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_tokens_are_those_of_generate(name):
    """Ragged prompts, one of a single token; however good the draft, and beyond its length."""
    sampling = rows_of(*[GREEDY] * 4)
    found = with_draft(params_of(0), DRAFTS[name](), EAGER, PROMPTS, LENGTHS, sampling)
    assert_same(found, plainly(params_of(0), PROMPTS, LENGTHS, sampling))
    report = read_acceptance(found.telemetry)
    assert report.total.num_proposed > 0
    if name == "the target itself":
        assert report.total.acceptance_rate == 1.0
        rounds = [drafted_if_all_are_right(int(length)) for length in LENGTHS]
        assert report.total.num_proposed == sum(map(sum, rounds))
        assert int(found.num_rounds) == max(map(len, rounds))


def test_greedy_tokens_with_prompt_lookup():
    """Greedy text of a small model soon repeats, so that much is accepted."""
    sampling = rows_of(*[GREEDY] * 4)
    found = with_lookup(params_of(0), PROMPTS, LENGTHS, sampling)
    assert_same(found, plainly(params_of(0), PROMPTS, LENGTHS, sampling))
    assert read_acceptance(found.telemetry).total.num_accepted > 0
    assert found.num_rounds < NEW


def test_greedy_rows_among_sampled_ones_and_rows_do_not_see_each_other():
    sampled = [SamplingParams(seed=s, temperature=1.5, top_p=0.9, max_tokens=NEW) for s in (7, 8)]
    sampling = rows_of(GREEDY, sampled[0], GREEDY, sampled[1])
    draft = DRAFTS["the target without its last layer"]()
    found = with_draft(params_of(0), draft, EAGER, PROMPTS, LENGTHS, sampling)
    plain = plainly(params_of(0), PROMPTS, LENGTHS, rows_of(*[GREEDY] * 4))
    np.testing.assert_array_equal(found.tokens[::2], plain.tokens[::2])
    # Row 1 again, in another place and among other rows.
    order = [3, 2, 1, 0]
    others = rows_of(sampled[1], sampled[1], sampled[0], dataclasses.replace(GREEDY, max_tokens=3))
    prompts = np.where(np.arange(4)[:, None] == 2, PROMPTS[order], 60)
    again = with_draft(params_of(0), draft, EAGER, prompts, LENGTHS[order], others)
    np.testing.assert_array_equal(again.tokens[2], found.tokens[1])
    np.testing.assert_array_equal(again.lengths[2], found.lengths[1])


def test_every_parameter_acts_as_in_generate():
    """Penalties, bias, allowed ids, bad words, stops, minimum and maximum, within accepted runs."""
    plain = plainly(params_of(0), PROMPTS, LENGTHS, rows_of(*[GREEDY] * 4))
    stop = int(plain.tokens[0, 5])
    rows = [
        dataclasses.replace(GREEDY, stop_token_ids=[stop], min_tokens=2),
        dataclasses.replace(GREEDY, logit_bias={int(plain.tokens[1, 2]): -100.0}, max_tokens=7),
        dataclasses.replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.3),
        dataclasses.replace(
            GREEDY, presence_penalty=1.0, allowed_token_ids=list(range(2, 50)),
            bad_words_token_ids=[[int(plain.tokens[3, 1])], [7, 8]],
        ),
    ]  # fmt: skip
    sampling = rows_of(*rows)
    expected = plainly(params_of(0), PROMPTS, LENGTHS, sampling)
    assert len(set(expected.lengths.tolist())) > 1 and expected.finish_reason[0] == STOP
    for name in DRAFTS:
        found = with_draft(params_of(0), DRAFTS[name](), EAGER, PROMPTS, LENGTHS, sampling)
        assert_same(found, expected)
    within = np.arange(NEW) < expected.lengths[:, None]
    for part in ("chosen_BN", "ranks_BN", "top_BNK", "top_ids_BNK"):
        ours, theirs = (np.asarray(getattr(o.logprobs, part)) for o in (found, expected))
        np.testing.assert_allclose(ours[within], theirs[within], atol=2e-4, err_msg=part)


def test_reported_logprobs_are_the_targets():
    """Of sampled tokens too: log-softmax of the raw logits of the sequence that came out."""
    rows = [
        SamplingParams(seed=i, temperature=1.5, max_tokens=NEW, ignore_eos=True) for i in range(4)
    ]
    found = with_draft(params_of(0), params_of(1), EAGER, PROMPTS, LENGTHS, rows_of(*rows))
    sequences = np.zeros((4, 9 + NEW), np.int32)
    for b, length in enumerate(LENGTHS):
        sequences[b, : length + NEW] = [*PROMPTS[b, :length], *np.asarray(found.tokens[b])]
    logits_BSV = jax.jit(MODEL.apply)(params_of(0), sequences)
    for b, length in enumerate(LENGTHS):
        logprobs_NV = jax.nn.log_softmax(logits_BSV[b, length - 1 : length - 1 + NEW])
        expected = np.asarray(logprobs_NV)[np.arange(NEW), found.tokens[b]]
        np.testing.assert_allclose(found.logprobs.chosen_BN[b], expected, atol=2e-4)


def test_a_target_that_is_not_finite_ends_its_row_as_generate_does():
    """Tokens before it count, also those of the same round."""
    sampling = rows_of(*[GREEDY] * 4)
    plain = plainly(params_of(0), PROMPTS, LENGTHS, sampling)
    inner = params_of(0)["params"]
    table = inner["embed"]["embedding"].at[int(plain.tokens[0, 4])].set(jnp.nan)
    broken = {"params": inner | {"embed": {"embedding": table}}}
    expected = plainly(broken, PROMPTS, LENGTHS, sampling)
    assert expected.finish_reason[0] == NON_FINITE and 0 < expected.lengths[0] < NEW
    for found in (
        with_draft(broken, params_of(0), EAGER, PROMPTS, LENGTHS, sampling),
        with_lookup(broken, PROMPTS, LENGTHS, sampling),
    ):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.finish_reason, expected.finish_reason)


def test_a_draft_token_that_the_target_cannot_take_does_no_harm():
    """Every token that the target does not emit makes its pass NaN; the draft proposes many."""
    sampling = rows_of(*[GREEDY] * 4)
    plain = plainly(params_of(0), PROMPTS, LENGTHS, sampling)
    harmless = np.union1d(PROMPTS, plain.tokens)
    bad = np.setdiff1d(np.arange(VOCAB), harmless)
    assert len(bad) > 5
    inner = params_of(0)["params"]
    table = inner["embed"]["embedding"].at[bad].set(jnp.nan)
    broken = {"params": inner | {"embed": {"embedding": table}}}
    found = with_draft(broken, params_of(1), EAGER, PROMPTS, LENGTHS, sampling)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_array_equal(found.finish_reason, plain.finish_reason)
    assert found.num_rounds > NEW, "some rounds were spoilt"


def test_a_broken_draft_costs_nothing_but_time():
    nan = jax.tree.map(lambda leaf: leaf * jnp.nan, params_of(0))
    sampling = rows_of(*[GREEDY] * 4)
    found = with_draft(params_of(0), nan, EAGER, PROMPTS, LENGTHS, sampling)
    assert_same(found, plainly(params_of(0), PROMPTS, LENGTHS, sampling))
    assert read_acceptance(found.telemetry).total.num_proposed == 0


@dataclass(frozen=True)
class Cycle:
    """A controller that drafts as many tokens as `costs` says, one entry after the other."""

    def check(self, costs, max_num_draft_tokens):
        pass

    def init_state(self, num_rows):
        return jnp.zeros(num_rows, jnp.int32)

    def choose(self, costs, state, num_rows, max_num_draft_tokens):
        return costs[state % len(costs)]

    def update(self, state, num_draft_B, num_accepted_B, live_B):
        return state + live_B


CYCLE = Speculation(DraftModel(MODEL, catch_up_tokens=4), J, Cycle())
LONG = 200


@partial(jax.jit, compiler_options=law.UNOPTIMISED)
def first_state(params, extra, sampling):
    return begin(
        (MODEL, params), CYCLE, extra, jnp.asarray(PROMPTS), jnp.asarray(LENGTHS), sampling,
        max_new_tokens=LONG,
    )  # fmt: skip


@partial(jax.jit, compiler_options=law.UNOPTIMISED)
def one_round(params, extra, kv, sampling, state):
    return speculative_round((MODEL, params), CYCLE, extra, kv, sampling, state)


@pytest.mark.parametrize("lengths", [(3, 0) * 4, (2, 0, 0, 0, 0, 0, 0, 3)], ids=str)
def test_a_draft_equal_to_its_target_is_always_right(lengths):
    """200 tokens; after every round the caches hold what they should.

    Target: num_known - 1 entries. Draft: one less where the row drafted and all was accepted, and
    what it has is the target's. Long idle stretches are made up for before it drafts again.
    """
    extra = SpeculationParams(params_of(0), jnp.asarray(lengths))
    sampling = rows_of(*[dataclasses.replace(GREEDY, max_tokens=LONG)] * 4)
    kv, state = first_state(params_of(0), extra, sampling)
    table_BM = np.asarray(kv.tables[0].block_table_BM)
    num_rounds = 0
    while np.any(state.running_B):
        before_B = np.asarray(state.num_known_B)
        state, record = one_round(params_of(0), extra, kv, sampling, state)
        drafted_B = np.asarray(record.num_draft_B)
        np.testing.assert_array_equal(record.num_accepted_B, drafted_B)
        assert np.all(record.is_bonus_B)
        room_B = LONG - (before_B - LENGTHS)
        wanted_B = np.minimum(lengths[num_rounds % len(lengths)], room_B - 1)
        np.testing.assert_array_equal(drafted_B, np.maximum(wanted_B, 0))
        known_B, computed_B = np.asarray(state.num_known_B), np.asarray(state.proposer.rows)
        np.testing.assert_array_equal(known_B, before_B + drafted_B + (room_B > 0))
        assert np.all(computed_B <= known_B - 1)
        assert np.all(computed_B[drafted_B > 0] == known_B[drafted_B > 0] - 2)
        num_rounds += 1
        if num_rounds % 16 == 0:
            for pools in zip(state.pools, state.proposer.shared.pools, strict=True):
                for b in range(4):
                    full = table_BM[b, : computed_B[b] // 4]
                    ours, theirs = (np.asarray(pool)[full].view(np.float32) for pool in pools)
                    np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert one_round._cache_size() == 1
    np.testing.assert_array_equal(state.num_known_B - state.num_prompt_B, LONG)


def test_values_compile_nothing_and_nothing_reads_the_device():
    """Costs, draft parameters, sampling values and adapting lengths are values."""
    sampled = SamplingParams(seed=1, temperature=0.8, max_tokens=NEW)
    slow_draft = CostTable(jnp.float32(2.0), jnp.ones(J + 1))
    before = None
    calls = [
        (EAGER, params_of(1), rows_of(*[GREEDY] * 4)),
        (slow_draft, params_of(1), rows_of(sampled, GREEDY, sampled, GREEDY)),
        (EAGER, params_of(0), rows_of(*[sampled] * 4)),
    ]
    proposed = []
    for costs, draft_params, sampling in calls:
        arguments = jax.device_put((params_of(0), draft_params, costs, PROMPTS, LENGTHS, sampling))
        with jax.transfer_guard("disallow"):
            found = with_draft(*arguments)
        proposed.append(int(found.telemetry.proposed_J.sum()))
        before = before or with_draft._cache_size()
        assert with_draft._cache_size() == before
    assert proposed[1] < proposed[0] and proposed[1] < proposed[2]


def test_plain_decoding_is_a_round_of_no_draft_tokens():
    """And then even sampled tokens are those of generate."""
    rows = rows_of(
        GREEDY, *[SamplingParams(seed=i, temperature=1.1, max_tokens=9) for i in range(3)]
    )
    expected = plainly(params_of(0), PROMPTS, LENGTHS, rows)

    @partial(jax.jit, compiler_options=law.UNOPTIMISED)
    def run(params, rows):
        return speculative_generate(
            (MODEL, params), Proposer(), PROMPTS, LENGTHS, rows, NEW, max_num_draft_tokens=0,
            num_logprobs=None,
        )  # fmt: skip

    found = run(params_of(0), rows)
    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drawn", "greedy", "looked up"])
def test_sampled_tokens_of_real_models_follow_the_targets_law(how):
    """The whole loop, caches and all: the joint law of two tokens after a prompt."""
    config = dataclasses.replace(CONFIG, vocab_size=6, eos_token_ids=())
    model = Transformer(config)

    def sharpened(seed):
        params = init_params(config, jax.random.key(seed))
        embedding = params["params"]["embed"]["embedding"] * 40
        return {"params": params["params"] | {"embed": {"embedding": embedding}}}

    target, other = sharpened(0), sharpened(1)
    draft = {
        "drawn": (DraftModel(model), other),
        "greedy": (DraftModel(model, greedy=True), other),
        "looked up": PromptLookup(min_ngram=1),
    }[how]
    params = SamplingParams(temperature=1.4, top_p=0.92, max_tokens=3)
    prompt, B = [2, 3, 2, 5, 2], 6000
    prompts = jnp.broadcast_to(jnp.asarray(prompt, jnp.int32), (B, 5))
    sampling = params.to_arrays(B, vocab_size=6, rng=np.random.default_rng(3))
    found = speculative_generate(
        (model, target), draft, prompts, jnp.full(B, 5), sampling, 3, max_num_draft_tokens=2,
        num_logprobs=None,
    )  # fmt: skip
    from tests.sampling import sampling_oracle

    expected = np.zeros((6, 6))
    for first in range(6):
        logits = np.asarray(model.apply(target, jnp.asarray([[*prompt, first]]))[0])
        expected[first] = sampling_oracle.distribution(logits[5], params)
        expected[first] *= sampling_oracle.distribution(logits[4], params)[first]
    assert law.p_value(np.asarray(found.tokens[:, :2]), expected) > 1e-4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_num_draft_tokens": -1}, "max_num_draft_tokens=-1: must be an integer >= 0"),
        ({"controller": AdaptiveLength()}, "AdaptiveLength needs a CostTable"),
        (
            {"controller": AdaptiveLength(), "costs": assumed_costs(2, 0.1)},
            r"verify_seconds_T has shape \(3,\): must be \(5,\)",
        ),
        ({"kv_dtype": "float64"}, "kv_dtype='float64': must be one of"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be at least 1"),
        ({"draft": "ngram"}, "draft='ngram': must be a Proposer"),
        ({"prompt_lengths": np.array([1, 2])}, r"prompt_lengths has \(2,\) rows"),
        (
            {"draft": (Transformer(dataclasses.replace(CONFIG, vocab_size=10)), None)},
            "vocab_size=10 does not hold the target's eos_token_ids",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(changes, message):
    config = dataclasses.replace(CONFIG, eos_token_ids=(1, 20))
    arguments = dict(
        target=(Transformer(config), params_of(0)), draft=PromptLookup(), prompt_tokens=PROMPTS,
        prompt_lengths=LENGTHS, sampling=rows_of(*[GREEDY] * 4), max_new_tokens=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        speculative_generate(**(arguments | changes))


def test_a_round_copies_no_pool():
    """Target and draft: temporaries stay small where the pools are large, and both are donated."""
    num_blocks = 20_000
    extra = SpeculationParams(params_of(0), jnp.asarray([J]))
    sampling = rows_of(*[GREEDY] * 4)
    kv, state = jax.eval_shape(first_state, params_of(0), extra, sampling)
    pool = jax.eval_shape(lambda: init_pools(CONFIG, num_blocks))
    state = dataclasses.replace(
        state, pools=pool, proposer=ProposerState(DraftCache(pool, None), state.proposer.rows)
    )
    narrow = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    table = dataclasses.replace(kv.tables[0], block_table_BM=narrow)
    kv = dataclasses.replace(kv, tables=(table,), num_blocks=num_blocks)
    run = jax.jit(
        lambda params, extra, kv, sampling, state: speculative_round(
            (MODEL, params), CYCLE, extra, kv, sampling, state
        ),
        donate_argnames="state",
    )
    memory = run.lower(params_of(0), extra, kv, sampling, state).compile().memory_analysis()
    pool_bytes = pool.k.size * 2
    assert memory.temp_size_in_bytes < 0.2 * pool_bytes
    assert memory.alias_size_in_bytes >= 4 * pool_bytes
