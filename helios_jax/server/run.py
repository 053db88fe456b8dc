"""What is a server's life? It listens, loads, serves, drains, exits."""

import asyncio
import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from helios_jax import SamplingParams
from helios_jax.llm import LLM
from helios_jax.server.config import ServerConfig
from helios_jax.server.errors import unavailable
from helios_jax.server.gate import Gate, State
from helios_jax.server.proto import SERVICE
from helios_jax.server.proto.inference_pb2_grpc import add_InferenceServicer_to_server
from helios_jax.server.security import Tokens, server_credentials
from helios_jax.server.service import InferenceService
from helios_jax.server.telemetry import ServerMetrics, log

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Calls at a time of all clients, health checks and watches included.
_MAX_CALLS = 4096
_MAX_STREAMS_PER_CONNECTION = 1024
_WARM_UP_TOKENS = 20
_COMPUTING_NICENESS = 5


def run_server(config: ServerConfig, load: Callable[[], LLM]) -> None:
    """Serves until SIGTERM or SIGINT; returns when what was accepted is done.

    Health: "" says that the process lives, `helios.v1.Inference` whether it takes requests. On a
    signal the latter becomes NOT_SERVING, new requests are UNAVAILABLE, and those in flight have
    `grace_seconds` to finish. A second signal ends them at once.

    Args:
      load: makes the model, while clients are told to wait.

    Raises:
      ValueError, OSError: options that cannot be had, such as a port that is taken.
      Exception: of `load`, or what ended the engine's thread: the server ends with it, so that
        whoever watches over it starts another.
    """
    is_loaded = asyncio.run(_Server(config).live(load))
    if not is_loaded:
        # A thread is in the middle of compiling, which does not survive an orderly exit.
        logging.shutdown()
        os._exit(0)


