"""OpenTelemetry spans of refreshes (refresh → stage → attempt), read from their ledgers and sent by OTLP/HTTP as JSON.

Sent if OTEL_EXPORTER_OTLP_ENDPOINT names a receiver; OTEL_EXPORTER_OTLP_HEADERS and OTEL_SERVICE_NAME count as usual.
What is sent twice is the same span, by its id (`flows/ledger/trace.py`). <ledger>/traces.json: how much has been sent.
"""

from __future__ import annotations

import os
import time
import urllib.parse
from collections.abc import Iterator
from itertools import islice
from typing import Any

from flows.ledger.record import AttemptRecord, RefreshRecord
from flows.ledger.refreshes import Ledger, ledgers
from flows.ledger.trace import ENDPOINT, span_id, trace_id
from stages.core.contract import StrictModel
from stages.core.errors import LifecycleError, ServerError
from stages.core.files import write_atomically
from stages.core.redaction import redact

HEADERS, SERVICE = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME"
LATEST = 30
"""Number of latest refreshes whose spans are sent if they are missing, such as while the receiver was away."""
TIMEOUT_S = 5.0
ANSWER_BYTES = 65_536
INTERNAL, OK, FAILED = 1, 1, 2
"""OpenTelemetry's numbers of a span's kind and states."""
GOOD = ("completed", "not_promoted", "waiting_for_approval", "finished")


class Sent(StrictModel):
    """Contents of `traces.json`: size of the ledger whose spans the receiver has."""

    ledger_bytes: int


def send_missing_spans() -> None:
    """Send the spans of the latest ended refreshes that the receiver lacks; print a failure, and try the next time."""
    endpoint = os.environ.get(ENDPOINT)
    if not endpoint:
        return
    import httpx

    for ledger in islice(ledgers(), LATEST):
        try:
            size, sent = ledger.size(), Sent.read_or_none(ledger.folder / "traces.json")
            if (sent and sent.ledger_bytes == size) or not ledger.is_over():
                continue
            send_spans(ledger, endpoint)
            write_atomically(ledger.folder / "traces.json", Sent(ledger_bytes=size).model_dump_json())
        except (LifecycleError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            print(f"{time.strftime('%H:%M:%S')} spans not sent: {redact(str(error))}", flush=True)
            return


def send_spans(ledger: Ledger, endpoint: str) -> None:
    """Send all spans of a refresh that has ended. Raises `ServerError`, `StoreError` or what httpx raises."""
    from stages.remote.http import Expected, ask_httpx, httpx_client

    url = f"{endpoint.rstrip('/')}/v1/traces"
    expected = Expected("the OpenTelemetry receiver", ANSWER_BYTES, TIMEOUT_S, ServerError)
    resource = {"attributes": _attributes({"service.name": os.environ.get(SERVICE) or "llm-lifecycle"})}
    scope = {"scope": {"name": "llm-lifecycle"}, "spans": [*spans_of(ledger.read())]}
    with httpx_client(headers=_headers()) as client:
        body = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}
        ask_httpx(client, expected, "POST", url, json=body).check()


def _headers() -> dict[str, str]:
    pairs = (pair.split("=", 1) for pair in os.environ.get(HEADERS, "").split(",") if "=" in pair)
    return {name.strip(): urllib.parse.unquote(value.strip()) for name, value in pairs}


def spans_of(record: RefreshRecord) -> Iterator[dict[str, Any]]:
    """Yield the spans of an ended refresh, in OTLP's JSON form. Cached stages have none: nothing ran."""
    attempts = [attempt for attempt in record.attempts.values() if attempt.ended]
    began_ms = min([record.started_ms, *(attempt.began.time_ms for attempt in attempts)])
    ended_ms = max([record.started_ms + round(1000 * record.seconds), *(_ended_ms(attempt) for attempt in attempts)])
    root = span_id(record.refresh)

    def span(name: str, identity: str, parent: str, times_ms: tuple[int, int], **fields: Any) -> dict[str, Any]:
        state = fields.pop("state")
        status = {"code": OK} if state in GOOD else {"code": FAILED, "message": redact(fields.pop("error") or state)}
        fields.pop("error", None)
        return {
            "traceId": trace_id(record.refresh),
            "spanId": identity,
            **({"parentSpanId": parent} if parent else {}),
            "name": name,
            "kind": INTERNAL,
            # Strings, as protobuf's JSON writes numbers of 64 bits.
            "startTimeUnixNano": str(times_ms[0] * 1_000_000),
            "endTimeUnixNano": str(times_ms[1] * 1_000_000),
            "attributes": _attributes(
                {"lifecycle.state": state, **{f"lifecycle.{key}": fields[key] for key in fields}}
            ),
            "status": status,
        }

    of_refresh = {"state": record.state, "error": record.error, "recipe": record.recipe, "refresh": record.refresh}
    yield span(f"refresh {record.recipe}", root, "", (began_ms, ended_ms), **of_refresh, hardware=record.hardware)
    for stage in dict.fromkeys(attempt.began.stage for attempt in attempts):
        own = [attempt for attempt in attempts if attempt.began.stage == stage]
        # Kind and version: in the tags of an attempt, since a retry may plan other stages.
        fields = {"stage": stage, "kind": own[-1].tags.get("kind", ""), "version": own[-1].tags.get("version", "")}
        identity = span_id(f"{record.refresh}/{stage}")
        times_ms = (own[0].began.time_ms, max(map(_ended_ms, own)))
        assert own[-1].ended
        yield span(stage, identity, root, times_ms, state=own[-1].outcome, error=own[-1].ended.error, **fields)
        for attempt in own:
            assert attempt.ended
            yield span(
                attempt.name,
                span_id(record.key_of(stage, attempt.began.number)),
                identity,
                (attempt.began.time_ms, attempt.ended.time_ms),
                state=attempt.outcome,
                error=attempt.ended.error,
                **fields,
                num_devices=attempt.began.num_devices or 0,
            )


def _ended_ms(attempt: AttemptRecord) -> int:
    assert attempt.ended
    return attempt.ended.time_ms


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": str(value)}}
        for key, value in values.items()
    ]
