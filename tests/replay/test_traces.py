"""Are traces read as they were recorded, and malformed ones refused by name?"""

import json

import pytest

from helios_jax.replay import read_azure_csv, read_mooncake_jsonl, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_times_are_relative_sorted_and_keep_their_decimals(tmp_path):
    lines = [
        "2023-11-16 23:59:59.5000000,4808,10",
        "2023-11-17 00:00:01.0000005,3180,0",
        "2023-11-16 23:59:59,110,27",
    ]
    trace = read_azure_csv(write(tmp_path, HEADER + "\n".join(lines) + "\n"))
    assert trace.arrival_seconds.tolist() == pytest.approx([0.0, 0.5, 2.0000005], abs=1e-7)
    assert trace.num_prompt.tolist() == [110, 4808, 3180]
    assert trace.num_output.tolist() == [27, 10, 1]  # at least one token, else there is no end
    assert trace.at_load(2.0).arrival_seconds.tolist()[1] == pytest.approx(0.25)


@pytest.mark.parametrize("text, match", [
    ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,1\n", "needs TIMESTAMP, ContextTokens"),
    (HEADER, "holds no requests"),
    (HEADER + "2023-11-16 18:17:03,1,1\nyesterday,1,1\n", "line 3"),
    (HEADER + "2023-11-16 18:17:03,many,1\n", "line 2"),
    (HEADER + "2023-11-16 18:17:03,5\n", "line 2"),
])  # fmt: skip
def test_malformed_traces_are_refused(tmp_path, text, match):
    with pytest.raises(ValueError, match=match):
        read_azure_csv(write(tmp_path, text))


def mooncake(tmp_path, *records):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def record(timestamp, input_length, ids, **changes):
    return {
        "timestamp": timestamp, "input_length": input_length, "output_length": 5, "hash_ids": ids,
        **changes,
    }  # fmt: skip


def test_a_mooncake_trace_keeps_its_prefixes(tmp_path):
    path = mooncake(tmp_path, record(1500, 513, [7, 9]), record(1000, 512, [7]))
    trace = read_trace(path)
    assert trace.arrival_seconds.tolist() == [0.0, 0.5]
    assert trace.num_prompt.tolist() == [512, 513] and trace.num_output.tolist() == [5, 5]
    assert trace.prefix_ids_NI.tolist() == [[7, -1], [7, 9]] and trace.prefix_tokens == 512
    assert trace.head(1).prefix_ids_NI.tolist() == [[7, -1]] and len(trace.head(1)) == 1


def test_equal_timestamps_are_spread_until_the_next(tmp_path):
    times = [0, 0, 0, 1500, 9000, 9000]
    path = mooncake(tmp_path, *[record(time, 1, [i]) for i, time in enumerate(times)])
    arrivals = read_mooncake_jsonl(path, spread_seconds=3.0).arrival_seconds.tolist()
    assert arrivals == [0.0, 0.5, 1.0, 1.5, 9.0, 10.5]
    together = read_mooncake_jsonl(path, spread_seconds=0.0).arrival_seconds.tolist()
    assert together == [0.0, 0.0, 0.0, 1.5, 9.0, 9.0]


@pytest.mark.parametrize("malformed, match", [
    ({}, "must be an object of timestamp"),
    ([1], "must be an object of timestamp"),
    (record(0, 513, [1]), "hash_ids: 1 of them, a prompt of 513 has 2"),
    (record(0, 5, [-1]), "hash_ids: -1 must be a count"),
    (record(0, 5, ["a"]), "hash_ids: 'a' must be a count"),
    (record(0, 5, 3), "is it a Mooncake trace"),
    (record(0, 5, [2**31]), "below 2.31"),
    (record(0, 5, [1], output_length=1.5), "output_length: 1.5 must be a count"),
])  # fmt: skip
def test_malformed_mooncake_lines_are_refused_by_number(tmp_path, malformed, match):
    path = mooncake(tmp_path, record(0, 5, [0]), malformed)
    with pytest.raises(ValueError, match=match) as raised:
        read_mooncake_jsonl(path)
    assert "line 2" in str(raised.value)


def test_empty_and_unknown_traces_are_refused(tmp_path):
    (tmp_path / "trace.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no requests"):
        read_trace(tmp_path / "trace.jsonl")
    with pytest.raises(ValueError, match="must end in .csv"):
        read_trace(tmp_path / "trace.txt")
    with pytest.raises(ValueError, match="spread_seconds=-1"):
        read_mooncake_jsonl(tmp_path / "trace.jsonl", spread_seconds=-1)
