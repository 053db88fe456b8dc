"""What do the methods of helios.v1.Inference do?"""

import asyncio
import importlib.metadata
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from helios_jax.llm import LLM
from helios_jax.outputs import RequestOutput, Usage
from helios_jax.server import config as limits
from helios_jax.server.config import ServerConfig
from helios_jax.server.convert import (
    conversation_from_proto,
    finished_to_proto,
    once_to_proto,
    sampling_from_proto,
    scheduling_from_proto,
    tokens_to_proto,
    usage_to_proto,
)
from helios_jax.server.errors import (
    RETRY_SECONDS,
    RpcError,
    StatusCode,
    blaming_input,
    invalid,
    non_finite,
)
from helios_jax.server.gate import Gate, State, current_call
from helios_jax.server.inbox import Inbox
from helios_jax.server.proto import inference_pb2 as pb
from helios_jax.server.proto.inference_pb2_grpc import InferenceServicer
from helios_jax.server.telemetry import ServerMetrics

_STATES = {
    State.LOADING: pb.SERVER_STATE_LOADING,
    State.SERVING: pb.SERVER_STATE_SERVING,
    State.DRAINING: pb.SERVER_STATE_DRAINING,
}
_PACKAGES = ("helios-jax", "jax", "grpcio", "protobuf")
# Shorter texts are tokenised where they are: that takes less than a thread's turn.
_SHORT_CHARS = 2000


@dataclass
class _Active:
    """A request in the engine, by whose number `number` is."""

    request_id: str
    inbox: Inbox = field(default_factory=Inbox)
    number: int = -1


