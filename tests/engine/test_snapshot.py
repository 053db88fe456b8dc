"""Does a restored engine go on as the saved one would have?"""

import copy
import dataclasses
import json
import shutil
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helios_jax.cache.paged import KVScales
from helios_jax.engine import Engine, RequestUpdate
from helios_jax.engine.request_json import progress_to_json, resume_row
from helios_jax.engine.requests import start_row
from helios_jax.engine.row_progress import Row, RowProgress
from helios_jax.outputs import RequestOutput
from helios_jax.sampling import SamplingParams
from tests import tiny
from tests.engine.conftest import expected, make_engine, model

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.1, seed=3, max_tokens=20, ignore_eos=True)
PROMPTS = np.random.default_rng(4).integers(0, 256, (8, 90)).tolist()


def restore(folder: Path, **changes) -> Engine:
    form, tokenizer, config = model()
    options = dict(form=form, tokenizer=tokenizer, model_config=config) | changes
    return Engine.restore(folder, **options)


def drain(engine: Engine) -> list[RequestUpdate]:
    updates = []
    for _ in range(400):
        if not engine.has_work:
            return updates
        updates += engine.step()
    raise AssertionError("the engine does not come to an end")


def texts(updates: list[RequestUpdate]) -> dict[tuple[int, int], tuple[str, list[int]]]:
    """What a client puts together, per request and output."""
    found: dict[tuple[int, int], tuple[str, list[int]]] = {}
    for update in updates:
        text, ids = found.get((update.request_id, update.index), ("", []))
        ids = ids + update.stream.token_ids
        found[update.request_id, update.index] = (text + update.stream.text, ids)
    return found


def outcomes(updates: list[RequestUpdate]) -> dict[int, RequestOutput]:
    """Finished requests, without what was measured, and without logprobs."""

    def exact(output: RequestOutput) -> RequestOutput:
        outputs = [
            dataclasses.replace(one, logprobs=None, cumulative_logprob=None)
            for one in output.outputs
        ]
        return dataclasses.replace(output, timings=None, outputs=outputs, prompt_logprobs=None)

    done = {u.request_id: u.stream.request_output for u in updates}
    return {number: exact(output) for number, output in done.items() if output is not None}


def logprobs(updates: list[RequestUpdate]) -> list[float]:
    """All that were reported, in order of requests, outputs, positions and ranks.

    They are only as equal as rounding leaves them: what else is in a chunk hangs on what the host
    had read when it chose the sizes, and saving changes that.
    """
    done = {u.request_id: u.stream.request_output for u in updates}
    positions = [
        position
        for _, output in sorted((n, output) for n, output in done.items() if output is not None)
        for found in (output.prompt_logprobs, *(one.logprobs for one in output.outputs))
        for position in found or []
        if position is not None
    ]
    return [entry.logprob for position in positions for entry in position.values()]


def submit_all(engine: Engine) -> list[int]:
    """A request of every kind, more than run at a time; of few shapes, which other tests have."""
    byte = {engine.tokenizer.token_bytes(i): i for i in range(256)}
    penalised = dataclasses.replace(
        SAMPLED, repetition_penalty=1.2, frequency_penalty=0.5, seed=None, n=2, max_tokens=18
    )
    only_a = {byte[b"a"]: 100.0, byte[b"b"]: -100.0}
    stops = dict(stop_token_ids=[200, 201, 202, 203, 204], min_tokens=15, stop=["a"])
    requests = [
        # Held back for ever: a stop string that is never complete, a character likewise.
        ("x", dataclasses.replace(GREEDY, logit_bias=only_a, stop=["a" * 30, "ab"])),
        ("y", dataclasses.replace(GREEDY, allowed_token_ids=[byte[b"\xe2"]])),
        (PROMPTS[1], dataclasses.replace(SAMPLED, logprobs=3, prompt_logprobs=1, max_tokens=30)),
        (PROMPTS[2][:60], penalised),
        (PROMPTS[2][:60] + [1, 2], dataclasses.replace(SAMPLED, **stops)),
    ]
    return [engine.submit(*request) for request in requests]


