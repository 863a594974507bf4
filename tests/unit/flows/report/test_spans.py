"""Spans of a refresh reach a real OTLP/HTTP receiver once, also one that was away when the refresh ended."""

import json
from http.server import BaseHTTPRequestHandler

from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from flows.ledger.trace import ENDPOINT, traced
from flows.tracking.spans import send_missing_spans, spans_of
from stages.kinds.registry import KINDS
from tests.http_server import serving


def receiver(received):
    """Return a handler that keeps what it receives, as OpenTelemetry's own messages, with the request's headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            received.append((Parse(body, ExportTraceServiceRequest()), self.headers["x-team"], json.loads(body)))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    return Handler


def test_spans_of_refresh_stages_and_attempts_are_nested_and_sent_once(night, monkeypatch, capsys):
    night.refresh(failing="sft", error="no memory")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=some%20team")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    send_missing_spans()
    assert "spans not sent" in capsys.readouterr().out
    received = []
    with serving(receiver(received)) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        send_missing_spans()
        send_missing_spans()
        night.refresh()
        send_missing_spans()
    assert len(received) == 2
    (message, team, body), _ = received
    assert team == "some team"
    spans = body["resourceSpans"][0]["scopeSpans"][0]["spans"]
    by_id = {span["spanId"]: span for span in spans}
    assert len(by_id) == len(spans) == len(message.resource_spans[0].scope_spans[0].spans) == 1 + 2 * 3
    parents = {span["name"]: by_id[span["parentSpanId"]]["name"] if "parentSpanId" in span else None for span in spans}
    assert parents == {
        "refresh nightly": None,
        **dict.fromkeys(("base", "rows", "sft"), "refresh nightly"),
        **{f"{stage}-1": stage for stage in ("base", "rows", "sft")},
    }
    for span in spans:
        assert (len(span["traceId"]), len(span["spanId"])) == (32, 16)
        outer = by_id.get(span.get("parentSpanId"), span)
        assert int(outer["startTimeUnixNano"]) <= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        assert int(span["endTimeUnixNano"]) <= int(outer["endTimeUnixNano"])
    failed = {span["name"]: span["status"].get("message") for span in spans if span["status"]["code"] == 2}
    assert failed == {"refresh nightly": "failed: sft", "sft": "no memory", "sft-1": "no memory"}


def test_a_stage_knows_the_span_of_its_attempt_before_it_is_sent(night, monkeypatch):
    config = KINDS["download"].model_validate({"kind": "download", "dataset": "builtin/addition"})
    record = night.refresh()
    key = record.key_of("sft", 1)
    monkeypatch.delenv(ENDPOINT, raising=False)
    assert traced(config, key) is config
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    (span,) = [span for span in spans_of(record) if span["name"] == "sft-1"]
    known = {"TRACEPARENT": f"00-{span['traceId']}-{span['spanId']}-01"}
    assert traced(config, key).execution.environment == known
