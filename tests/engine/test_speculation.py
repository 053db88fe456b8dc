"""Do requests get from a speculating engine what they get from one that decodes plainly?"""

import dataclasses
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from helios_jax.cache.paged import KVPools
from helios_jax.engine import Engine, Variant, programs, replay
from helios_jax.engine.drafts import Drawn, draw_shortest
from helios_jax.model import DraftHead, Transformer, init_params
from helios_jax.sampling import SamplingParams, sampling_shapes, stack_sampling
from helios_jax.scheduler.urgency import deadline
from helios_jax.speculative import (
    AdaptiveLength,
    CostTable,
    Draft,
    DraftModel,
    HiddenStateDraft,
    PromptLookup,
    Proposer,
    Speculation,
    SpeculationParams,
    assumed_costs,
    no_draft,
    read_acceptance,
    speculative_generate,
)
from tests import tiny
from tests.engine.conftest import (
    GREEDY,
    assert_empty,
    drain,
    expected,
    make_engine,
    model,
    prompts,
    shrink_pool,
    tokens_of,
)
from tests.equality import EqualityRule

LOOKUP = Speculation(PromptLookup(), 3)
SAMPLED = SamplingParams(temperature=1.1, seed=3, max_tokens=40, ignore_eos=True)
PENALISED = dataclasses.replace(
    GREEDY, repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=4, stop_token_ids=[7, 8, 9]
)


@cache
def other_params() -> Any:
    return tiny.llm(seed=5)._form.params


def drafting(params: Any = None, **changes) -> tuple[Speculation, SpeculationParams]:
    """A draft model like the target; the target itself unless `params` say otherwise."""
    form, _, _ = model()
    speculation = Speculation(DraftModel(form.model), 3, AdaptiveLength())
    extra = SpeculationParams(form.params if params is None else params, assumed_costs(3, 0.05))
    return dataclasses.replace(speculation, **changes), extra


def speculating(speculation: Speculation, extra: SpeculationParams | None = None, **more) -> Engine:
    """An engine of few programs; with prompt lookup it has room for `PENALISED` from the start."""
    engine = make_engine(speculation=speculation, extra=extra, **dict(max_num_seqs=2) | more)
    if speculation is LOOKUP:
        engine._wanted_shapes |= sampling_shapes([PENALISED])
    return engine


@cache
def lookup_engine() -> Engine:
    """Shared by tests that leave it empty."""
    return speculating(LOOKUP)


@cache
def draft_engine() -> Engine:
    """Likewise; what it drafts is always accepted."""
    speculation, extra = drafting()
    return speculating(speculation, extra)


def work(first: SamplingParams) -> list[tuple[list[int], SamplingParams, bool]]:
    """(prompt, parameters, whether to speculate)."""
    each = [
        first,
        dataclasses.replace(GREEDY, max_tokens=50),
        SAMPLED,
        dataclasses.replace(GREEDY, max_tokens=31, stop_token_ids=[7, 8, 9]),
        dataclasses.replace(SAMPLED, seed=8, top_k=20, top_p=0.9),
        dataclasses.replace(GREEDY, max_tokens=1),
    ]
    drawn = prompts(2, 13)
    # Text that repeats itself, and a prompt that was seen as a whole, of full blocks.
    drawn[3], drawn[7] = [9, 8, 7, 6] * 12, drawn[6][:8] * 3
    drawn[11] = drawn[3]
    return [(prompt, each[i % 6], i not in (4, 9)) for i, prompt in enumerate(drawn)]


def serve(engine: Engine, requests) -> list[list[int]]:
    """Tokens of requests that arrive at any time."""
    rng = np.random.default_rng(1)
    waiting, numbers, updates = list(requests), [], []
    while waiting or engine.has_work:
        for _ in range(int(rng.integers(0, 4))):
            if waiting and engine._num_rows < 8:
                prompt, params, speculates = waiting.pop(0)
                numbers.append(engine.submit(prompt, params, speculate=speculates))
        updates += engine.step()
    found = tokens_of(updates)
    return [found[number, 0] for number in numbers]


