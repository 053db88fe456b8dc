"""What does a fault cost, and whom? Aborts, NaN, full tables, steps and threads that fail."""

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest

from helios_jax.engine import EngineError, EngineFull
from tests.engine.conftest import (
    GREEDY,
    assert_empty,
    drain,
    expected,
    make_engine,
    model,
    tokens_of,
)


def test_an_abort_at_any_moment_frees_everything(engine):
    for steps in range(4):
        keep = engine.submit([1, 2, 3], GREEDY)
        gone = [engine.submit([4] * n, GREEDY) for n in (3, 90)]
        updates = []
        for _ in range(steps):
            updates += engine.step()
        for number in gone:
            engine.abort(number)
        engine.abort(gone[0])
        later = drain(engine)
        assert {update.request_id for update in later} <= {keep}
        assert tokens_of(updates + later)[keep, 0] == expected([1, 2, 3], GREEDY)
        assert_empty(engine)


def test_an_abort_between_a_step_and_its_reading_is_no_fault(engine):
    """The device may finish a request that was called off since: nobody hears of it."""
    keep = engine.submit([1, 2, 3], GREEDY)
    gone = engine.submit([4, 4], dataclasses.replace(GREEDY, max_tokens=1))
    assert engine._launch() and engine._in_flight
    engine.abort(gone)
    updates = drain(engine)
    assert {update.request_id for update in updates} == {keep}
    assert tokens_of(updates)[keep, 0] == expected([1, 2, 3], GREEDY)
    assert_empty(engine)


def test_a_callback_that_fails_loses_its_own_request_only(engine):
    def fail(update):
        raise RuntimeError("Event loop is closed")

    keep = engine.submit([1, 2, 3], GREEDY)
    engine.submit([5, 5], GREEDY, on_update=fail)
    assert tokens_of(drain(engine))[keep, 0] == expected([1, 2, 3], GREEDY)
    assert_empty(engine)


def test_a_row_that_is_not_a_number_fails_alone():
    form, _, config = model()
    table = form.params["params"]["embed"]["embedding"]
    poisoned = {
        "params": form.params["params"]
        | {"embed": {"embedding": table.at[35].set(np.nan)}, "lm_head": {"kernel": table.T}}
    }
    untied = dataclasses.replace(
        form.model, config=dataclasses.replace(config, tie_word_embeddings=False)
    )
    engine = make_engine(form._replace(model=untied, params=poisoned))
    healthy = engine.submit([65, 66, 67], GREEDY)
    failed = engine.submit([65, 35, 67], GREEDY)
    last = {update.request_id: update for update in drain(engine)}
    assert last[failed].stream.finish_reason == "error"
    assert last[failed].stream.request_output.outputs[0].token_ids == []
    assert last[healthy].stream.finish_reason == "length"
    output = last[healthy].stream.request_output.outputs[0]
    assert output.token_ids == expected([65, 66, 67], GREEDY)
    assert engine.metrics()["num_failed"] == 1
    assert_empty(engine)
    # Its blocks were not offered to others.
    again = engine.submit([65, 66, 67], GREEDY)
    assert tokens_of(drain(engine))[again, 0] == output.token_ids


def test_a_full_table_refuses_and_may_be_tried_again(engine):
    numbers = [engine.submit([i, 1], GREEDY) for i in range(8)]
    with pytest.raises(EngineFull, match="max_num_rows=8 .* try again"):
        engine.submit([1], GREEDY)
    found = tokens_of(drain(engine))
    assert set(found) == {(number, 0) for number in numbers}
    assert found[numbers[3], 0] == expected([3, 1], GREEDY)
    # generate() waits outside the table instead.
    outputs = engine.generate([[i, 2] for i in range(11)], [GREEDY] * 11)
    assert [o.outputs[0].token_ids for o in outputs] == [
        expected([i, 2], GREEDY) for i in range(11)
    ]


def test_a_failing_step_fails_requests_with_the_cause_and_the_engine_goes_on():
    engine = make_engine()
    device, form, told = engine._device, engine.form, []
    engine.submit([1, 2], GREEDY, on_update=told.append)
    device.form = form._replace(params={"params": {}})
    with pytest.raises(EngineError, match="a step failed") as failure:
        drain(engine)
    assert failure.value.__cause__ is not None
    assert told[-1].error is failure.value and told[-1].stream.finish_reason == "error"
    assert not engine.has_work
    device.form = form
    number = engine.submit([1, 2], GREEDY)
    assert tokens_of(drain(engine))[number, 0] == expected([1, 2], GREEDY)


def test_a_failing_step_leaves_room_for_new_pools(monkeypatch):
    """The frames that the error holds refer to the old ones."""
    engine = make_engine()
    device, states = engine._device, []
    device.form = engine.form._replace(params={"params": {}})
    begin = device.start_over
    monkeypatch.setattr(device, "start_over", lambda: states.append(device.state) or begin())
    engine.submit([1, 2], GREEDY)
    with pytest.raises(EngineError) as failure:
        drain(engine)
    [state] = states
    assert failure.value.__cause__ is not None
    assert all(array.is_deleted() for array in jax.tree.leaves(state.pools))


