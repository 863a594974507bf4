"""What a person wants to know of a refresh that ended: warnings, scores, and where to look."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import REPORT_FILE, ledger_of
from flows.report.page import write_report
from flows.report.warnings import warnings_of
from flows.servers.records import address_of
from flows.store.store import Store
from flows.tracking.pages import page_of
from flows.tracking.rows import scores_text
from stages.core.lines import say
from stages.core.redaction import redact
from stages.kinds.promote.verdict import TABLE_FILE

FLOW_RUN = "/runs/flow-run/"


def leave_report(record: RefreshRecord, store: Store) -> None:
    """Leave the page of a refresh beside its ledger; without one the refresh is as good."""
    try:
        write_report(record, store.index())
    except Exception as error:
        say(f"the report of {record.refresh} could not be written: {redact(repr(error))}", sys.stderr)


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