class InferenceService(InferenceServicer):
    """The methods; `gate` has let their calls in and tells clients of what they raise.

    Attributes:
      llm: None until it is loaded; the gate keeps calls away so long.
    """

    def __init__(self, config: ServerConfig, metrics: ServerMetrics, gate: Gate):
        self.llm: LLM | None = None
        self._config = config
        self._metrics = metrics
        self._gate = gate
        self._active: dict[tuple[str, str], _Active] = {}
        self._started = time.monotonic()
        self._versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
        # For long texts and templates, which would keep the loop from everybody else.
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="helios-tokenize")

    def fail_all(self, error: RpcError) -> None:
        """Ends all requests in flight with an error."""
        for active in self._active.values():
            self._fail(active, error)

    def _fail(self, active: _Active, error: RpcError) -> None:
        active.inbox.fail(error)
        # Its call may not look there for long, if the client does not read what was written.
        self._loaded.engine.abort(active.number)

    def close(self) -> None:
        """Lets go of the threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    # Generation

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        ids = await self._prompt_ids(request)
        await self._stream(request, ids, context)

    async def GenerateOnce(
        self, request: pb.GenerateRequest, context: Any
    ) -> pb.GenerateOnceResponse:
        ids = await self._prompt_ids(request)
        with self._submitted(request, ids, context, is_streamed=False) as active:
            outcome = None
            while outcome is None:
                outcome = (await active.inbox.read()).outcome
        self._ended(outcome)
        return once_to_proto(active.request_id, outcome)

    async def Chat(self, request: pb.ChatRequest, context: Any) -> None:
        _, ids = await self._render(request.conversation, add_special_tokens=True)
        await self._stream(request, ids, context)

    async def _stream(
        self, request: pb.GenerateRequest | pb.ChatRequest, ids: list[int], context: Any
    ) -> None:
        with self._submitted(request, ids, context, is_streamed=True) as active:
            started = pb.Started(
                request_id=active.request_id, usage=usage_to_proto(Usage(len(ids), 0))
            )
            await self._write(context, pb.GenerateResponse(started=started))
            outcome = None
            while outcome is None:
                news, outcome = await active.inbox.read()
                for index, each in sorted(news.items()):
                    tokens = tokens_to_proto(index, each.text, each.token_ids, each.logprobs)
                    await self._write(context, pb.GenerateResponse(tokens=tokens))
            self._ended(outcome)
            await self._write(context, pb.GenerateResponse(finished=finished_to_proto(outcome)))

    async def _write(self, context: Any, message: pb.GenerateResponse) -> None:
        """Waits until the client has room for it, but not for ever."""
        seconds = self._config.write_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await context.write(message)
        except TimeoutError:
            raise RpcError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"write_timeout_seconds={seconds}: the client did not read its stream for so "
                "long; read faster, or ask for less",
                "SLOW_READER",
            ) from None

    @contextmanager
    def _submitted(
        self, request: pb.GenerateRequest | pb.ChatRequest, ids: list[int], context: Any,
        is_streamed: bool,
    ) -> Iterator[_Active]:  # fmt: skip
        """A request in the engine; it is aborted however the block is left."""
        call = current_call.get()
        active = _Active(self._request_id(request.request_id, call.client))
        call.fields |= {"request_id": active.request_id, "prompt_tokens": len(ids)}
        engine, key = self._loaded.engine, (call.client, active.request_id)
        time_left = _time_left(context)
        with blaming_input():
            active.number = engine.submit(
                ids,
                sampling_from_proto(request.sampling),
                on_update=active.inbox.put,
                is_streamed=is_streamed,
                deadline_seconds=time_left,
                ends_at_deadline=time_left is not None,
                **scheduling_from_proto(request.scheduling),
            )
        self._active[key] = active
        if self._config.log_prompts:
            call.fields["prompt"] = self._loaded.tokenizer.decode(ids, skip_special_tokens=False)
        try:
            yield active
        finally:
            del self._active[key]
            engine.abort(active.number)

    def _ended(self, outcome: RequestOutput) -> None:
        """Takes note of an outcome; RpcError if the model failed."""
        current_call.get().fields |= {
            "completion_tokens": outcome.usage.completion_tokens,
            "finish_reason": ",".join(output.finish_reason for output in outcome.outputs),
            "ttft_seconds": round(outcome.timings.ttft_seconds, 6),
        }
        if any(output.finish_reason == "error" for output in outcome.outputs):
            raise non_finite()
        self._metrics.finished(outcome)

    def _request_id(self, wanted: str, client: str) -> str:
        if not wanted:
            return uuid.uuid4().hex
        if len(wanted) > limits.MAX_REQUEST_ID_CHARS:
            raise invalid(
                "request_id",
                f"request_id has {len(wanted)} characters: must be at most "
                f"{limits.MAX_REQUEST_ID_CHARS}",
            )
        if (client, wanted) in self._active:
            raise RpcError(
                StatusCode.ALREADY_EXISTS,
                f"request_id={wanted!r}: is in flight already; use another, or none",
                "ALREADY_EXISTS",
                # An earlier attempt of the same call ends soon.
                retry_seconds=RETRY_SECONDS,
            )
        return wanted

    async def _prompt_ids(self, request: pb.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise invalid("prompt", "prompt is missing: set text or token_ids")
        if kind == "token_ids":
            return list(request.token_ids.ids)
        return await self._encode(request.text, add_special_tokens=True)

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encode = self._loaded.tokenizer.encode
        with blaming_input():
            if len(text) < _SHORT_CHARS:
                return encode(text, add_special_tokens)
            return await self._in_thread(encode, text, add_special_tokens)

    async def _render(
        self, conversation: pb.Conversation, add_special_tokens: bool
    ) -> tuple[str, list[int]]:
        """A conversation's text and token ids."""
        tokenizer = self._loaded.tokenizer
        if tokenizer.chat_template is None:
            raise NotImplementedError(
                f"{self._config.model_name} has no chat template; send a prompt to Generate"
            )

        def render() -> tuple[str, list[int]]:
            messages, options = conversation_from_proto(conversation)
            text = tokenizer.apply_chat_template(messages, **options)
            return text, tokenizer.encode(text, add_special_tokens)

        with blaming_input():
            return await self._in_thread(render)

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._workers, function, *arguments)

    # All the rest

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        wants_special = (
            request.add_special_tokens if request.HasField("add_special_tokens") else True
        )
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("input", "input is missing: set text or conversation")
        text = ""
        if kind == "text":
            ids = await self._encode(request.text, wants_special)
        else:
            text, ids = await self._render(request.conversation, wants_special)
        return pb.TokenizeResponse(
            token_ids=ids, text=text, max_model_len=self._loaded.max_model_len
        )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        vocab_size = self._loaded.config.vocab_size
        for token in request.token_ids:
            if not 0 <= token < vocab_size:
                raise invalid(
                    "token_ids",
                    f"token_ids contains {token}: must be in 0..{vocab_size - 1} (vocab_size)",
                    value=str(token), limit=str(vocab_size - 1),
                )  # fmt: skip
        skips = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        ids = list(request.token_ids)
        return pb.DetokenizeResponse(
            text=await self._in_thread(self._loaded.tokenizer.decode, ids, skips)
        )

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Any
    ) -> pb.GetModelInfoResponse:
        llm = self._loaded
        config, tokenizer, engine = llm.config, llm.tokenizer, llm.engine
        return pb.GetModelInfoResponse(
            model=self._config.model_name,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            max_model_len=llm.max_model_len,
            weights=llm.dtype_report,
            kv_cache_dtype=engine.step_config.narrow_dtype,
            tokenizer_fingerprint=tokenizer.fingerprint(),
            bos_token_id=config.bos_token_id,
            eos_token_ids=config.eos_token_ids,
            has_chat_template=tokenizer.chat_template is not None,
            num_speculative_tokens=engine.step_config.num_draft_tokens,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        config = self._config
        info = pb.GetServerInfoResponse(
            state=_STATES[self._gate.state],
            versions=self._versions,
            uptime_seconds=time.monotonic() - self._started,
            limits=pb.Limits(
                max_message_bytes=config.max_message_bytes,
                max_requests_per_client=config.max_requests_per_client,
                max_stop=limits.MAX_STOP,
                max_stop_token_ids=limits.MAX_STOP_TOKEN_IDS,
                max_logit_bias=limits.MAX_LOGIT_BIAS,
                max_bad_words=limits.MAX_BAD_WORDS,
                max_string_chars=limits.MAX_STRING_CHARS,
            ),
            load=pb.Load(num_requests=len(self._active)),
        )
        if self.llm is not None:
            engine = self.llm.engine
            info.platform = jax.default_backend()
            info.limits.max_model_len = engine.max_model_len
            info.limits.max_num_seqs = engine.scheduler_config.max_num_seqs
            info.limits.max_num_rows = engine.scheduler_config.max_num_rows
            metrics = engine.metrics()
            for name in ("num_running", "num_waiting", "num_used_blocks", "num_blocks"):
                setattr(info.load, name, int(metrics.get(name, 0)))
        return info

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        active = self._active.get((current_call.get().client, request.request_id))
        if active is None:
            raise RpcError(
                StatusCode.NOT_FOUND,
                f"request_id={request.request_id!r}: no request of this client in flight has it",
                "NOT_FOUND",
            )
        current_call.get().fields["request_id"] = active.request_id
        self._fail(
            active,
            RpcError(StatusCode.CANCELLED, "the request was aborted by a call of Abort", "ABORTED"),
        )
        return pb.AbortResponse()

    @property
    def _loaded(self) -> LLM:
        assert self.llm is not None, "the gate lets calls in once it is loaded"
        return self.llm


def _time_left(context: Any) -> float | None:
    """Seconds until the call's deadline; None without one.

    Raises:
      RpcError: it has passed.
    """
    seconds = context.time_remaining()
    if seconds is not None and seconds <= 0:
        raise RpcError(
            StatusCode.DEADLINE_EXCEEDED, "the deadline has passed already", "DEADLINE_EXCEEDED"
        )
    return seconds
