"""Acceptance telemetry: counts against a plain tally, the two averages, and what made a fall."""

import jax
import numpy as np

from helios_jax.speculative import init_telemetry, read_acceptance, record_round

J = 4
record = jax.jit(record_round)


def play(telemetry, rng, acceptance, temperature, context, rounds, rows=16):
    """Rounds of geometric acceptance; each argument a function of the row's number."""
    tally = []
    for _ in range(rounds):
        temperature_B = np.array([temperature(b) for b in range(rows)], np.float32)
        context_B = np.array([context(b) for b in range(rows)], np.int32)
        draft_B = rng.integers(0, J + 1, rows).astype(np.int32)
        runs_BJ = rng.random((rows, J)) < np.array([acceptance(b) for b in range(rows)])[:, None]
        accepted_B = np.minimum(np.cumprod(runs_BJ, axis=1).sum(1), draft_B).astype(np.int32)
        live_B = rng.random(rows) < 0.9
        telemetry = record(telemetry, temperature_B, context_B, draft_B, accepted_B, live_B)
        tally += list(zip(temperature_B, context_B, draft_B, accepted_B, live_B, strict=True))
    return telemetry, [row[:4] for row in tally if row[4]]


def test_counts_are_those_of_a_plain_tally():
    telemetry, tally = play(
        init_telemetry(J), np.random.default_rng(0), lambda b: 0.7,
        lambda b: [0.0, 0.3, 1.0, 2.0][b % 4], lambda b: [10, 300, 20_000][b % 3], 40,
    )  # fmt: skip
    report = read_acceptance(telemetry)
    drafted = [(t, c, int(d), int(a)) for t, c, d, a in tally]
    proposed, accepted = sum(d for *_, d, _ in drafted), sum(a for *_, a in drafted)
    verifications = sum(d > 0 for *_, d, _ in drafted)
    assert report.total == (proposed, accepted)
    assert report.total.acceptance_rate == accepted / proposed
    assert report.acceptance_length == 1 + accepted / verifications
    assert int(telemetry.num_row_rounds) == len(drafted)
    for j, part in enumerate(report.by_position):
        assert part == (sum(d > j for *_, d, _ in drafted), sum(a > j for *_, a in drafted))
    named = {"greedy": 0.0, "temperature < 0.5": 0.3, "temperature 0.9 to 1.3": 1.0,
             "temperature >= 1.3": 2.0}  # fmt: skip
    assert list(report.by_temperature) == list(named)
    for name, temperature in named.items():
        rows = [row for row in drafted if np.isclose(row[0], temperature)]
        assert report.by_temperature[name] == (sum(r[2] for r in rows), sum(r[3] for r in rows))
    assert list(report.by_context) == ["context < 256", "context 256 to 1023", "context >= 16384"]
    rows = [row for row in drafted if row[1] == 300]
    assert report.by_context["context 256 to 1023"] == (
        sum(r[2] for r in rows), sum(r[3] for r in rows),
    )  # fmt: skip
    assert report.num_drifts == 0 and report.drift is None


def test_nothing_proposed_reads_as_none():
    report = read_acceptance(init_telemetry(J))
    assert report.acceptance_length is report.total.acceptance_rate is report.recent_rate is None


def test_a_fall_is_one_event_that_names_the_bucket():
    """Sampled rows get worse at one temperature; a steady rate, and the recovery, are no events."""
    rng = np.random.default_rng(1)

    def temperature(b):
        return [0.0, 0.7][b % 2]

    telemetry, _ = play(init_telemetry(J), rng, lambda b: 0.8, temperature, lambda b: 100, 200)
    assert read_acceptance(telemetry).num_drifts == 0
    telemetry, _ = play(telemetry, rng, lambda b: [0.8, 0.4][b % 2], temperature, lambda b: 100, 60)
    report = read_acceptance(telemetry)
    assert report.num_drifts == 1 and bool(telemetry.is_drifting)
    assert report.drift is not None and report.drift.before - report.drift.after > 0.05
    assert report.drift.changes[0].startswith("temperature 0.5 to 0.9: acceptance ")
    assert not any(change.startswith("greedy") for change in report.drift.changes)
    telemetry, _ = play(telemetry, rng, lambda b: 0.9, temperature, lambda b: 100, 200)
    assert not bool(telemetry.is_drifting) and int(telemetry.num_drifts) == 1


def test_a_fall_by_other_traffic_is_told_from_a_worse_draft():
    """Long contexts always were worse; now there are more of them."""
    rng = np.random.default_rng(2)

    def acceptance(long):
        return lambda b: 0.5 if long(b) else 0.9

    def play_mix(telemetry, long, rounds):
        context = lambda b: 5000 if long(b) else 100  # noqa: E731
        return play(telemetry, rng, acceptance(long), lambda b: 0.0, context, rounds)[0]

    telemetry = play_mix(init_telemetry(J), lambda b: b % 8 == 0, 200)
    telemetry = play_mix(telemetry, lambda b: b % 8 != 0, 60)
    drift = read_acceptance(telemetry).drift
    assert drift is not None
    assert any(change.startswith("more of context 4096 to 16383") for change in drift.changes)
    assert not any(change.startswith("context") for change in drift.changes)


def test_values_compile_nothing():
    before = record._cache_size()
    play(init_telemetry(J), np.random.default_rng(3), lambda b: 0.5, lambda b: 1.0, lambda b: 1, 3)
    assert record._cache_size() == before == 1