@pytest.mark.parametrize(
    "who", ["target", "random", pytest.param("lookup", marks=pytest.mark.slow)]
)
def test_rows_of_every_kind_get_what_they_would_get_alone(who):
    """Chunks, prefix hits, preemption, penalties; sampled rows and some that want no drafts."""
    form, _, _ = model()
    if who == "lookup":
        engine = speculating(LOOKUP)
    else:
        speculation, extra = drafting(other_params() if who == "random" else None)
        engine = speculating(speculation, extra)
    shrink_pool(engine, 40)
    requests = work(PENALISED if who == "lookup" else GREEDY)
    found = serve(engine, requests)
    metrics = engine.metrics()
    assert metrics["num_preemptions"] > 0 and metrics["num_prefix_hit_tokens"] > 0
    assert metrics["num_output_tokens"] == sum(map(len, found))
    rule = EqualityRule(form.model, form.params)
    for (prompt, params, speculates), tokens in zip(requests, found, strict=True):
        if params.temperature == 0 and params is not PENALISED:
            rule.compare(prompt, expected(prompt, params), tokens)
        elif params is PENALISED or not speculates:
            assert tokens == expected(prompt, params)
        else:
            assert serve(engine, [(prompt, params, True)]) == [tokens]
    rule.check()
    assert_empty(engine)
    rates = [metrics[f"acceptance_rate_at_{place}"] for place in range(3)]
    assert 0 < metrics["num_verifications"] <= metrics["num_draft_tokens"]
    if who == "target":
        assert metrics["acceptance_rate"] > 0.99 and min(rates) > 0.98
        assert metrics["num_rounds"] < 0.5 * metrics["num_output_tokens"]
        assert 2.5 < metrics["acceptance_length"] <= 4
    elif who == "random":
        assert 0 < metrics["acceptance_rate"] < 0.9 and metrics["acceptance_length"] > 1
    report = engine.acceptance()
    assert report is not None and report.total.num_proposed >= metrics["num_draft_tokens"]


def test_a_row_drafts_for_itself_only():
    """Its rounds are its own: as many and as long beside others, and after being preempted."""
    engine = draft_engine()
    prompt = [1, 2, 3] * 9

    def num_drafted() -> float:
        return engine.metrics().get("num_draft_tokens", 0)

    before = num_drafted()
    alone = serve(engine, [(prompt, SAMPLED, True)])
    drafted = num_drafted() - before
    others = [(p, dataclasses.replace(SAMPLED, seed=i), False) for i, p in enumerate(prompts(4, 3))]
    together = serve(engine, [others[0], (prompt, SAMPLED, True), *others[1:]])
    assert together[1] == alone[0]
    assert num_drafted() - before == 2 * drafted > 0
    assert together[0] == expected(*others[0][:2])


def test_stop_strings_and_logprobs_are_those_of_plain_decoding(engine):
    plain = engine.generate([[72, 105]], [dataclasses.replace(GREEDY, max_tokens=30)])[0]
    text = plain.outputs[0].text
    stop = next(text[i : i + 2] for i in range(6, len(text)) if text.find(text[i : i + 2]) == i)
    params = [dataclasses.replace(GREEDY, max_tokens=30, stop=(stop,), logprobs=2)]
    asked = [[72, 105]]
    wanted = engine.generate(asked, params)
    found = lookup_engine().generate(asked, params)
    assert found[0].outputs[0].finish_reason == "stop"
    for one, other in zip(found, wanted, strict=True):
        mine, theirs = one.outputs[0], other.outputs[0]
        assert (mine.text, mine.token_ids) == (theirs.text, theirs.token_ids)
        assert mine.finish_reason == theirs.finish_reason
        assert len(mine.logprobs) == len(mine.token_ids)
        for at, theirs_at in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert list(at) == list(theirs_at)
            assert [x.rank for x in at.values()] == [x.rank for x in theirs_at.values()]
            for token in at:
                assert at[token].logprob == pytest.approx(theirs_at[token].logprob, abs=1e-4)
    drain(lookup_engine())
    assert_empty(lookup_engine())


