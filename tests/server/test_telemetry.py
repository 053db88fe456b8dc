"""Are log lines whole, and spans there where OpenTelemetry is?"""

import json
import logging
import sys
from types import ModuleType

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from helios_jax.server.telemetry import JsonFormatter, TextFormatter, Tracer


def record(**fields) -> logging.LogRecord:
    made = logging.LogRecord("helios_jax.server", logging.INFO, "f", 1, "call", (), None)
    made.fields = fields
    return made


def test_a_line_of_json_holds_the_fields():
    line = JsonFormatter().format(record(request_id='a"\nb', seconds=0.5))
    entry = json.loads(line)
    assert "\n" not in line
    assert entry["message"] == "call" and entry["level"] == "info"
    assert entry["request_id"] == 'a"\nb' and entry["seconds"] == 0.5


def test_a_line_of_text_is_one_line_whatever_a_client_sends():
    line = TextFormatter().format(record(request_id="a\nb", seconds=0.5))
    assert line.endswith(r"INFO call request_id='a\nb' seconds=0.5") and "\n" not in line


def test_a_call_is_a_span_under_the_callers(monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    with Tracer().span("helios.v1.Inference/Generate", [("traceparent", parent)]) as note:
        note({"helios.code": "OK", "helios.prompt_tokens": 3})
    (span,) = exporter.get_finished_spans()
    assert span.name == "helios.v1.Inference/Generate"
    assert span.attributes == {"helios.code": "OK", "helios.prompt_tokens": 3}
    assert span.parent is not None and span.parent.trace_id == 0x0123456789ABCDEF0123456789ABCDEF
    assert span.kind is trace.SpanKind.SERVER


def test_without_the_package_calls_go_on(monkeypatch):
    # What is left where a package of the same namespace was removed.
    monkeypatch.setitem(sys.modules, "opentelemetry", ModuleType("opentelemetry"))
    with Tracer().span("x", None) as note:
        note({"helios.code": "OK"})
