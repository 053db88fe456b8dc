"""Do requests that come and go together get what each would get alone?"""

import asyncio
import dataclasses
import math
import threading

import numpy as np
import pytest

from helios_jax.cache.paged import block_bytes
from helios_jax.engine import DeadlineExceeded
from helios_jax.sampling import SamplingParams
from helios_jax.scheduler.urgency import priority
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


@pytest.mark.parametrize("kv_blocks", [None, 50])
def test_requests_get_what_they_would_get_alone(kv_blocks):
    """Chunked prompts, shared prefixes, arrivals at any time, and a pool that preempts."""
    form, _, _ = model()
    engine = make_engine()
    if kv_blocks:
        shrink_pool(engine, kv_blocks)
    rng = np.random.default_rng(1)
    wanted = [
        (prompt, dataclasses.replace(GREEDY, max_tokens=int(rng.integers(1, 60))))
        for prompt in prompts(2, 14)
    ]
    waiting, numbers, updates = list(wanted), {}, []
    while waiting or engine.has_work:
        for _ in range(int(rng.integers(0, 4))):
            if waiting and engine._num_rows < 8:
                request = waiting.pop(0)
                numbers[engine.submit(*request)] = request
        updates += engine.step()
    found = tokens_of(updates)
    rule = EqualityRule(form.model, form.params)
    for number, (prompt, params) in numbers.items():
        rule.compare(prompt, expected(prompt, params), found[number, 0])
    rule.check()
    metrics = engine.metrics()
    print(metrics)
    assert metrics["num_prefix_hit_tokens"] > 0
    if kv_blocks:
        assert metrics["num_preemptions"] > 0
    assert metrics["num_output_tokens"] == sum(params.max_tokens for _, params in wanted)
    assert_empty(engine)


def test_every_parameter_per_request_in_one_batch(engine):
    """Also parameters for which the step's arrays grow while others run."""
    each = [
        GREEDY,
        SamplingParams(temperature=1.2, seed=3, max_tokens=15, ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=5, top_p=0.8, min_p=0.02, seed=4, max_tokens=15),
        dataclasses.replace(GREEDY, frequency_penalty=1.5, presence_penalty=0.5),
        dataclasses.replace(GREEDY, logit_bias={65: 50.0, 66: 51.0}, max_tokens=3),
        SamplingParams(temperature=1.0, seed=8, allowed_token_ids=[70, 71, 72], max_tokens=9),
        dataclasses.replace(GREEDY, stop_token_ids=[200, 201, 202, 203, 204], min_tokens=4),
    ]
    numbers = [engine.submit([9, 8, 7, i], params) for i, params in enumerate(each)]
    found = tokens_of(drain(engine))
    for i, (number, params) in enumerate(zip(numbers, each, strict=True)):
        assert found[number, 0] == expected([9, 8, 7, i], params), params
    assert_empty(engine)


def test_what_a_request_of_one_token_leaves_is_found(engine):
    """It ends in the step that computed its prompt; only the next prompt's end is computed."""
    shared = np.random.default_rng(11).integers(0, 256, 64).tolist()
    computed = []
    for ending in ([1] * 5, [2] * 7):
        before = engine.metrics().get("num_prefill_tokens", 0)
        engine.generate([shared + ending], [dataclasses.replace(GREEDY, max_tokens=1)])
        computed.append(engine.metrics()["num_prefill_tokens"] - before)
    assert computed == [69, 7]


def test_a_chunk_may_be_computed_in_tiles():
    """Rows that begin and end within a tile, and a last tile that is not full."""
    engine = make_engine(enable_prefix_caching=False)
    engine.step_config = dataclasses.replace(engine.step_config, tile_tokens=12)
    form, _, _ = model()
    rule = EqualityRule(form.model, form.params)
    work = prompts(7, 6)
    outputs = engine.generate(work, [GREEDY] * len(work))
    for prompt, output in zip(work, outputs, strict=True):
        rule.compare(prompt, expected(prompt, GREEDY), output.outputs[0].token_ids)
    rule.check()


def test_a_table_smaller_than_the_next_power_of_two():
    engine = make_engine(max_num_seqs=3, max_num_rows=3)
    wanted = prompts(12, 3, 60)
    outputs = engine.generate(wanted, [GREEDY] * 3)
    assert [output.outputs[0].token_ids for output in outputs] == [
        expected(prompt, GREEDY) for prompt in wanted
    ]


