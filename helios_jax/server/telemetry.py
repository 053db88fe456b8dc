"""What does a server tell those who run it: Prometheus metrics, log lines, traces?

Metrics have vLLM's names under `helios:`. A log line may be JSON; prompts are in it only where
asked for. Spans are OpenTelemetry's, where its package is installed: `opentelemetry-instrument
helios serve ...` says where they go.
"""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from helios_jax.outputs import RequestOutput

logger = logging.getLogger("helios_jax.server")

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
# Keys of `Engine.metrics`, by Prometheus name.
_GAUGES = {
    "num_requests_running": ("num_running", "Outputs that run."),
    "num_requests_waiting": ("num_waiting", "Outputs that wait."),
}
_COUNTERS = {
    "prompt_tokens": ("num_prefill_tokens", "Tokens prefilled, those computed again included."),
    "generation_tokens": ("num_output_tokens", "Tokens drawn."),
    "num_preemptions": ("num_preemptions", "Outputs that lost their blocks to others."),
    "prefix_cache_hits": ("num_prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    "recomputed_tokens": ("num_recomputed_tokens", "Tokens prefilled again after a preemption."),
}
_DRAFT_COUNTERS = {
    "spec_decode_num_drafts": ("num_verifications", "Rounds of an output that had a draft."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft tokens."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Draft tokens that were accepted."),
    "spec_decode_num_drifts": ("num_drifts", "Falls of the acceptance rate."),
}


class ServerMetrics:
    """Counts and times of one server, in a registry of its own.

    Attributes:
      registry: what Prometheus is shown.
    """

    def __init__(self, model_name: str, engine_metrics: Callable[[], Mapping[str, float]]):
        """
        Args:
          engine_metrics: of `Engine.metrics`; empty while there is no engine.
        """
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, engine_metrics))
        self._model_name = model_name

        def histogram(name: str, help: str, buckets: Iterable[float]) -> Any:
            metric = prometheus_client.Histogram(
                f"helios:{name}", help, ["model_name"], buckets=list(buckets),
                registry=self.registry,
            )  # fmt: skip
            return metric.labels(model_name)

        self._success = prometheus_client.Counter(
            "helios:request_success", "Outputs that ended as they should.",
            ["model_name", "finished_reason"], registry=self.registry,
        )  # fmt: skip
        self._calls = prometheus_client.Counter(
            "helios:grpc_calls", "Calls that ended.", ["model_name", "method", "code"],
            registry=self.registry,
        )  # fmt: skip
        self._ttft = histogram("time_to_first_token_seconds", "From submission.", _SECONDS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "After the first.", _SECONDS
        )
        self._latency = histogram("e2e_request_latency_seconds", "To the last token.", _SECONDS)
        self._prompt_tokens = histogram("request_prompt_tokens", "Of a prompt.", _TOKENS)
        self._output_tokens = histogram(
            "request_generation_tokens", "Of all outputs of a request.", _TOKENS
        )

    def finished(self, output: RequestOutput) -> None:
        """A request has its outcome."""
        for completion in output.outputs:
            self._success.labels(self._model_name, completion.finish_reason).inc()
        self._ttft.observe(output.timings.ttft_seconds)
        if output.timings.tpot_seconds:
            self._tpot.observe(output.timings.tpot_seconds)
        self._latency.observe(output.timings.total_seconds)
        self._prompt_tokens.observe(output.usage.prompt_tokens)
        self._output_tokens.observe(output.usage.completion_tokens)

    def called(self, method: str, code: str) -> None:
        """A call has ended."""
        self._calls.labels(self._model_name, method, code).inc()

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Serves /metrics from a thread; the port, and what ends it.

        Raises:
          OSError: the port is taken.
        """
        server, thread = prometheus_client.start_http_server(port, host, self.registry)

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, close


class _EngineCollector:
    """Reads the engine when Prometheus asks."""

    def __init__(self, model_name: str, read: Callable[[], Mapping[str, float]]):
        self._model_name, self._read = model_name, read

    def describe(self) -> list[Metric]:
        # Registering asks for the names; without an engine there are none to collect.
        return []

    def collect(self) -> Iterator[Metric]:
        values = self._read()
        if not values:
            return
        used = values.get("num_used_blocks", 0) / values["num_blocks"]
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        for name, (key, help) in _GAUGES.items():
            yield self._gauge(name, help, values.get(key, 0))
        counters = dict(_COUNTERS)
        if "acceptance_rate" in values:
            counters |= _DRAFT_COUNTERS
            yield self._by_position(values)
        for name, (key, help) in counters.items():
            family = CounterMetricFamily(f"helios:{name}", help, labels=["model_name"])
            family.add_metric([self._model_name], values.get(key, 0))
            yield family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"helios:{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _by_position(self, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(
            "helios:spec_decode_num_accepted_tokens_per_pos", "By position in the draft.",
            labels=["model_name", "position"],
        )  # fmt: skip
        prefix = "num_accepted_tokens_at_"
        for key, value in values.items():
            if key.startswith(prefix):
                family.add_metric([self._model_name, key.removeprefix(prefix)], value)
        return family


class JsonFormatter(logging.Formatter):
    """A line of JSON: time, level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The same for people: fields as name=value."""

    def __init__(self):
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        # repr: a client's text may hold line breaks.
        pairs = (
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}"
            for name, value in fields.items()
        )
        return " ".join([super().formatMessage(record), *pairs])


def log_to_stderr(log_format: str) -> None:
    """Writes what the library logs to standard error, as "json" or "text"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger("helios_jax")
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False


def log(message: str, level: int = logging.INFO, **fields: Any) -> None:
    """One line with fields."""
    logger.log(level, message, extra={"fields": fields})


class Tracer:
    """Spans of calls, where OpenTelemetry is installed."""

    def __init__(self):
        self._tracer = self._extract = None
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            return
        self._tracer = trace.get_tracer("helios_jax.server")
        self._kind = trace.SpanKind.SERVER
        self._extract = propagate.extract

    @contextmanager
    def span(self, method: str, metadata: Any) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """A call's span, under the caller's where its metadata name one; gives what adds
        attributes to it."""
        if self._tracer is None or self._extract is None:
            yield lambda attributes: None
            return
        carrier = {key: value for key, value in metadata or () if isinstance(value, str)}
        with self._tracer.start_as_current_span(
            method, context=self._extract(carrier), kind=self._kind
        ) as span:
            yield lambda attributes: span.set_attributes(dict(attributes))