def test_every_request_goes_on_with_the_same_tokens(tmp_path):
    engine = make_engine()
    numbers = submit_all(engine)
    updates: list[RequestUpdate] = []
    told_before: dict[Path, int] = {}
    states: dict[Path, list[tuple]] = {}
    for num_steps in (0, 1, 2, 4, 4):
        for _ in range(num_steps):
            updates += engine.step()
        folder = tmp_path / str(len(states))
        updates += engine.save(folder)
        assert not engine._in_flight
        told_before[folder] = len(updates)
        states[folder] = hidden_states(engine)
    updates += drain(engine)
    assert set(outcomes(updates)) == {*numbers}
    after = next_request(engine)
    for folder, number in told_before.items():
        again = restore(folder)
        assert hidden_states(again) == states[folder]
        later = drain(again)
        assert texts(updates[:number] + later) == texts(updates)
        assert outcomes(updates[:number] + later) == outcomes(updates)
        np.testing.assert_allclose(
            logprobs(updates[:number] + later), logprobs(updates), rtol=0, atol=1e-5
        )
        assert again.metrics()["num_used_blocks"] == 0
        assert next_request(again) == after


def next_request(engine: Engine) -> tuple:
    """What follows from the random generator, the numbers and the cached blocks."""
    params = dataclasses.replace(SAMPLED, seed=None, max_tokens=4)
    hits = engine.metrics()["num_prefix_hit_tokens"]
    engine.submit(PROMPTS[1], params)
    found = texts(drain(engine))
    return found, engine.metrics()["num_prefix_hit_tokens"] - hits


def hidden_states(engine: Engine) -> list[tuple]:
    rows = [row for request in engine._requests.values() for row in request.rows]
    return copy.deepcopy([hidden_state(row) for row in rows])


def hidden_state(row: RowProgress) -> tuple:
    """All that decides what an output's next tokens do to it."""
    told = (row.text, row.token_ids, row.logprobs, row.prompt_logprobs)
    ends = (row.finish_reason, row.stop_reason, row.num_unmatched_chars, row.row, row.eos_token_ids)
    if row.finish_reason is not None:
        return told + ends
    decoder, matcher = row.decoder, row.matcher
    decoding = (decoder._utf8.getstate(), decoder._num_chars, decoder.text_lengths)
    return told + ends + decoding + (matcher._held, matcher._num_chars, matcher._stopped)


@given(
    tokens=st.lists(st.integers(97, 102) | st.integers(0, 257), max_size=30),
    cut=st.integers(0, 30),
    stop=st.lists(st.text("abcd", min_size=1, max_size=4), max_size=2),
    min_tokens=st.integers(0, 12),
)
def test_an_output_that_is_resumed_is_in_the_same_state(tokens, cut, stop, min_tokens):
    tokenizer = model()[1]
    params = SamplingParams(stop=stop, min_tokens=min_tokens, max_tokens=40)

    def start() -> RowProgress:
        return start_row(Row([1], params), tokenizer, (tiny.EOS,))

    def go_on(row: RowProgress, tokens) -> None:
        for token in tokens:
            if row.finish_reason is None:
                row.add(token, None)

    row, resumed = start(), start()
    go_on(row, tokens[:cut])
    resume_row(resumed, json.loads(json.dumps(progress_to_json(row, 5.0))), 5.0)
    assert hidden_state(resumed) == hidden_state(row)
    for each in (row, resumed):
        go_on(each, tokens[cut:])
        each.finish("length")
    assert hidden_state(resumed) == hidden_state(row)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """An engine with two requests in flight, of which the second has two outputs, one over."""
    engine = make_engine()
    params = SamplingParams(temperature=1.0, n=2, seed=5, max_tokens=24, ignore_eos=True)
    mine, other = (o.text for o in engine.generate(["two"], [params])[0].outputs)
    stop = next(mine[i : i + 3] for i in range(3, 9) if mine[i : i + 3] not in other)
    engine.submit("one", dataclasses.replace(GREEDY, max_tokens=40))
    engine.submit("two", dataclasses.replace(params, stop=[stop]))
    rows = engine._requests[3].rows  # 0 and 1 were the outputs of the first
    while rows[0].finish_reason is None:
        engine.step()
    assert rows[1].finish_reason is None
    folder = tmp_path_factory.mktemp("engine") / "saved"
    engine.save(folder)
    return folder