def test_stop_strings_trim_exactly(engine):
    plain = engine.generate([[72, 105]], [dataclasses.replace(GREEDY, max_tokens=30)])[0]
    text = plain.outputs[0].text
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text.find(text[i : i + 2]) == i)
    params = dataclasses.replace(GREEDY, max_tokens=30, stop=(stop,))
    (output,) = engine.generate([[72, 105]], [params])
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and completion.stop_reason == stop
    assert completion.text == text[: text.index(stop)]
    streamed = list(engine.stream([72, 105], params))
    assert "".join(part.text for part in streamed) == completion.text
    assert streamed[-1].request_output.outputs[0].token_ids == completion.token_ids
    drain(engine)
    assert_empty(engine)


def test_a_stop_string_takes_back_what_the_same_step_brought(engine):
    """Streamed ids and logprobs are those of the outcome, but for what an earlier step told."""
    plain = engine.generate([[72, 105]], [GREEDY])[0].outputs[0]
    # With the first tokens, which come in one step of their own, and with later ones.
    for stop in (plain.text[0], plain.text[5]):
        params = dataclasses.replace(GREEDY, stop=(stop,), logprobs=2)
        parts = list(engine.stream([72, 105], params))
        outcome = parts[-1].request_output
        completion = outcome.outputs[0]
        assert completion.text == plain.text[: plain.text.index(stop)]
        assert sum((part.token_ids for part in parts), []) == completion.token_ids
        assert sum((part.logprobs for part in parts), []) == completion.logprobs
        assert 0 < outcome.timings.ttft_seconds <= outcome.timings.total_seconds
    drain(engine)
    assert_empty(engine)


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "unread"])
def test_a_request_ends_at_its_deadline_if_it_wants_to(engine, is_read):
    """Also while it runs, with a step in flight."""
    updates, others = [], []
    number = engine.submit(
        [1, 2], dataclasses.replace(GREEDY, max_tokens=100), on_update=updates.append,
        deadline_seconds=3600, ends_at_deadline=True,
    )  # fmt: skip
    # A deadline alone is what the policy looks at.
    patient = engine.submit([1, 2, 3], GREEDY, on_update=others.append, deadline_seconds=3600)
    while not (updates and others):
        engine.step()
    if is_read:
        engine._turn(launches=False)
    assert bool(engine._in_flight) != is_read
    num_told = len(updates)
    for each in (number, patient):
        engine._requests[each].arrival_seconds -= 3601
    told = engine.step()
    last = updates[-1]
    assert isinstance(last.error, DeadlineExceeded) and last.stream.finish_reason == "abort"
    assert last in told and number not in engine.request_ids and patient in engine.request_ids
    engine._turn(launches=False)
    scheduler = engine._device.state.scheduler
    assert number not in scheduler.request_id_R[scheduler.is_running_R]
    blocks = math.ceil((3 + GREEDY.max_tokens) / 4)
    assert 0 < int(scheduler.pool.num_blocks - scheduler.pool.num_free) <= blocks
    drain(engine)
    assert others[-1].stream.request_output.usage.completion_tokens == GREEDY.max_tokens
    assert len(updates) == num_told + 1
    assert_empty(engine)


def test_n_outputs_run_side_by_side(engine):
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    (output,) = engine.generate([[5, 6, 7]], [params])
    assert [o.index for o in output.outputs] == [0, 1, 2]
    for index in range(3):
        assert output.outputs[index].token_ids == expected([5, 6, 7], params.output(index))
    assert output.usage.completion_tokens == 24


