"""Does LLM do what its users expect: prompts in, outputs like vLLM's out, errors that help?"""

import dataclasses

import jax
import jax.monitoring
import numpy as np
import pytest

from helios_jax.outputs import RequestOutput
from helios_jax.sampling import SamplingParams
from tests import tiny
from tests.equality import EqualityRule

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    """One for all, which has room for every parameter from the start: programs are shared."""
    llm = tiny.llm()
    everything = SamplingParams(
        max_tokens=1, frequency_penalty=1.0, logit_bias={65: 1.0}, min_tokens=1,
        allowed_token_ids=range(256), bad_words_token_ids=[[65]],
    )  # fmt: skip
    llm.generate("x", everything)
    return llm


def ids(output: RequestOutput, index: int = 0) -> list[int]:
    return output.outputs[index].token_ids


# Prompts and outputs


def test_text_and_token_ids_one_and_many(llm):
    text = "Hello there"
    encoded = llm.tokenizer.encode(text)
    from_text, from_ids = llm.generate([text, encoded], GREEDY)
    (alone,) = llm.generate(text, GREEDY)
    (alone_ids,) = llm.generate(np.array(encoded), GREEDY)
    assert from_text.prompt == text and from_ids.prompt is None
    assert from_text.prompt_token_ids == encoded == from_ids.prompt_token_ids
    assert ids(from_text) == ids(from_ids) == ids(alone) == ids(alone_ids)
    assert llm.generate([], GREEDY) == []


def test_outputs_keep_the_prompts_order_and_count_tokens(llm):
    prompts = ["a" * n for n in (40, 3, 17, 9, 25, 1, 33, 2, 14, 5)]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        (completion,) = output.outputs
        assert completion.finish_reason == "length" and completion.stop_reason is None
        assert output.usage.completion_tokens == len(completion.token_ids) == 12
        assert output.usage.prompt_tokens == len(output.prompt_token_ids)
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
        assert completion.logprobs is None and completion.cumulative_logprob is None
        assert 0 < output.timings.ttft_seconds <= output.timings.total_seconds


def test_batch_composition_padding_and_buckets_never_change_a_row(llm):
    """Lengths around the bucket edges, alone and with all the others, short and long outputs."""
    prompts = ["x" * n + "?" for n in (1, 2, 14, 15, 16, 30, 31, 32, 100)]
    rule = EqualityRule(llm.model, llm.params)
    together = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, dataclasses.replace(GREEDY, max_tokens=20))
        rule.compare(output.prompt_token_ids, ids(alone)[:12], ids(output))
    rule.check()


def test_cache_growth_does_not_show(llm):
    """200 tokens double the cache once or twice; a run cut into pieces gives the same tokens."""
    (whole,) = llm.generate("grow", dataclasses.replace(GREEDY, max_tokens=300))
    rule = EqualityRule(llm.model, llm.params)
    prompt = list(whole.prompt_token_ids)
    pieces: list[int] = []
    while len(pieces) < 300:
        (piece,) = llm.generate([[*prompt, *pieces]], dataclasses.replace(GREEDY, max_tokens=60))
        pieces += ids(piece)
    rule.compare(prompt, ids(whole), pieces)
    rule.check()


def test_parameters_per_prompt_in_one_batch(llm):
    sampled = SamplingParams(temperature=1.5, seed=3, max_tokens=7, ignore_eos=True)
    penalised = dataclasses.replace(GREEDY, frequency_penalty=2.0, presence_penalty=2.0)
    biased = dataclasses.replace(GREEDY, logit_bias={65: 1000.0}, max_tokens=3)
    each = [GREEDY, sampled, penalised, biased]
    together = llm.generate(["same"] * 4, each)
    for params, output in zip(each, together, strict=True):
        assert ids(output) == ids(llm.generate("same", params)[0])
    assert ids(together[3]) == [65] * 3
    counts = np.unique(ids(together[2]), return_counts=True)[1]
    assert counts.max() <= np.unique(ids(together[0]), return_counts=True)[1].max()


