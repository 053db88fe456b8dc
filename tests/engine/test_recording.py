"""Does a recorded run come out again bit for bit, and what is damaged be refused?"""

import dataclasses
import json
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from helios_jax.engine import Engine, EngineError, StepOutputs, read_recording, recording, replay
from helios_jax.engine.core import REBASE_SECONDS
from helios_jax.engine.recording import Recorder, StepInputs
from helios_jax.engine.request_json import request_from_json, request_to_json
from helios_jax.engine.requests import EngineRequest, Targets, start_rows
from helios_jax.engine.variants import StepVariants
from helios_jax.engine.work import Variant
from helios_jax.sampling import SamplingParams
from helios_jax.scheduler.urgency import fcfs
from tests.engine.conftest import make_engine, model, shrink_pool
from tests.test_readme import EXAMPLES

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.2, max_tokens=40, ignore_eos=True)
PROMPTS = np.random.default_rng(6).integers(0, 256, (8, 90)).tolist()


def watch(engine: Engine) -> list[StepOutputs]:
    """The outputs of every step that `engine` will read."""
    outputs, read = [], engine._read

    def spy(step, news):
        outputs.append(jax.device_get(step.outputs))
        return read(step, news)

    engine._read = spy
    return outputs


def again(path: Path, **changes) -> Iterator[StepOutputs]:
    form, tokenizer, config = model()
    return replay(path, *(form, tokenizer), **dict(model_config=config) | changes)


