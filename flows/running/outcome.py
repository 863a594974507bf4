"""What a person wants to know of a refresh that ended: warnings, scores, and where to look."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import REPORT_FILE, ledger_of
from flows.servers.records import address_of
from flows.tracking.pages import page_of
from flows.tracking.rows import scores_text
from stages.promote.verdict import TABLE_FILE

FLOW_RUN = "/runs/flow-run/"


def warnings_of(record: RefreshRecord) -> list[str]:
    """`STAGE, …: message` of what the stages that were built in this refresh warned of, each message once."""
    stages: dict[str, list[str]] = {}
    for name, entry in record.stages.items():
        file = entry.artifact / "events.jsonl" if entry.state == "built" and entry.artifact else None
        lines = file.read_text(encoding="utf-8").splitlines() if file and file.is_file() else []
        for message in {event["message"]: None for event in map(json.loads, lines) if event["event"] == "warning"}:
            stages.setdefault(message, []).append(name)
    return [f"{', '.join(names)}: {message}" for message, names in stages.items()]


def links_of(record: RefreshRecord) -> dict[str, str]:
    """Pages of the refresh: in Prefect and in MLflow while these are known, and its reports as files."""
    links = dict(_pages(record))
    report = ledger_of(record.refresh).folder / REPORT_FILE
    if report.exists():
        links["report"] = str(report)
    tables = {name: entry.artifact / TABLE_FILE for name, entry in record.stages.items() if entry.artifact}
    return links | {f"verdict of {name}": str(table) for name, table in tables.items() if table.exists()}


def in_words(record: RefreshRecord) -> list[str]:
    """A line each: scores, warnings, links."""
    scores = {name: scores_text(entry.kind, entry.metrics) for name, entry in record.stages.items()}
    return [
        *(f"{name}: {text}" for name, text in scores.items() if text),
        *(f"warning: {warning}" for warning in warnings_of(record)),
        *(f"{name}: {link}" for name, link in links_of(record).items()),
    ]


def _pages(record: RefreshRecord) -> Iterator[tuple[str, str]]:
    prefect = os.environ.get("PREFECT_API_URL", "").rstrip("/").removesuffix("/api") or address_of("prefect")
    if prefect and record.prefect_flow_run_id:
        yield "flow run", f"{prefect}{FLOW_RUN}{record.prefect_flow_run_id}"
    if page := page_of(record.refresh):
        yield "MLflow", page