def test_n_outputs_are_seeded_apart_and_reproducible(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    (first,) = llm.generate("n", params)
    (again,) = llm.generate("n", params)
    assert [o.index for o in first.outputs] == [0, 1, 2]
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    single = dataclasses.replace(params, n=1, seed=8)
    assert ids(llm.generate("n", single)[0]) == first.outputs[1].token_ids


def test_unseeded_requests_differ_and_the_llm_seed_repeats_them():
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    first, second = tiny.llm(), tiny.llm()
    outputs = [ids(first.generate("u", params)[0]) for _ in range(2)]
    assert outputs[0] != outputs[1]
    assert [ids(second.generate("u", params)[0]) for _ in range(2)] == outputs


# Logprobs


def test_logprobs_are_the_models_own(llm):
    params = SamplingParams(
        temperature=0.5, top_k=3, seed=1, max_tokens=6, logprobs=4, prompt_logprobs=2,
        ignore_eos=True,
    )  # fmt: skip
    (output,) = llm.generate("logprobs", params)
    (completion,) = output.outputs
    sequence = [*output.prompt_token_ids, *completion.token_ids]
    logits = np.asarray(llm.model.apply(llm.params, np.array([sequence]))[0], np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    start = len(output.prompt_token_ids)
    for j, (token, position) in enumerate(
        zip(completion.token_ids, completion.logprobs, strict=True)
    ):
        row = expected[start + j - 1]
        assert position[token].logprob == pytest.approx(row[token], abs=1e-4)
        assert position[token].rank == 1 + int((row > row[token] + 1e-6).sum())
        best = np.argsort(-row)[:4]
        assert set(position) == {token, *best.tolist()}
        assert position[token].decoded_token == llm.tokenizer.decode([token], False)
    assert completion.cumulative_logprob == pytest.approx(
        sum(p[t].logprob for t, p in zip(completion.token_ids, completion.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == start
    for j in range(1, start):
        token = output.prompt_token_ids[j]
        assert output.prompt_logprobs[j][token].logprob == pytest.approx(
            expected[j - 1][token], abs=1e-4
        )


# Stopping


def test_end_of_sequence_ends_and_is_counted(llm):
    params = SamplingParams(
        temperature=0, max_tokens=9, logit_bias={tiny.EOS: 1000.0}, min_tokens=4
    )
    (output,) = llm.generate("eos", params)
    (completion,) = output.outputs
    assert completion.finish_reason == "stop" and completion.stop_reason is None
    assert completion.token_ids[-1] == tiny.EOS and len(completion.token_ids) == 5
    assert output.usage.completion_tokens == 5
    assert "<eos>" not in completion.text


def test_stop_token_is_reported(llm):
    bias = {65: 1000.0}
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias=bias, stop_token_ids=[65])
    (completion,) = llm.generate("stop", params)[0].outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 65)
    assert completion.token_ids == [65]


def test_stop_string_trims_text_ids_logprobs_and_usage_together(llm):
    """A stop string over three tokens, found in the middle of a greedy continuation."""
    ascii_ids = range(94)
    free = dataclasses.replace(GREEDY, max_tokens=40, logprobs=0, allowed_token_ids=ascii_ids)
    (whole,) = llm.generate("trim", free)
    text = whole.outputs[0].text
    stop = text[5:8]
    cut = text.index(stop)
    (output,) = llm.generate("trim", dataclasses.replace(free, stop=stop))
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == text[:cut]
    assert llm.tokenizer.decode(completion.token_ids) == completion.text
    assert len(completion.logprobs) == len(completion.token_ids) == output.usage.completion_tokens
    kept = dataclasses.replace(free, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("trim", kept)[0].outputs[0].text == text[: cut + 3]
    later = dataclasses.replace(free, stop=stop, min_tokens=39)
    assert len(ids(llm.generate("trim", later)[0])) >= 39


def test_output_never_passes_max_model_len():
    llm = tiny.llm(max_model_len=192)
    (output,) = llm.generate("x" * 187, dataclasses.replace(GREEDY, max_tokens=100))
    assert len(ids(output)) == 5 and output.outputs[0].finish_reason == "length"
    (output,) = llm.generate("x" * 187, dataclasses.replace(GREEDY, max_tokens=None))
    assert len(ids(output)) == 5


def test_a_row_with_nan_logits_fails_alone(llm):
    """A poisoned embedding row: only the prompt that holds that token is in error."""
    table = llm.params["params"]["embed"]["embedding"]
    poisoned = {"params": llm.params["params"] | {"embed": {"embedding": table.at[35].set(np.nan)}}}
    head = llm.params["params"]["embed"]["embedding"].T
    untied = dataclasses.replace(llm.model, config=tiny.config(tie_word_embeddings=False))
    poisoned["params"]["lm_head"] = {"kernel": head}
    form = llm._form._replace(model=untied, params=poisoned)
    broken = type(llm)(form, llm.tokenizer, config=tiny.config(), **tiny.ENGINE)
    healthy, failed = broken.generate([[65, 66, 67], [65, 35, 67]], GREEDY)
    assert failed.outputs[0].finish_reason == "error" and ids(failed) == []
    assert ids(healthy) == ids(llm.generate([[65, 66, 67]], GREEDY)[0])


# Streaming and chat


def test_stream_joins_to_the_generated_text(llm):
    params = dataclasses.replace(GREEDY, max_tokens=30)
    parts = list(llm.stream("stream", params))
    (output,) = llm.generate("stream", params)
    assert "".join(part.text for part in parts) == output.outputs[0].text
    assert [token for part in parts for token in part.token_ids] == ids(output)
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].finish_reason == "length" and len(parts) > 3
    assert parts[-1].request_output.outputs == output.outputs


def test_a_stream_can_be_left_and_the_llm_lives(llm):
    stream = llm.stream("left", dataclasses.replace(GREEDY, max_tokens=30))
    next(stream)
    stream.close()
    assert len(ids(llm.generate("left", GREEDY)[0])) == 12


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt == "<|user|>Hi\n<|assistant|>"
    both = llm.chat([messages, messages], GREEDY)
    assert [ids(o) for o in both] == [ids(output)] * 2
    parts = list(llm.stream_chat(messages, GREEDY))
    assert "".join(part.text for part in parts) == output.outputs[0].text


# Compilation


def test_nothing_compiles_on_the_second_call_of_a_bucket(llm):
    compiled: list[str] = []

    def listen(event: str, duration: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1)(1)
        assert compiled
        llm.generate("a" * 20, GREEDY)
        llm.generate(["a" * 20] * 3, GREEDY)
        compiled.clear()
        rng = np.random.default_rng(0)
        for _ in range(10):
            prompts = ["b" * int(n) for n in rng.integers(17, 33, rng.choice([1, 3, 4]))]
            max_tokens, ignore_eos = int(rng.integers(1, 30)), bool(rng.integers(2))
            llm.generate(
                prompts, dataclasses.replace(GREEDY, max_tokens=max_tokens, ignore_eos=ignore_eos)
            )
        assert compiled == []
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# Refusals


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt 0 is empty"),
        ([[]], "prompt 0 is empty"),
        ([[1, 258]], "token id 258: must be in 0..257"),
        ([[1, -1]], "token id -1"),
        ("x" * 512, "prompt 0 has 512 tokens: max_model_len=512"),
        (["fine", "x" * 600], "prompt 1 has 600 tokens"),
    ],
)
def test_bad_prompts_are_refused(llm, prompt, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompt, GREEDY)
    if isinstance(prompt, str):
        with pytest.raises(ValueError, match=message.replace("prompt 0", "prompt")):
            llm.stream(prompt, GREEDY)


def test_other_bad_arguments_are_refused(llm):
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        llm.generate("x", [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="n=2: a stream has one output"):
        llm.stream("x", SamplingParams(n=2))
    with pytest.raises(ValueError, match="max_model_len=1000: must be in 2..512"):
        tiny.llm(max_model_len=1000)
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        tiny.llm(max_num_seqs=0)
    with pytest.raises(ValueError, match="stop_token_ids contains 999"):
        llm.generate("x", SamplingParams(stop_token_ids=[999]))
    with pytest.raises(ValueError, match="dtype='int3'"):
        tiny.llm("int3")
    with pytest.raises(ValueError, match="holds no quantised weights"):
        tiny.llm("int4")


def test_bad_words_are_barred(llm):
    (free,) = llm.generate("bad", GREEDY)
    letters = sorted(set(ids(free)))
    barred = dataclasses.replace(GREEDY, bad_words_token_ids=[[t] for t in letters])
    (output,) = llm.generate("bad", barred)
    assert not set(ids(output)) & set(letters)