def assert_same(found: list[StepOutputs], wanted: list[StepOutputs]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        leaves, structure = jax.tree.flatten(one)
        others, other_structure = jax.tree.flatten(other)
        assert structure == other_structure
        for mine, theirs in zip(leaves, others, strict=True):
            assert type(mine) is np.ndarray and mine.dtype == theirs.dtype
            assert mine.tobytes() == theirs.tobytes()


def step(engine: Engine, times: int = 400) -> None:
    for _ in range(times):
        if not engine.has_work:
            return
        engine.step()
    assert times < 400, "the engine does not come to an end"


def test_a_run_with_preemptions_aborts_and_prefix_hits(tmp_path):
    """It begins with a pool that was shrunk and saved, since a recording has no hand in it."""
    form, tokenizer, config = model()
    small = make_engine()
    shrink_pool(small, 50)
    small.submit(PROMPTS[7][:9], SAMPLED)
    small.step()
    small.save(tmp_path / "saved")
    path = tmp_path / "run.jsonl"
    engine = Engine.restore(tmp_path / "saved", form, tokenizer, model_config=config, record=path)
    wanted = watch(engine)
    gone = []
    for i in range(3):
        # In turn: longer than a chunk, with a prefix that was seen, aborted while it waits.
        engine.submit(PROMPTS[i], SAMPLED, ttft_target_seconds=0.5, tpot_target_seconds=0.01)
        step(engine, 2)
        engine.submit(PROMPTS[i][:60] + [i], dataclasses.replace(SAMPLED, seed=i), priority=2)
        gone += [engine.submit(PROMPTS[i + 3], GREEDY, deadline_seconds=3) for _ in range(2)]
        engine.abort(gone[-1])
        step(engine, 3)
        engine.abort(gone[-2])
        step(engine, 2)
    step(engine)
    engine.stop_recording()
    metrics = engine.metrics()
    assert metrics["num_preemptions"] > 0 and metrics["num_prefix_hit_tokens"] > 0
    assert_same(list(again(path, snapshot=tmp_path / "saved")), wanted)

    with pytest.raises(ValueError, match="snapshot=None: .* was restored: give its folder"):
        again(path)
    make_engine().save(tmp_path / "other")
    with pytest.raises(ValueError, match="snapshot='.*other': is .*, but .*line 1 names"):
        again(path, snapshot=tmp_path / "other")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, list[StepOutputs]]:
    """A run from an empty engine: several outputs, stop strings, a clock that starts anew."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    engine = make_engine(seed=7, record=path)
    wanted = watch(engine)
    engine.submit("many", dataclasses.replace(SAMPLED, n=3, max_tokens=9))
    step(engine, 2)
    engine._origin -= REBASE_SECONDS
    engine.submit([1, 2], dataclasses.replace(SAMPLED, stop=["\u2028", "e"], max_tokens=30))
    step(engine, 1)
    engine.submit([3] * 70, dataclasses.replace(GREEDY, max_tokens=5), deadline_seconds=7)
    step(engine)
    # Idle, and begun again: the clock has gone on.
    engine.submit([1, 2, 3, 4], dataclasses.replace(SAMPLED, seed=2**63 - 1, max_tokens=4))
    step(engine)
    return path, wanted


def test_a_run_from_an_empty_engine(recorded):
    path, wanted = recorded
    # The engine became idle: all is in the file though nobody closed it.
    assert_same(list(again(path)), wanted)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum("rebase_seconds" in line for line in lines) == 1
    ended = dict(pair for line in lines for pair in line.get("ended", []))
    assert set(ended) == {0, 1, 2, 3, 4, 5} and ended[0] == 9 and ended[4] == 5
    requests = [request for line in lines for request in line.get("requests", [])]
    assert [request["row_ids"] for request in requests] == [[0, 1, 2], [3], [4], [5]]
    assert requests[2]["prompt_token_ids"] == [3] * 70
    assert requests[2]["targets"] == {"deadline_seconds": 7}


def test_steps_can_be_read_without_a_model(recorded):
    path, _ = recorded
    _, tokenizer, config = model()
    run = read_recording(path)
    assert run.header["identity"]["model_config"]["num_layers"] == 2
    steps = [inputs for _, inputs in run.steps(tokenizer, config.eos_token_ids)]
    arrived = [request for inputs in steps for request in inputs.arrived]
    assert [len(request.rows) for request in arrived] == [3, 1, 1, 1]
    assert arrived[3].rows[0].row.params.seed == 2**63 - 1
    assert arrived[2].targets == Targets(deadline_seconds=7)


def test_one_that_was_cut_off_replays_as_far_as_it_goes(recorded, tmp_path):
    path, wanted = recorded
    content = path.read_bytes()
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    cut = tmp_path / "cut.jsonl"
    for size, num_lines in ((ends[3] + 30, 4), (ends[3] + 1, 4), (ends[4], 5)):
        cut.write_bytes(content[:size])
        steps = [json.loads(line) for line in content.splitlines()[1:num_lines]]
        num_steps = sum("rounds" in fields or "aborts" in fields for fields in steps)
        assert num_steps > 1
        assert_same(list(again(cut)), wanted[:num_steps])
    cut.write_bytes(content[: ends[0] - 5])
    with pytest.raises(ValueError, match="format=None: this version reads 'helios-jax-recording'"):
        again(cut)


@pytest.mark.parametrize(
    "old, new, number",
    [
        (b'"now":', b'"now" ', 3),
        (b'"max_rounds":4', b'"max_rounds":5', 3),
        (b'"prompt_token_ids":[1,2]', b'"prompt_token_ids":[1,3]', 4),
        (b'"format_version":1', b'"format_version":2', 1),
    ],
)
def test_a_damaged_line_is_named(recorded, old, new, number, tmp_path):
    lines = recorded[0].read_bytes().splitlines(keepends=True)
    assert old in lines[number - 1]
    lines[number - 1] = lines[number - 1].replace(old, new)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=f"bad.jsonl, line {number}: its checksum is not"):
        list(again(bad))
    del lines[number - 1]
    bad.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=f"line {number}: it says that it is line {number + 1}"):
        list(again(bad))


def test_another_model_or_policy_is_refused(recorded, caplog):
    path, wanted = recorded
    form, _, config = model()
    bias = form.params["params"]["final_norm"]["scale"]
    params = {"params": form.params["params"] | {"final_norm": {"scale": -bias}}}
    cases = [
        (dict(urgency=fcfs), "urgency='helios_jax.scheduler.urgency:deadline', but '.*:fcfs' here"),
        (dict(snapshot="x"), "snapshot='x': .* started empty; leave it out"),
        (dict(model_config=dataclasses.replace(config, bos_token_id=7)), "bos_token_id=256, but 7"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            again(path, **changes)
    with pytest.raises(ValueError, match="parameters='.*use the very checkpoint"):
        replay(path, form._replace(params=params), model()[1], model_config=config)
    assert not caplog.records


def test_other_versions_are_told(recorded, caplog, monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.0")
    again(recorded[0])
    assert "bits may differ" in caplog.text


def test_a_path_that_is_taken_is_refused(recorded):
    with pytest.raises(ValueError, match="run.jsonl': exists already; give a new name"):
        make_engine(record=recorded[0])


def test_a_run_goes_on_after_a_step_that_failed(tmp_path):
    engine = make_engine(record=tmp_path / "run.jsonl")
    wanted = watch(engine)
    engine.submit([1, 2, 3], GREEDY)
    step(engine, 2)
    device, form = engine._device, engine.form
    device.form = form._replace(params={"params": {}})
    engine.submit([4], GREEDY)
    with pytest.raises(EngineError):
        step(engine)
    device.form = form
    engine.submit([5, 6], dataclasses.replace(SAMPLED, max_tokens=6))
    step(engine)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert sum("starts_over" in line for line in lines) == 1
    # The second step was in flight when the third failed, and was never read.
    found = list(again(tmp_path / "run.jsonl"))
    assert_same([found[0], *found[2:]], wanted)


def test_a_recording_that_begins_later(tmp_path):
    """With an empty engine that has seen larger sampling parameters already."""
    engine, path = make_engine(), tmp_path / "run.jsonl"
    params = dataclasses.replace(GREEDY, stop_token_ids=list(range(200, 209)), max_tokens=6)
    engine.generate([[5] * 40], [params])
    engine.start_recording(path)
    wanted = watch(engine)
    engine.submit([5] * 40, params)
    with pytest.raises(ValueError, match="1 requests are in flight"):
        engine.start_recording(tmp_path / "other.jsonl")
    step(engine)
    assert engine.metrics()["num_prefix_hit_tokens"] == 0
    assert_same(list(again(path)), wanted)
    with pytest.raises(ValueError, match="a recording goes on"):
        engine.start_recording(tmp_path / "other.jsonl")
    engine.stop_recording()


def test_every_parameter_of_a_request_is_kept():
    _, tokenizer, config = model()
    params = SamplingParams(
        n=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.3, logit_bias={3: 1.5, 4: -2.0},
        allowed_token_ids=[3, 4, 5], bad_words=["a b"], bad_words_token_ids=[[1, 2], [3]],
        max_tokens=16, min_tokens=2, stop=["x", "yz"], stop_token_ids=[9],
        include_stop_str_in_output=True, ignore_eos=True, seed=-5, logprobs=2, prompt_logprobs=0,
        detokenize=True, skip_special_tokens=False,
    )  # fmt: skip
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    same = [name for name, value in defaults.items() if getattr(params, name) == value]
    assert same == ["max_tokens", "detokenize"]
    rows = start_rows([7, 8], params, tokenizer, config.eos_token_ids, 192, np.random.default_rng())
    request = EngineRequest(
        request_id=4, prompt=None, prompt_token_ids=[7, 8], rows=rows, row_ids=[4, 5],
        targets=Targets(1.5, 2.5, 3.5, 4.5), arrival_seconds=0.1, submitted_seconds=0.0,
        on_update=None, is_streamed=False,
    )  # fmt: skip
    fields = json.loads(json.dumps(request_to_json(request, 0.0), allow_nan=False))
    found = request_from_json(fields, tokenizer, config.eos_token_ids, 0.0)
    for name in ("request_id", "row_ids", "prompt_token_ids", "targets", "arrival_seconds"):
        assert getattr(found, name) == getattr(request, name)
    assert [row.row for row in found.rows] == [row.row for row in request.rows]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path, caplog):
    engine = make_engine(record=tmp_path / "run.jsonl")
    engine._recorder._file = open("/dev/full", "w")
    engine._recorder._close = weakref.finalize(
        engine._recorder, recording._close, engine._recorder._file
    )
    for _ in range(2):
        engine.submit([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=4))
        step(engine)
    assert engine.metrics()["num_output_tokens"] == 8
    assert caplog.text.count("the recording ends at line") == 1
    engine.stop_recording()


def test_the_example_in_the_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (example,) = (example for example in EXAMPLES if "Engine.restore" in example)
    exec(example, {"engine": make_engine(record="run.jsonl")})
    assert len(list(again(tmp_path / "run.jsonl"))) > 1
    assert "tokens drawn" in capsys.readouterr().out


def test_a_line_costs_little(tmp_path):
    recorder = Recorder(tmp_path / "run.jsonl", {})
    chunk = Variant(8, 2048, chunk_tokens=512)
    decode = StepInputs(12.345678, variants=StepVariants(None, chunk, True), max_rounds=16)
    number = 2000
    began = time.process_time()
    for _ in range(number):
        recorder.step(decode, 0.0)
    seconds = (time.process_time() - began) / number
    recorder.close()
    size = (tmp_path / "run.jsonl").stat().st_size / number
    print(f"{seconds * 1e6:.1f} us and {size:.0f} bytes a step")
    assert seconds < 1e-3 and size < 250
