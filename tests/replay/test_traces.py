"""Are traces read as they were recorded, and malformed ones refused by name?"""

import pytest

from helios_jax.replay import read_azure_csv

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