def test_everybody_is_told_even_if_the_engine_cannot_begin_again(monkeypatch):
    """By stepping and by the thread, which says that it ends, and can be started anew."""
    engine = make_engine()
    device, told, failures = engine._device, [], []
    device.form = engine.form._replace(params={"params": {}})

    def no_room():
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(device, "start_over", no_room)
        engine.submit([1, 2], GREEDY, on_update=told.append)
        with pytest.raises(MemoryError):
            drain(engine)
        assert isinstance(told[-1].error, EngineError)
        engine.submit([3], GREEDY, on_update=told.append)
        ended = threading.Event()
        engine.start(on_failure=lambda error: (failures.append(error), ended.set()))
        assert ended.wait(60)
    assert len(told) == 2 and isinstance(failures[0], MemoryError)
    device.form = engine.form
    with pytest.raises(EngineError, match="deleted"):
        # The state is gone; this step finds out, and begins again.
        engine.generate([[1, 2]], [GREEDY])
    [output] = engine.generate([[1, 2]], [GREEDY])
    assert output.outputs[0].token_ids == expected([1, 2], GREEDY)


def test_what_a_failed_step_had_read_is_told(monkeypatch):
    """A request that ended in the part of it that was read."""
    engine = make_engine()
    ends = engine.submit(
        [1, 2], dataclasses.replace(GREEDY, max_tokens=1), on_update=(told := []).append
    )
    read = engine._read

    def fail_afterwards(step, news):
        read(step, news)
        if news:
            raise RuntimeError("a fault of the host")

    monkeypatch.setattr(engine, "_read", fail_afterwards)
    with pytest.raises(EngineError, match="a fault of the host"):
        drain(engine)
    assert told[-1].request_id == ends and told[-1].stream.request_output is not None


def test_ctrl_c_in_a_step_ends_what_was_in_it_and_leaves_an_engine_that_works(monkeypatch):
    """It may have come anywhere: after tokens were taken from the device, say."""
    engine, told = make_engine(), []
    for prompt in ([1, 2], [3]):
        engine.submit(prompt, GREEDY, on_update=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_read", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            drain(engine)
    assert [update.request_id for update in told] == [0, 1]
    assert all("KeyboardInterrupt" in str(update.error) for update in told)
    assert not engine.has_work
    # Of a device that has begun again: nothing runs, and all names are there.
    assert engine.metrics()["num_running"] == engine.metrics()["num_used_blocks"] == 0
    [output] = engine.generate([[1, 2]], [GREEDY])
    assert output.outputs[0].token_ids == expected([1, 2], GREEDY)
    drain(engine)
    assert_empty(engine)


def raising(error: BaseException):
    def fail(*_):
        raise error

    return fail


def test_a_thread_whose_steps_all_fail_ends_and_says_so():
    engine, failures, ended = make_engine(), [], threading.Event()
    engine._device.form = engine.form._replace(params={"params": {}})

    def again(update) -> None:
        if not ended.is_set():
            engine.submit([1, 2], GREEDY, on_update=again)

    engine.submit([1, 2], GREEDY, on_update=again)
    engine.start(on_failure=lambda error: (failures.append(error), ended.set()))
    assert ended.wait(60)
    assert isinstance(failures[0], EngineError) and engine._num_failures_in_a_row == 3


def test_a_request_that_comes_while_the_engine_begins_again_is_served(monkeypatch):
    """One of other shapes than the device has."""
    engine = make_engine()
    device, start_over, numbers = engine._device, engine._device.start_over, []
    params = dataclasses.replace(GREEDY, stop_token_ids=list(range(200, 209)))
    device.form = engine.form._replace(params={"params": {}})

    def begin_again() -> None:
        numbers.append(engine.submit([1, 2], params))
        start_over()

    monkeypatch.setattr(device, "start_over", begin_again)
    engine.submit([3], GREEDY)
    with pytest.raises(EngineError):
        drain(engine)
    device.form = engine.form
    assert tokens_of(drain(engine))[numbers[0], 0] == expected([1, 2], params)


def test_a_thread_that_is_being_stopped_can_be_started(engine, monkeypatch):
    """By an event loop, say, that has just submitted a request."""
    inside, go_on, step = threading.Event(), threading.Event(), engine.step

    def slow_step():
        inside.set()
        assert go_on.wait(60)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)
    done = threading.Event()
    engine.submit([1, 2], GREEDY, on_update=lambda u: u.stream.request_output and done.set())
    engine.start()
    assert inside.wait(60)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    while not engine._is_stopping:
        time.sleep(0.001)
    starting = threading.Thread(target=engine.start)
    starting.start()
    go_on.set()
    for thread in (stopping, starting):
        thread.join(60)
    assert done.wait(60)
    engine.stop()


def test_a_device_without_room_for_the_pool_says_what_to_lower(monkeypatch):
    def fail(*arguments, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr("helios_jax.engine.device.init_state", fail)
    with pytest.raises(MemoryError, match="lower kv_cache_memory_bytes.*RESOURCE_EXHAUSTED"):
        make_engine()