def test_a_restored_request_is_taken_up_where_it_is(saved):
    engine = restore(saved)
    number, double = engine.request_ids
    stream = engine.follow(number)
    first = next(stream)
    assert first.text and len(first.token_ids) >= 2
    parts = [first, *stream]
    assert [token for part in parts for token in part.token_ids] == expected(
        engine.tokenizer.encode("one"), dataclasses.replace(GREEDY, max_tokens=40)
    )
    output = parts[-1].request_output.outputs[0]
    assert "".join(part.text for part in parts) == output.text
    assert output.finish_reason == "length"

    engine = restore(saved)
    told: list[RequestUpdate] = []
    engine.attach(double, told.append)
    assert [(u.index, u.stream.finish_reason) for u in told] == [(0, "stop"), (1, None)]
    returned = drain(engine)
    assert told[2:] == [u for u in returned if u.request_id == double]
    request_output = told[-1].stream.request_output
    assert request_output.prompt == "two" and len(request_output.outputs) == 2
    for (_, index), (text, _) in texts(told).items():
        assert text == request_output.outputs[index].text

    with pytest.raises(ValueError, match=rf"request_id={double}: is not in flight; those are \[\]"):
        engine.attach(double, told.append)
    with pytest.raises(ValueError, match="request_id=99: is not in flight"):
        restore(saved).follow(99)
    with pytest.raises(ValueError, match="n=2: a stream has one output"):
        restore(saved).follow(double)


def test_the_clock_goes_on_where_it_stopped(monkeypatch, tmp_path):
    engine = make_engine()
    number = engine.submit([1, 2, 3], GREEDY, deadline_seconds=50, ttft_target_seconds=20)
    engine.step()
    engine.save(tmp_path / "saved")
    for name in ("monotonic", "perf_counter"):
        clock = getattr(time, name)
        monkeypatch.setattr(time, name, lambda clock=clock: clock() + 1e6)
    again = restore(tmp_path / "saved")
    assert 0 <= time.monotonic() - again._origin < 30
    row = again._device.state.scheduler.request_id_R.tolist().index(number)
    assert 50 <= float(again._device.state.scheduler.deadline_R[row]) < 80
    (output,) = [u.stream.request_output for u in drain(again) if u.stream.request_output]
    assert output.timings.ttft_seconds <= output.timings.total_seconds < 60


def test_only_blocks_with_content_are_written(saved):
    arrays = json.loads((saved / "manifest.json").read_text())["arrays"]
    engine = restore(saved)
    pool = engine._device.state.scheduler.pool
    num_kept = int(pool.num_blocks - pool.num_ready)
    assert 0 < num_kept < 100
    assert arrays["pools.k"]["shape"][0] == 2 * num_kept
    size = sum(path.stat().st_size for path in saved.rglob("*"))
    assert size < 1 << 20


def test_an_empty_engine_and_one_with_a_call_off_pending(tmp_path):
    engine = make_engine()
    engine.save(tmp_path / "empty")
    assert not restore(tmp_path / "empty").has_work
    number = engine.submit([1, 2], GREEDY)
    engine.step()
    engine.abort(number)
    engine.save(tmp_path / "pending")
    again = restore(tmp_path / "pending")
    assert again.has_work and drain(again) == []
    assert again.metrics()["num_running"] == again.metrics()["num_used_blocks"] == 0


