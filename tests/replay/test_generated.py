"""Is generated traffic as bursty as asked for, and the same for the same seed?"""

import dataclasses

import numpy as np
import pytest

from helios_jax.replay import read_trace
from helios_jax.replay.generated import Arrivals, write_azure_csv


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 4.0])
def test_rate_and_burstiness(burstiness):
    trace = Arrivals(20_000, rate=5, burstiness=burstiness).draw()
    gaps = np.diff(trace.arrival_seconds)
    assert gaps.mean() == pytest.approx(0.2, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    assert np.median(trace.num_prompt) == pytest.approx(1000, rel=0.05)
    assert trace.num_output.min() >= 1 and np.median(trace.num_output) == pytest.approx(
        130, rel=0.05
    )


def test_a_seed_draws_the_same_and_a_file_keeps_it(tmp_path):
    options = Arrivals(50, seed=3)
    trace = options.draw()
    assert np.array_equal(trace.arrival_seconds, options.draw().arrival_seconds)
    other = dataclasses.replace(options, seed=4).draw()
    assert not np.array_equal(trace.num_prompt, other.num_prompt)
    path = tmp_path / "trace.csv"
    write_azure_csv(trace, path)
    read = read_trace(path)
    np.testing.assert_allclose(read.arrival_seconds, trace.arrival_seconds, atol=1e-6)
    assert read.num_prompt.tolist() == trace.num_prompt.tolist()
    with pytest.raises(ValueError, match="burstiness=0"):
        Arrivals(burstiness=0)