def test_logprobs_are_those_of_the_model(engine):
    form, _, _ = model()
    params = dataclasses.replace(GREEDY, max_tokens=6, logprobs=2, prompt_logprobs=1)
    prompt = prompts(7, 1, 90)[0] + [1] * 40
    others = [engine.submit([3, i], GREEDY) for i in range(2)]
    (output,) = engine.generate([prompt], [params])
    assert others
    drain(engine)
    ids = output.outputs[0].token_ids
    logits = np.asarray(form.model.apply(form.params, np.array([prompt + ids]))[0], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for j, token in enumerate(ids):
        at = output.outputs[0].logprobs[j]
        row = logprobs[len(prompt) + j - 1]
        assert at[token].logprob == pytest.approx(row[token], abs=1e-4)
        assert len(at) == 2 and max(at, key=lambda t: at[t].logprob) == int(row.argmax())
    assert output.prompt_logprobs[0] is None
    for j in range(1, len(prompt)):
        found = output.prompt_logprobs[j][prompt[j]].logprob
        assert found == pytest.approx(logprobs[j - 1][prompt[j]], abs=1e-4)


def test_whoever_the_policy_seats_is_served(monkeypatch):
    """The host guesses the order of submission; here the last comes first, is longer than what was
    guessed, and alone wants logprobs."""
    monkeypatch.setattr("helios_jax.engine.variants.MIN_CONTEXT_TOKENS", 48)
    engine = make_engine(max_num_seqs=1, urgency=priority)
    reports = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    prompt = prompts(11, 1, 110)[0] + [2] * 60
    later = engine.submit([3] * 9, GREEDY, priority=1)
    first = engine.submit(prompt, reports, priority=0)
    updates = drain(engine)
    assert [update.request_id for update in updates].index(later) > 0
    found = tokens_of(updates)
    assert found[first, 0] == expected(prompt, GREEDY)
    assert found[later, 0] == expected([3] * 9, GREEDY)
    outputs = {update.request_id: update.stream.request_output for update in updates}
    (completion,) = outputs[first].outputs
    assert [list(at)[0] for at in completion.logprobs] == found[first, 0]
    assert all(at is not None for at in outputs[first].prompt_logprobs[1:])


def test_threads_and_event_loops_share_the_engine(engine):
    results: dict[int, list[int]] = {}

    def client(i: int) -> None:
        parts = engine.stream([i, i, i], dataclasses.replace(GREEDY, max_tokens=12))
        results[i] = [token for part in parts for token in part.token_ids]

    async def both():
        stream = engine.async_stream([50], dataclasses.replace(GREEDY, max_tokens=9))
        parts = [part async for part in stream]
        output = await engine.async_generate([51], GREEDY)
        return [token for part in parts for token in part.token_ids], output

    engine.start()
    try:
        clients = [threading.Thread(target=client, args=(i,)) for i in range(3)]
        for thread in clients:
            thread.start()
        streamed, output = asyncio.run(both())
        for thread in clients:
            thread.join(60)
    finally:
        engine.stop()
    params = dataclasses.replace(GREEDY, max_tokens=12)
    assert results == {i: expected([i, i, i], params) for i in range(3)}
    assert streamed == expected([50], dataclasses.replace(GREEDY, max_tokens=9))
    assert output.outputs[0].token_ids == expected([51], GREEDY)
    drain(engine)
    assert_empty(engine)


def test_an_unread_stream_that_is_closed_ends_its_request(engine):
    stream = engine.stream([1, 2, 3], GREEDY)
    next(stream)
    stream.close()
    drain(engine)
    assert_empty(engine)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda e: e.submit([]), "prompt is empty"),
        (lambda e: e.submit([999]), "token id 999: must be in 0..257"),
        (lambda e: e.submit([1] * 192), "max_model_len=192 must leave room"),
        (lambda e: e.submit([1], ends_at_deadline=True), "there is no deadline to end at"),
        (lambda e: e.submit([1], ttft_target_seconds=0), "ttft_target_seconds=0.0: must be above"),
        (lambda e: e.submit([1], priority="high"), "priority='high': must be a number"),
        (lambda e: e.submit([1], SamplingParams(n=9, temperature=1)), "n=9: more outputs than"),
        (lambda e: e.stream([1], SamplingParams(n=2, temperature=1)), "n=2: a stream has one"),
        (lambda e: e.submit([258] * 192), "192 tokens: max_model_len=192 must leave room"),
        (lambda e: make_engine(kv_cache_dtype="fp4"), "kv_cache_dtype='fp4': must be one of"),
        (lambda e: make_engine(kv_cache_memory_bytes=2000), "lower max_model_len, raise kv_cache"),
        (lambda e: make_engine(max_model_len=4096), "max_model_len=4096: must be in 2..512"),
        (
            lambda e: make_engine(kv_cache_memory_bytes=1 << 50),
            "does not fit this machine's .* lower kv_cache_memory_bytes or max_model_len",
        ),
    ],
)
def test_what_breaks_a_rule_is_refused_with_a_remedy(engine, call, message):
    with pytest.raises(ValueError, match=message):
        call(engine)
    assert not engine.has_work


def test_logprobs_of_the_whole_vocabulary_are_refused(engine):
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(NotImplementedError, match=f"{name}=-1: .* at most 20"):
            engine.submit([1], SamplingParams(**{name: -1}))
    assert not engine.has_work


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8", "bfloat16"])
def test_eight_bit_rows_cross_the_watermark_within_one_byte_budget(kv_cache_dtype):
    engine = make_engine(kv_cache_dtype=kv_cache_dtype, kv_watermark=40)
    work = [([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=60)), ([4] * 50, GREEDY)]
    outputs = engine.generate(*zip(*work, strict=True))
    assert [len(o.outputs[0].token_ids) for o in outputs] == [60, 20]
    assert engine.metrics()["num_migrations"] == (kv_cache_dtype != "bfloat16")
    pools = engine._device.state.pools
    assert pools.k.dtype == np.uint16
    num_bytes = pools.k.nbytes + pools.v.nbytes
    assert num_bytes == engine.step_config.num_blocks * block_bytes(model()[2]) <= 2**20
    drain(engine)
    assert_empty(engine)
