"""Does the open loop send in time, lose nothing, and report what came when?"""

import threading
import time

import numpy as np
import pytest

from helios_jax.outputs import StreamOutput
from helios_jax.replay import ReplayRequest, StreamClient, Update, make_prompts, read_trace, serve
from helios_jax.replay.calibration import (
    StepCosts,
    costs_from_json,
    fit_costs,
    padded_tokens,
    scheduler_from_json,
    to_json,
)
from helios_jax.replay.engine_client import EngineClient, StepRecord
from helios_jax.replay.report import TABLE, markdown, summarize_run
from helios_jax.sampling import SamplingParams
from helios_jax.scheduler import SchedulerConfig
from tests import tiny


def request(arrival, num_output=3, **targets):
    return ReplayRequest(arrival, [1, 2, 3], num_output, **targets)


class Scripted:
    """Answers at once with one update per token; refuses the first tries, fails where told."""

    def __init__(self, num_refusals=0, failing=()):
        self.num_refusals, self.failing, self.sent = num_refusals, failing, []

    def submit(self, request, on_update):
        if self.num_refusals:
            self.num_refusals -= 1
            return False
        self.sent.append(request.arrival_seconds)
        if request.arrival_seconds in self.failing:
            on_update(Update(0, True, "no"))
            return True
        for i in range(request.num_output):
            on_update(Update(1, i == request.num_output - 1))
        return True


def test_requests_are_sent_at_their_times_and_none_is_lost():
    client = Scripted(num_refusals=3, failing=(0.05,))
    states = []
    run = serve([request(t) for t in (0.0, 0.05, 0.3)], client, states.append)
    assert client.sent == [0.0, 0.05, 0.3] and not run.is_interrupted
    assert [each.is_complete for each in run.served] == [True, False, True]
    assert run.served[1].error == "no" and run.served[2].num_tokens == 3
    for each in run.served:
        assert each.request.arrival_seconds <= each.sent_seconds
    assert run.seconds >= 0.3 and states[0].num_requests == 3
    report = summarize_run(run, {}, model_id="m")
    assert (report["completed"], report["failed"], report["num_prompts"]) == (2, 1, 3)
    assert report["errors"] == ["", "no", ""] and report["ttfts"][1] is None


def test_an_interrupted_run_reports_what_came():
    class Silent(Scripted):
        def submit(self, request, on_update):
            return True

    run = serve([request(0.0)], Silent(), timeout_seconds=0.05)
    assert run.is_interrupted and not run.served[0].is_complete
    assert summarize_run(run, {}, model_id="m")["completed"] == 0


def test_rates_of_an_interrupted_run_are_over_all_of_its_time():
    class Half(Scripted):
        def submit(self, request, on_update):
            return bool(self.sent) or super().submit(request, on_update)

    # The first ends at once, the second never; tokens per second are of the 0.2 s until the end.
    run = serve([request(0.0), request(0.0)], Half(), timeout_seconds=0.2)
    assert run.is_interrupted and run.served[0].end_seconds < 0.1 and run.seconds >= 0.2
    assert summarize_run(run, {}, model_id="m")["output_throughput"] <= 3 / 0.2


def test_figures_by_hand():
    """Tokens at known times: 1 after 0.1 s, then 2 more 0.3 s later; the second request's later."""
    client = Scripted()
    run = serve([request(0.0, 1)], client)
    first, second = run.served[0], serve([request(0.0, 1)], client).served[0]
    first.token_seconds, second.token_seconds = [(0.1, 1), (0.4, 2)], [(0.5, 1), (0.6, 1)]
    first.end_seconds, second.end_seconds = 0.4, 0.6
    second.request = request(0.2, ttft_target_seconds=0.2)
    run = run._replace(served=[first, second], seconds=2.0)
    counts = {"num_preemptions": 1, "num_draft_tokens": 8, "num_accepted_tokens": 6}
    report = summarize_run(run, counts, model_id="m")
    assert report["median_ttft_ms"] == pytest.approx((100 + 300) / 2)
    assert report["median_tpot_ms"] == pytest.approx((150 + 100) / 2)
    assert report["median_itl_ms"] == pytest.approx((300 + 100) / 2)
    assert report["output_throughput"] == 2.5 and report["request_goodput"] == 0.5
    assert report["median_user_tokens_per_second"] == pytest.approx((1 / 0.15 + 10) / 2)
    assert report["preemption_rate"] == 0.5 and report["acceptance_rate"] == 0.75
    goals = {"ttft": 150.0}
    assert summarize_run(run, counts, model_id="m", goodput=goals)["request_goodput"] == 0.5
    table = markdown({"run": report})
    assert table.count("|") == 3 * (len(TABLE) + 2) and "75.0%" in table