def test_saving_beside_the_stepping_thread(tmp_path):
    engine = make_engine()
    long = dataclasses.replace(GREEDY, max_tokens=150)
    outputs = []
    client = threading.Thread(target=lambda: outputs.extend(engine.generate([[7]], [long])))
    engine.start()
    try:
        client.start()
        while not engine.metrics().get("num_output_tokens"):
            time.sleep(0.001)
        engine.save(tmp_path / "saved")
        client.join(60)
    finally:
        engine.stop()
    again = restore(tmp_path / "saved")
    (number,) = again.request_ids
    tokens = [token for part in again.follow(number) for token in part.token_ids]
    assert tokens == outputs[0].outputs[0].token_ids
    assert tokens[:64] == expected([7], long)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def largest(folder: Path) -> Path:
    files = (path for path in (folder / "device").rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: shutil.rmtree(f), "there is no such folder"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json: the file is missing; save the"),
        (lambda f: truncate(f / "manifest.json"), None),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json: is not valid JSON"),
        (lambda f: edit(f / "manifest.json", format_version=9), "format_version=9: this version"),
        (lambda f: edit(f / "manifest.json", files=[]), r"files=\[\]: must be an object"),
        (lambda f: edit(f / "manifest.json", arrays={}), r"arrays.finish_reason_R=None, but {'dt"),
        (lambda f: edit(f / "manifest.json", settings={}), "settings are not of this version"),
        (lambda f: (f / "host.json").unlink(), "host.json: the file is missing"),
        (lambda f: flip(f / "host.json"), "host.json: sha256='.*', but manifest.json says '.*'"),
        (lambda f: truncate(f / "host.json"), r"host.json: size=\d+, but manifest.json says \d+"),
        (lambda f: flip(largest(f)), "sha256='.*it was changed or damaged; save the engine again"),
        (lambda f: largest(f).unlink(), "the file is missing"),
        (lambda f: (f / "device" / "more").touch(), "more: manifest.json does not list it; remove"),
    ],
)
def test_a_damaged_folder_is_refused(saved, damage, message, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    damage(folder)
    if message is None:  # a newline at the end, without which it is the same
        assert restore(folder).request_ids
        return
    with pytest.raises(ValueError, match=message):
        restore(folder)


def test_another_model_or_configuration_is_refused(saved, tmp_path):
    form, tokenizer, config = model()
    scale = form.params["params"]["final_norm"]["scale"]
    changed = form.params["params"] | {"final_norm": {"scale": scale.at[3].add(1e-6)}}
    cases = [
        (dict(form=form._replace(params={"params": changed})), "parameters='.*', but '.*' here; u"),
        (dict(model_config=dataclasses.replace(config, rms_norm_eps=1e-6)), "rms_norm_eps=1e-05, "),
        (dict(form=form._replace(cache_dtype=jnp.bfloat16)), "cache_dtype='float32', but 'bfloat"),
        (dict(tokenizer=other_tokenizer()), "tokenizer='.*; use the tokeni"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            restore(saved, **changes)
    shutil.copytree(saved, tmp_path / "copy")
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["settings"]["config"]["max_rounds"] = 8
    edit(tmp_path / "copy" / "manifest.json", settings=manifest["settings"])
    with pytest.raises(ValueError, match="scheduler_config.max_rounds=16, but 8 here"):
        restore(tmp_path / "copy")


def other_tokenizer():
    tokenizer = tiny.tokenizer()
    tokenizer.backend.add_special_tokens(["<more>"])
    return tokenizer


def test_a_folder_appears_whole_or_not_at_all(monkeypatch, tmp_path):
    engine = make_engine()
    engine.submit([1], GREEDY)
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="taken': exists already; give a new name"):
        engine.save(tmp_path / "taken")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("helios_jax.engine.snapshot._write_json", fail)
    with pytest.raises(OSError, match="No space left"):
        engine.save(tmp_path / "new" / "saved")
    assert not any((tmp_path / "new").iterdir())
    assert len(texts(drain(engine))[0, 0][1]) == 20


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8"])
def test_two_precisions_with_scales(kv_cache_dtype, tmp_path):
    form, tokenizer, config = model()
    scales = KVScales(jnp.full((2, 2), 0.7, jnp.float32), jnp.full((2, 2), 1.3, jnp.float32))
    engine = Engine(
        form, tokenizer, model_config=config, kv_scales=scales,
        config=dataclasses.replace(
            make_engine().config, kv_cache_dtype=kv_cache_dtype, kv_watermark=40
        ),
    )  # fmt: skip
    for prompt in (PROMPTS[0], PROMPTS[1][:20], PROMPTS[2][:38]):
        engine.submit(prompt, dataclasses.replace(SAMPLED, max_tokens=40))
    for num_steps in range(3):
        for _ in range(2):
            engine.step()
        engine.save(tmp_path / str(num_steps))
    wanted = outcomes(drain(engine))
    for num_steps in range(3):
        found = outcomes(drain(restore(tmp_path / str(num_steps))))
        assert found and found == {number: wanted[number] for number in found}
    assert engine.metrics()["num_migrations"] > 0
    # Steps donate the state that scales are in, not the caller's scales.
    assert float(scales.k_LK.sum()) == pytest.approx(2.8)
