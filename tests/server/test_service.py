"""Do the parts of a server that has no model yet tell each other what they should?"""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from helios_jax.engine import NeverFits
from helios_jax.server import run
from helios_jax.server.config import ServerConfig
from helios_jax.server.errors import RpcError, blaming_input, to_rpc_error
from helios_jax.server.gate import Call, State, current_call
from helios_jax.server.proto import inference_pb2 as pb
from helios_jax.server.service import _Active


def fake_llm() -> tuple[Any, list[int]]:
    """A model whose engine does nothing, and the numbers of the requests that it aborted."""
    aborted: list[int] = []
    return SimpleNamespace(engine=SimpleNamespace(abort=aborted.append)), aborted


def test_abort_reaches_the_engine_whatever_the_call_waits_for():
    async def work() -> None:
        service = run._Server(ServerConfig())._service
        service.llm, aborted = fake_llm()
        service._active["me", "mine"] = active = _Active("mine", number=3)
        current_call.set(Call("Abort", "me"))
        await service.Abort(pb.AbortRequest(request_id="mine"), None)
        assert aborted == [3]
        with pytest.raises(RpcError, match="aborted by a call of Abort"):
            await active.inbox.read()

    asyncio.run(work())


def test_a_client_that_has_as_much_as_it_may_can_still_abort():
    async def work() -> None:
        gate = run._Server(ServerConfig(max_requests_per_client=1))._gate
        gate.state = State.SERVING
        first = Call("Generate", "me")
        gate._enter(first, None)
        with pytest.raises(RpcError, match="max_requests_per_client=1"):
            gate._enter(Call("Generate", "me"), None)
        for method in ("Abort", "GetServerInfo"):
            call = Call(method, "me")
            gate._enter(call, None)
            gate._leave(call)
        gate._leave(first)
        assert gate.num_calls == 0
        gate._enter(Call("Generate", "me"), None)

    asyncio.run(work())


class Context:
    """A call without a deadline; `aborted` is how it ended."""

    def time_remaining(self) -> None:
        return None

    async def abort(self, code: grpc.StatusCode, message: str, metadata: Any) -> None:
        self.aborted = (code, message)


def test_a_value_error_of_the_servers_own_is_a_fault_with_its_traceback(monkeypatch, caplog):
    # `log_to_stderr` of a test before may have turned this off.
    monkeypatch.setattr(logging.getLogger("helios_jax"), "propagate", True)

    async def broken(request: Any, context: Any) -> None:
        raise ValueError("temperature=-1: is what another part said")

    async def work() -> None:
        gate, context = run._Server(ServerConfig())._gate, Context()
        gate.state = State.SERVING
        await gate._serve(Call("Generate", "me"), broken, None, context, lambda fields: None)
        assert context.aborted[0] is grpc.StatusCode.INTERNAL
        assert "temperature" not in context.aborted[1]

    asyncio.run(work())
    (fault,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert fault.exc_info is not None and isinstance(fault.exc_info[1], ValueError)


def test_an_input_that_never_fits_is_not_one_that_breaks_a_rule():
    with pytest.raises(NeverFits) as raised, blaming_input():
        raise NeverFits("n=9: too many")
    assert to_rpc_error(raised.value).code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("max_num_seqs, sizes", [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_the_warm_up_runs_every_number_of_rows_once(max_num_seqs, sizes):
    asked: list[list[list[int]]] = []
    llm: Any = SimpleNamespace(
        max_num_seqs=max_num_seqs, config=SimpleNamespace(vocab_size=32),
        generate=lambda prompts, params: asked.append(prompts),
    )  # fmt: skip
    run._warm_up(llm)
    assert [len(prompts) for prompts in asked] == sizes
    prompts = [tuple(prompt) for batch in asked for prompt in batch]
    assert len(set(prompts)) == len(prompts)
