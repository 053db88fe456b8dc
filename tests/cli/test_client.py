"""Does `helios client` ask a server what was meant, and say what it said?"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from helios_jax.server.proto import inference_pb2 as pb
from helios_jax.server.proto.inference_pb2_grpc import (
    InferenceServicer,
    add_InferenceServicer_to_server,
)


class Echo(InferenceServicer):
    """Answers with the prompt's words; `asked` is what came."""

    def __init__(self):
        self.asked: list[Any] = []
        self.metadata: list[dict] = []

    def Generate(self, request, context):
        yield from self._answer(request, request.text, context)

    def Chat(self, request, context):
        text = "|".join(f"{m.role}:{m.content}" for m in request.conversation.messages)
        yield from self._answer(request, text, context)

    def _answer(self, request, text, context):
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if request.sampling.top_p > 1:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "top_p=2.0: must be in (0, 1]")
        yield pb.GenerateResponse(started=pb.Started(request_id="x"))
        for i, word in enumerate(text.split(" ")):
            tokens = pb.Tokens(text=" " * (i > 0) + word, token_ids=[i])
            yield pb.GenerateResponse(tokens=tokens)
        end = pb.OutputEnd(finish_reason=pb.FINISH_REASON_STOP, num_tokens=i + 1)
        finished = pb.Finished(
            outputs=[end], usage=pb.Usage(prompt_tokens=7, completion_tokens=i + 1),
            timings=pb.Timings(ttft_seconds=0.5, total_seconds=1, tpot_seconds=0.25),
            acceptance=pb.Acceptance(num_draft_tokens=4, num_accepted_tokens=3),
        )  # fmt: skip
        yield pb.GenerateResponse(finished=finished)

    def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(model="m", has_chat_template=True)

    def GetServerInfo(self, request, context):
        return pb.GetServerInfoResponse(state=pb.SERVER_STATE_SERVING, platform="cpu")


@pytest.fixture
def echo():
    servicer, server = Echo(), grpc.server(ThreadPoolExecutor(2))
    add_InferenceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(None)


def test_text_on_stdout_statistics_on_stderr(echo, helios):
    code, out, err = helios("client", "generate", "Hello wörld", "--raw", "--address", echo.address)
    assert (code, out) == (0, "Hello wörld\n")
    assert err == (
        "[prompt 7 tokens, first token 0.50 s; 2 tokens, stop, 4.0 tokens/s, 75% of drafts "
        "accepted]\n"
    )
    sampling = echo.asked[0].sampling
    assert sampling.temperature == 0 and sampling.max_tokens == 256


def test_a_chat_where_the_model_has_a_template(echo, helios, tmp_path):
    (tmp_path / "token").write_text("secret\nmore\n")
    code, out, _ = helios(
        "client", "generate", "-", "--system", "Be brief.", "--address", echo.address,
        "--no-stats", "--top-k", "5", "--stop", "x", "--token-file", str(tmp_path / "token"),
        input=b"Hi\n",
    )  # fmt: skip
    assert (code, out) == (0, "system:Be brief.|user:Hi\n")
    assert echo.asked[0].sampling.top_k == 5 and echo.asked[0].sampling.stop == ["x"]
    assert echo.metadata[0]["authorization"] == "Bearer secret"


def test_what_the_server_refuses_is_one_message(echo, helios):
    code, _, err = helios("client", "generate", "Hi", "--top-p", "2", "--address", echo.address)
    assert code == 2 and "helios: error: INVALID_ARGUMENT: top_p=2.0: must be in (0, 1]" in err
    code, _, err = helios("client", "generate", "Hi", "--address", "127.0.0.1:1")
    assert code == 1 and "helios: error: UNAVAILABLE: " in err


def test_info_is_json(echo, helios):
    code, out, _ = helios("client", "info", "--address", echo.address)
    assert code == 0
    shown = json.loads(out)
    assert shown["model"] == {"model": "m", "has_chat_template": True}
    assert shown["server"]["state"] == "SERVER_STATE_SERVING"