def test_an_abort_at_any_moment_frees_everything():
    engine = draft_engine()
    for steps in range(4):
        keep = engine.submit([1, 2, 3], GREEDY)
        gone = [engine.submit([4] * n, GREEDY) for n in (3, 90)]
        updates = []
        for _ in range(steps):
            updates += engine.step()
        for number in gone:
            engine.abort(number)
        updates += drain(engine)
        assert tokens_of(updates)[keep, 0] == expected([1, 2, 3], GREEDY)
        assert_empty(engine)


def test_nothing_compiles_once_warm():
    engine = draft_engine()
    requests = [(prompt, GREEDY, i != 1) for i, prompt in enumerate(prompts(5, 5, 60))]
    first = serve(engine, requests)
    serve(engine, requests)
    num_programs, counts = engine.num_programs, []

    def count(event: str, duration: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            counts.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        assert serve(engine, requests) == first
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert engine.num_programs == num_programs and counts == []


def test_no_stage_copies_the_pools():
    """Neither the target's nor the draft's: temporaries stay under 6% of either."""
    speculation, extra = drafting()
    engine = make_engine(
        speculation=speculation, extra=extra, kv_cache_dtype="bfloat16",
        max_num_rows=512, kv_cache_memory_bytes=128 << 20,
    )  # fmt: skip
    state, config, zero = engine._device.state, engine.step_config, np.int32(0)
    pool_bytes = engine.pool_bytes
    target_bytes = state.pools.k.nbytes + state.pools.v.nbytes
    assert pool_bytes == 2 * target_bytes > 90 << 20
    passes = dict(model=engine.form.model, config=config)
    arguments = (engine.form.params, state, engine._device.plan_shape, np.float32(0))
    stages = {
        "plan": ((state, np.float32(0), zero, zero), dict(config=config, urgency=deadline)),
        "chunk": (arguments, passes | dict(variant=Variant(1, 192, 32))),
        "rounds": ((*arguments, zero, extra), passes | dict(variant=Variant(1, 192))),
        "end": ((state,), dict(config=config)),
    }
    for name, (positional, static) in stages.items():
        compiled = programs.stage(name, jax.default_backend()).lower(*positional, **static)
        memory = compiled.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= pool_bytes, name
        assert memory.temp_size_in_bytes < 0.06 * target_bytes, name


@dataclass(frozen=True)
class Always(Proposer):
    """Drafts one token over and over."""

    token: int

    def propose(self, params, state, rows, num_draft_B, max_num_draft_tokens):
        tokens_BJ = jnp.full((len(num_draft_B), max_num_draft_tokens), self.token)
        return Draft(tokens_BJ, num_draft_B, None), state


def test_what_is_not_a_number_in_a_draft_ends_no_row():
    """Neither in the draft model's own pass, nor where the target reads what was drafted."""
    form, _, config = model()
    nothing = jax.tree.map(lambda leaf: leaf * np.nan, form.params)
    speculation, extra = drafting(nothing)
    engine = speculating(speculation, extra)
    assert serve(engine, [([65, 66, 67], GREEDY, True)]) == [expected([65, 66, 67], GREEDY)]
    assert engine.metrics()["num_draft_tokens"] == 0

    table = form.params["params"]["embed"]["embedding"]
    poisoned = form.params["params"] | {
        "embed": {"embedding": table.at[35].set(np.nan)}, "lm_head": {"kernel": table.T}
    }  # fmt: skip
    untied = Transformer(dataclasses.replace(config, tie_word_embeddings=False))
    untied = dataclasses.replace(form.model, config=untied.config)
    engine = make_engine(
        form._replace(model=untied, params={"params": poisoned}),
        speculation=Speculation(Always(35), 2), max_num_seqs=1,
    )  # fmt: skip
    tokens = expected([65, 66, 67], GREEDY)
    assert 35 not in tokens
    assert serve(engine, [([65, 66, 67], GREEDY, True)]) == [tokens]
    # Spoilt rounds give nothing, and the one after each drafts nothing.
    metrics = engine.metrics()
    assert metrics["num_failed"] == 0 and metrics["num_accepted_tokens"] == 0
    assert metrics["num_verifications"] >= 10
    assert_empty(engine)


def test_saved_and_recorded_engines_go_on_alike(tmp_path):
    """With costs that were measured, which are another engine's otherwise."""
    form, tokenizer, config = model()
    speculation, extra = drafting(other_params())
    measured = extra._replace(costs=None)
    path = tmp_path / "run.jsonl"
    engine = speculating(speculation, measured, record=path)
    costs = engine.speculation_params.costs
    assert isinstance(costs, CostTable)
    assert costs.verify_seconds_T.shape == (4,) and float(costs.draft_seconds) > 0
    assert bool(jnp.all(costs.verify_seconds_T > 0))
    outputs, read = [], engine._read

    def spy(step, news):
        outputs.append(jax.device_get(step.outputs))
        return read(step, news)

    engine._read = spy
    numbers = [engine.submit(p, dataclasses.replace(SAMPLED, seed=i)) for i, p in
               enumerate(prompts(8, 4))]  # fmt: skip
    numbers.append(engine.submit([1, 2], SAMPLED, speculate=False))
    updates = [update for _ in range(4) for update in engine.step()]
    updates += engine.save(tmp_path / "saved")
    before = len(updates)
    updates += drain(engine)
    engine.stop_recording()
    assert set(tokens_of(updates)) == {(number, 0) for number in numbers}

    about = dict(model_config=config, speculation=speculation)
    again = Engine.restore(
        tmp_path / "saved", form, tokenizer, speculation_params=measured, **about
    )
    assert again.acceptance() is not None
    assert jax.tree.all(jax.tree.map(np.array_equal, again.speculation_params.costs, costs))
    assert tokens_of(updates[:before] + drain(again)) == tokens_of(updates)
    metrics, wanted = again.metrics(), engine.metrics()
    del metrics["queue_seconds"], wanted["queue_seconds"]
    assert metrics == wanted

    replayed = list(replay(path, form, tokenizer, speculation_params=measured, **about))
    assert len(replayed) == len(outputs)
    for one, other in zip(replayed, outputs, strict=True):
        assert jax.tree.all(jax.tree.map(np.array_equal, one, other))

    for wrong, message in (
        (dict(), r"speculation=\{.*but None here; give the same `speculation`"),
        (dict(speculation=dataclasses.replace(speculation, max_num_draft_tokens=2)),
         "max_num_draft_tokens"),
        (dict(speculation=speculation, speculation_params=extra._replace(proposer=form.params)),
         "speculation.parameters=.*draft model's parameters"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            list(replay(path, form, tokenizer, model_config=config, **wrong))


@pytest.mark.parametrize("drafted, length", [((0, 0), 0), ((1, 0), 1), ((0, 2), 4), ((4, 3), 4)])
def test_the_shortest_pass_that_holds_the_longest_draft(drafted, length):
    speculation = Speculation(PromptLookup(), 4, intermediate_lengths=(1,))
    tokens_BJ = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    pools = KVPools(jnp.zeros(3), jnp.zeros(3))

    def pass_over(pools: KVPools, draft: Draft | None) -> Drawn:
        cut = no_draft(2, 0) if draft is None else draft
        T = cut.tokens_BJ.shape[1] + 1
        drawn_BT = jnp.pad(cut.tokens_BJ, ((0, 0), (0, 1)), constant_values=99)
        zeros_B = jnp.zeros(2, jnp.int32)
        return Drawn(
            KVPools(pools.k + T, pools.v), drawn_BT, cut.num_draft_B + 1, jnp.ones((2, T, 5)),
            None, cut.num_draft_B, zeros_B, zeros_B > 0,
        )  # fmt: skip

    draft = Draft(tokens_BJ, jnp.array(drafted, jnp.int32), jnp.ones((2, 4, 7)))
    drawn = jax.jit(partial(draw_shortest, speculation, pass_over=pass_over))(pools, draft)
    assert drawn.pools.k.tolist() == [length + 1] * 3
    assert drawn.num_draft_B.tolist() == list(drafted)
    assert drawn.tokens_BT.tolist() == [
        [*row[:length], 99, *[0] * (4 - length)] for row in tokens_BJ.tolist()
    ]
    assert jnp.sum(drawn.hidden_BTD) == 2 * 5 * (length + 1)


def test_what_cannot_draft_is_refused():
    speculation, extra = drafting(max_num_draft_tokens=2)
    with pytest.raises(ValueError, match="verify_seconds_T has shape"):
        make_engine(speculation=speculation, extra=extra)
    small = Transformer(tiny.config(vocab_size=100, eos_token_ids=(99,), bos_token_id=98))
    with pytest.raises(ValueError, match="different vocabularies"):
        make_engine(speculation=Speculation(DraftModel(small)))
    with pytest.raises(ValueError, match="intermediate_lengths=.*must ascend"):
        Speculation(PromptLookup(), 3, intermediate_lengths=(3,))
    plain = make_engine(speculation=Speculation(PromptLookup(), 0))
    assert plain.step_config.speculation is None and plain.acceptance() is None


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_rows_cross_the_watermark(kv_cache_dtype):
    speculation, extra = drafting()
    options = dict(kv_cache_dtype=kv_cache_dtype, kv_watermark=40, max_num_seqs=2)
    engine = make_engine(speculation=speculation, extra=extra, **options)
    requests = [
        ([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=60), True), ([4] * 50, GREEDY, True),
        ([1, 2, 4], SAMPLED, True),
    ]  # fmt: skip
    found = serve(engine, requests)
    assert [len(tokens) for tokens in found] == [60, 20, 40]
    metrics = engine.metrics()
    # The third row may end with the round in which it crosses.
    assert metrics["num_migrations"] in (1, 2) and metrics["acceptance_rate"] > 0.5
    plain = make_engine(**options)
    assert serve(plain, requests[:2]) == found[:2]
    assert_empty(engine)


def test_a_request_is_told_how_its_own_drafts_fared():
    engine = draft_engine()
    before = engine.metrics()
    outputs = engine.generate([[1, 2, 3], [4, 5]], [GREEDY, GREEDY], speculate=True)
    plain = engine.generate([[6]], [GREEDY], speculate=False)[0].acceptance
    after = engine.metrics()
    assert plain is not None and plain.num_draft_tokens == plain.acceptance_length == 0
    for name in ("num_draft_tokens", "num_accepted_tokens", "num_verifications"):
        counted = [getattr(output.acceptance, name) for output in outputs]
        assert min(counted) > 0
        assert sum(counted) == after[name] - before.get(name, 0)
    assert outputs[0].acceptance.acceptance_rate > 0.5


def test_a_head_on_hidden_states_drafts_in_an_engine_as_by_itself():
    """The engine hands it the state that the library's loop does: the same drafts are accepted."""
    form, _, config = model()
    head = DraftHead(dataclasses.replace(config, is_draft_head=True))
    params = init_params(head.config, jax.random.key(2))
    # Its logits are a little like the target's, whose table it has.
    params["params"]["embed"] = {"embedding": form.params["params"]["embed"]["embedding"]}
    speculation = Speculation(HiddenStateDraft(head), 2)
    extra = SpeculationParams(params)
    engine = speculating(speculation, extra)
    drawn = prompts(2, 3, 20)
    wanted = dataclasses.replace(GREEDY, max_tokens=24)
    found = serve(engine, [(prompt, wanted, True) for prompt in drawn])
    assert found == [expected(prompt, wanted) for prompt in drawn]
    # The engine draws a first token before it drafts.
    known = [[*prompt, tokens[0]] for prompt, tokens in zip(drawn, found, strict=True)]
    lengths, rest = [len(row) for row in known], dataclasses.replace(wanted, max_tokens=23)
    output = speculative_generate(
        (form.model, form.params), (speculation.proposer, params),
        np.array([row + [0] * (max(lengths) - len(row)) for row in known]), np.array(lengths),
        stack_sampling([rest] * len(known), vocab_size=config.vocab_size), 23,
        max_num_draft_tokens=2,
    )  # fmt: skip
    assert output.tokens.tolist() == [tokens[1:] for tokens in found]
    metrics = engine.metrics()
    assert (
        metrics["num_accepted_tokens"] == read_acceptance(output.telemetry).total.num_accepted > 0
    )
    assert_empty(engine)
