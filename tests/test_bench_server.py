"""Does the server's benchmark count what it should, and run from end to end?"""

import pytest

from helios_jax.bench import ServerWorkload, describe_server, server
from tests.quantise.conftest import make_checkpoint


def test_every_token_is_counted_from_the_update_that_brought_it():
    handed = [
        {"prompt": [1], "tokens": 2, "time": 1.0},
        {"prompt": [2], "tokens": 1, "time": 1.5},
        {"prompt": [1], "tokens": 3, "time": 2.0},
    ]
    received = [
        {"prompt": [2], "tokens": 1, "time": 1.6},
        # Both of the first one's updates went out together.
        {"prompt": [1], "tokens": 3, "time": 2.5},
    ]
    added = server._added_seconds(received, handed)
    assert added == pytest.approx([0.1, 1.5, 1.5, 0.5])


def test_a_workload_of_nothing_is_refused():
    with pytest.raises(ValueError, match="pairs=0: must be at least 1"):
        ServerWorkload(pairs=0)


@pytest.mark.slow
def test_a_small_one_runs(tmp_path):
    model = make_checkpoint(tmp_path / "model", max_model_len=128)
    workload = ServerWorkload(
        model=str(model), dtype="float32", num_streams=2, prompt_tokens=16, output_tokens=16,
        pairs=2,
    )  # fmt: skip
    report = server.measure_server(workload)
    assert len(report["pairs"]) == 2 and min(p["grpc"] for p in report["pairs"]) > 0
    assert 0 < report["added_seconds"]["p50"] <= report["added_seconds"]["p99"] < 5
    assert "median" in describe_server(report)[2]