class _Server:
    """One server's parts, and how they come and go."""

    def __init__(self, config: ServerConfig):
        self._config = config
        self._credentials = server_credentials(config)
        tokens = None
        if config.auth_token_file is not None:
            tokens = Tokens.read(config.auth_token_file)
        self._metrics = ServerMetrics(config.model_name, self._engine_metrics)
        self._gate = Gate(config, self._metrics, tokens)
        self._service = InferenceService(config, self._metrics, self._gate)
        self._health = health.aio.HealthServicer()  # pyright: ignore[reportAttributeAccessIssue]
        # Set by the first signal and by the second.
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._failure: BaseException | None = None

    async def live(self, load: Callable[[], LLM]) -> bool:
        """The whole life; False if it ended while the model was loading."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        await self._health.set(SERVICE, _NOT_SERVING)
        server = self._make_server()
        close_metrics = self._listen(server)
        await server.start()
        try:
            llm = await self._load(load)
            if self._failure is not None:
                raise self._failure
            if llm is None:
                return False
            self._service.llm = llm
            self._gate.state = State.SERVING
            await self._health.set(SERVICE, _SERVING)
            log("ready", weights=llm.dtype_report)
            await self._stop.wait()
            await self._drain()
            if self._failure is not None:
                raise self._failure
            return True
        finally:
            await server.stop(1.0)
            close_metrics()
            self._service.close()
            if self._service.llm is not None:
                engine = self._service.llm.engine
                await asyncio.to_thread(engine.stop)
                engine.stop_recording()
            log("stopped")

    def _make_server(self) -> grpc.aio.Server:
        config = self._config
        keepalive_ms = int(config.keepalive_seconds * 1000)
        server = grpc.aio.server(
            interceptors=[self._gate],
            maximum_concurrent_rpcs=_MAX_CALLS,
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", config.max_message_bytes),
                ("grpc.max_concurrent_streams", _MAX_STREAMS_PER_CONNECTION),
                # Two servers on one port would share its clients.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", keepalive_ms),
                ("grpc.keepalive_timeout_ms", min(keepalive_ms, 20_000)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 10),
            ],
        )
        add_InferenceServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        services = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(services, server)
        return server

    def _listen(self, server: grpc.aio.Server) -> Callable[[], None]:
        """Takes the ports, and gives what ends the metrics' server."""
        config = self._config
        try:
            if self._credentials is None:
                port = server.add_insecure_port(config.address)
            else:
                port = server.add_secure_port(config.address, self._credentials)
        except RuntimeError as error:
            raise OSError(
                f"host={config.host!r}, port={config.port}: cannot be listened on ({error}); is "
                "another server running there?"
            ) from error
        if config.is_open:
            log(
                "others can reach this server, and nothing is encrypted; give tls_cert and tls_key",
                logging.WARNING,
                host=config.host,
            )
        close = _nothing
        fields = {}
        if config.metrics_port is not None:
            fields["metrics_port"], close = self._metrics.serve(config.host, config.metrics_port)
        log("listening", host=config.host, port=port, tls=self._credentials is not None, **fields)
        return close

    async def _load(self, load: Callable[[], LLM]) -> LLM | None:
        """Loads in a thread; None if the server is told to stop meanwhile."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[LLM] = loop.create_future()

        def settle(llm: LLM | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(llm)  # pyright: ignore[reportArgumentType]

        def work() -> None:
            llm, failure = None, None
            _give_way()
            try:
                llm = load()
                if self._config.warm_up:
                    _warm_up(llm)
                # Kept from then on; a large vocabulary takes a while.
                llm.tokenizer.fingerprint()
                if self._config.record is not None:
                    llm.engine.start_recording(self._config.record)
                llm.engine.start(partial(loop.call_soon_threadsafe, self._engine_ended))
            except BaseException as error:
                failure = error
            try:
                loop.call_soon_threadsafe(settle, llm, failure)
            except RuntimeError:
                # The loop is closed: nobody waits any more.
                pass

        threading.Thread(target=work, name="helios-load", daemon=True).start()
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([done, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return done.result() if done.done() else None

    async def _drain(self) -> None:
        """Waits for what is in flight, as long as there is time, and cuts the rest off."""
        gate = self._gate
        gate.state = State.DRAINING
        await self._health.set(SERVICE, _NOT_SERVING)
        log("draining", requests=gate.num_calls, grace_seconds=self._config.grace_seconds)
        idle = asyncio.ensure_future(gate.wait_idle())
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait(
            [idle, hurry], timeout=self._config.grace_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if not idle.done():
            log("requests are cut off", logging.WARNING, requests=gate.num_calls)
            self._service.fail_all(
                unavailable("the server shut down before the request was done", "DRAINING")
            )
        idle.cancel()
        hurry.cancel()

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _engine_ended(self, error: BaseException) -> None:
        """Nobody computes any more. The requests there were have been told."""
        log("the engine ended", logging.ERROR, error=str(error))
        self._failure = error
        self._stop.set()
        self._hurry.set()

    def _engine_metrics(self) -> Mapping[str, float]:
        llm = self._service.llm
        return {} if llm is None else llm.engine.metrics()


def _give_way() -> None:
    """Lowers the priority of this thread and of those that it starts: XLA's and the engine's.

    On a CPU they take every core, and tokens would wait a time slice for the event loop to send
    them and for a client on this machine to take them.
    """
    if sys.platform == "linux":
        # Elsewhere a priority is the whole process's.
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + _COMPUTING_NICENESS
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness, 19))


def _warm_up(llm: LLM) -> None:
    """Compiles what short requests need, for every number of rows that is compiled for."""
    params = SamplingParams(temperature=0, max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
    powers = {1 << power for power in range(llm.max_num_seqs.bit_length())}
    # Different prompts: equal ones would find each other's keys and values.
    tokens = itertools.cycle(range(llm.config.vocab_size))
    for num_rows in sorted(powers | {llm.max_num_seqs}):
        prompts: list[Any] = [[next(tokens)] * 16 for _ in range(num_rows)]
        llm.generate(prompts, params)


def _nothing() -> None:
    pass
