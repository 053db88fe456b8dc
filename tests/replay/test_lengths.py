"""Are traces cut, thinned, scaled and read in all formats, and prompts made of their lengths?"""

import json

import numpy as np
import pytest

from helios_jax.replay import Trace, make_prompts, read_text, read_trace
from tests import tiny

TRACE = Trace(
    arrival_seconds=np.array([0.0, 1.0, 2.5, 4.0]),
    num_prompt=np.array([10, 200, 30, 4], np.int32),
    num_output=np.array([3, 1, 50, 8], np.int32),
)


def test_a_window_counts_from_its_first_request():
    part = TRACE.window(1.0, 3.0)
    assert part.arrival_seconds.tolist() == [0.0, 1.5] and part.num_prompt.tolist() == [200, 30]
    with pytest.raises(ValueError, match="window of 1 s from 9 s: holds no requests"):
        TRACE.window(9, 1)


def test_thinning_keeps_times_and_depends_on_the_seed_alone():
    many = Trace(np.arange(100.0), np.arange(1, 101), np.ones(100, int))
    some = many.thinned(0.2, seed=3)
    assert len(some) == 20 and some.num_prompt.tolist() == many.thinned(0.2, 3).num_prompt.tolist()
    gaps = np.diff(some.num_prompt)
    assert np.array_equal(np.diff(some.arrival_seconds), gaps) and some.arrival_seconds[0] == 0
    assert some.num_prompt.tolist() != many.thinned(0.2, 4).num_prompt.tolist()


def test_lengths_are_scaled_then_cut_and_never_zero():
    scaled = TRACE.scaled(0.1, max_prompt=5)
    assert scaled.num_prompt.tolist() == [1, 5, 3, 1] and scaled.num_output.tolist() == [1, 1, 5, 1]
    for bad in ({"factor": 0}, {"factor": 1, "max_output": 0}):
        with pytest.raises(ValueError, match="must be"):
            TRACE.scaled(**bad)


def test_a_cut_is_a_window_then_a_share_then_the_first_of_it_stretched_and_scaled():
    many = Trace(np.arange(100.0), np.arange(1, 101), np.ones(100, int))
    part = many.window(10, 50).thinned(0.5, 3).head(7)
    cut = many.cut(
        start_seconds=10, window_seconds=50, sample=0.5, num_requests=7, time_stretch=0.5,
        length_scale=2, max_prompt=40, seed=3,
    )  # fmt: skip
    assert cut.arrival_seconds.tolist() == (part.arrival_seconds / 2).tolist()
    assert cut.num_prompt.tolist() == np.minimum(2 * part.num_prompt, 40).tolist()
    assert many.cut().num_prompt.tolist() == many.num_prompt.tolist()


@pytest.mark.parametrize("wrong, message", [
    ({"sample": 1.5}, r"sample=1.5: must be in \(0, 1\]"),
    ({"sample": float("nan")}, "sample=nan"),
    ({"window_seconds": 0.0}, "window_seconds=0.0: must be above 0"),
    ({"start_seconds": -1.0}, "start_seconds=-1.0: must be 0 or more"),
    ({"num_requests": 0}, "num_requests=0"),
    ({"time_stretch": 0.0}, "time_stretch=0.0: must be above 0"),
    ({"length_scale": 0.0}, "length_scale=0.0"),
])  # fmt: skip
def test_a_cut_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        TRACE.cut(**wrong)


def test_burstgpt_is_told_from_azure_and_seconds_are_spread(tmp_path):
    path = tmp_path / "burst.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    lines = ["5,ChatGPT,472,18,490,Conversation log", "5,ChatGPT,10,7,17,API log",
             "6,GPT-4,9,0,9,API log", "7.0,GPT-4,1,2,3,API log"]  # fmt: skip
    path.write_text(header + "\n".join(lines) + "\n")
    trace = read_trace(path)
    assert trace.arrival_seconds.tolist() == [0.0, 0.5, 2.0]
    assert trace.num_prompt.tolist() == [472, 10, 1] and trace.num_output.tolist() == [18, 7, 2]
    path.write_text(header + "5,x,many,1,1,y\n")
    with pytest.raises(ValueError, match="line 2"):
        read_trace(path)
    path.write_text(header + "5,x,5,0,5,y\n")
    with pytest.raises(ValueError, match="no requests that were answered"):
        read_trace(path)


def test_prompts_have_the_lengths_are_real_text_and_share_what_ids_share():
    tokenizer, text = tiny.tokenizer(), read_text()
    assert len(text) > 100_000 and "statement" in text
    prompts = make_prompts(TRACE, text, tokenizer, seed=1)
    assert [len(prompt) for prompt in prompts] == TRACE.num_prompt.tolist()
    assert tokenizer.decode(prompts[1])[5:60] in text
    assert prompts == make_prompts(TRACE, text, tokenizer, seed=1)
    assert prompts != make_prompts(TRACE, text, tokenizer, seed=2)
    ids = np.array([[1, 2], [1, 3], [7, 2], [1, -1]])
    shared = Trace(np.zeros(4), np.array([20, 20, 20, 12]), np.ones(4, int), ids, prefix_tokens=16)
    a, b, c, d = make_prompts(shared, text, tokenizer)
    assert a[:16] == b[:16] != c[:16] and a[16:] != b[16:]
    assert a[16:] == c[16:] and d == a[:12]


def test_a_text_of_ones_own(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text(" ")
    with pytest.raises(ValueError, match="is empty"):
        read_text(path)


def test_a_mooncake_file_is_told_from_a_recording(tmp_path):
    path = tmp_path / "trace.jsonl"
    record = {"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [4]}
    path.write_text(json.dumps(record) + "\n")
    assert read_trace(path).prefix_ids_NI.tolist() == [[4]]
    assert read_trace(path).scaled(0.25).prefix_tokens == 128