def test_an_engine_in_this_process_serves_all_of_a_burst_and_is_measured():
    engine = tiny.llm(max_num_seqs=1).engine
    client = EngineClient(engine)
    requests = [request(0.01 * i, 5 + i) for i in range(12)]
    try:
        run = serve(requests, client)
        counters = client.counters()
    finally:
        client.close()
    # More than the table's 8 rows: some waited outside.
    assert [each.num_tokens for each in run.served] == [each.num_output for each in requests]
    assert counters["num_output_tokens"] == sum(each.num_output for each in requests)
    assert sum(step.num_prefill_tokens for step in client.steps) == counters["num_prefill_tokens"]
    assert sum(step.num_rounds for step in client.steps) == counters["num_rounds"]
    assert not engine.has_work and threading.current_thread().is_alive()
    longest = max(step.seconds for step in client.steps)
    assert 0 < longest <= run.seconds + 1


def test_an_engines_recording_is_a_trace_with_its_prompts(tmp_path):
    path = tmp_path / "run.jsonl"
    llm = tiny.llm(max_num_seqs=1)
    engine = llm.engine
    recorded = type(engine)(
        engine.form, engine.tokenizer, model_config=engine.model_config, config=engine.config,
        record=str(path),
    )  # fmt: skip
    recorded.generate(
        [[1, 2, 3], [4, 5]],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 6)],
    )
    recorded.stop_recording()
    trace = read_trace(path)
    assert trace.prompt_token_ids == ((1, 2, 3), (4, 5))
    assert trace.num_output.tolist() == [3, 6] and trace.arrival_seconds[0] == 0
    assert make_prompts(trace, "unused", llm.tokenizer) == [[1, 2, 3], [4, 5]]
    assert make_prompts(trace.scaled(1, max_prompt=2), "", llm.tokenizer) == [[1, 2], [4, 5]]
    with pytest.raises(ValueError, match="a recording has its prompts"):
        trace.scaled(0.5)


def test_costs_are_found_again():
    rng = np.random.default_rng(0)
    config = SchedulerConfig(
        num_blocks=100, max_num_seqs=8, max_num_batched_tokens=512, kv_watermark=np.inf
    )
    true = StepCosts(2e-3, 1e-3, 4e-4, 5e-3, 6e-3, 1e-3, 1e-6)
    steps = []
    for _ in range(200):
        rounds, rows = int(rng.integers(0, 5)), int(rng.choice([1, 2, 4, 8]))
        prefilled = int(rng.integers(1, 500)) if rng.random() < 0.4 or not rounds else 0
        kv = int(rng.integers(0, 4000))
        each = StepRecord(0.0, rounds, rounds * rows, prefilled, kv)
        padded = float(padded_tokens(prefilled, 512)) if prefilled else 0.0
        once = 2e-3 + (1e-3 + 4e-4 * padded if prefilled else 0.0)
        a_round = 5e-3 + 6e-3 * (rows > 2) + 1e-3 * rows + 1e-6 * kv
        steps.append(each._replace(seconds=once + rounds * a_round))
    # Something else ran in one of them.
    steps[7] = steps[7]._replace(seconds=2.0)
    found = fit_costs(steps, config)
    for name in ("token_seconds", "round_seconds", "many_seconds", "row_seconds", "kv_seconds"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.02), name
    fields = to_json(found, config)
    assert costs_from_json(fields) == found
    assert scheduler_from_json(fields).max_rounds == 4
    assert scheduler_from_json(fields).kv_watermark == np.inf
    with pytest.raises(ValueError, match="helios replay --costs"):
        costs_from_json({})
    with pytest.raises(ValueError, match="too few"):
        fit_costs(steps[:5], config)


@pytest.mark.parametrize("chunk, padded", [(0, 0), (1, 32), (32, 32), (33, 128), (129, 256),
                                           (257, 512), (512, 512)])  # fmt: skip
def test_a_chunk_is_computed_in_whole_tiles(chunk, padded):
    assert float(padded_tokens(chunk, 512)) == padded


def test_whatever_streams_can_be_replayed_to():
    asked = []

    def stream(prompt, *, max_tokens, **options):
        asked.append((prompt, options["ttft_target_seconds"], options["ignore_eos"]))
        if max_tokens == 9:
            raise OSError("gone")
        for i in range(max_tokens):
            yield StreamOutput("", [7], "length" if i == max_tokens - 1 else None)
            if max_tokens == 8:
                return

    client = StreamClient(stream, max_in_flight=2)
    requests = [request(0.0, n, ttft_target_seconds=0.5) for n in (2, 9, 8, 5)]
    run = serve(requests, client)
    assert [each.is_complete for each in run.served] == [True, False, False, True]
    assert run.served[1].error == "OSError: gone"
    assert "before its last part" in run.served[2].error
    assert run.served[3].num_tokens == 5
    assert asked == [([1, 2, 3], 0.5, True)] * 4


def test_lag_is_seen():
    class Slow(Scripted):
        def submit(self, request, on_update):
            time.sleep(0.05)
            return super().submit(request, on_update)

    run = serve([request(0.0), request(0.0)], Slow())
    assert summarize_run(run, {}, model_id="m")["max_send_lag_ms"] >= 40
