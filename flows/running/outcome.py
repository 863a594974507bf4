"""Result of a refresh for people: its report, links, scores, promotion results, warnings and notification text."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import REPORT_FILE, ledger_of
from flows.report.page import write_report
from flows.report.sentences import warnings_of
from flows.servers.records import address_of
from flows.store.store import Store
from flows.tracking.pages import page_of
from flows.tracking.rows import scores_text
from stages.core.approval import AWAITED, PROMOTED
from stages.core.lines import say
from stages.core.redaction import redact, shortened
from stages.kinds.promote.verdict import TABLE_FILE, read_verdict
from stages.kinds.registry import makes

FLOW_RUN = "/runs/flow-run/"
"""Path of a flow run's web page in Prefect's UI."""
SHOWN_SCORES = 3
SHOWN_CHARACTERS = 300
"""Most characters of an error in a notification; the refresh's report has the whole message."""


def leave_report(record: RefreshRecord, store: Store) -> None:
    """Write the HTML report of a refresh into its ledger's folder; print a failure instead of raising it."""
    try:
        write_report(record, store.index())
    except Exception as error:
        say(f"the report of {record.refresh} could not be written: {redact(repr(error))}", sys.stderr)


def links_of(record: RefreshRecord) -> dict[str, str]:
    """Return links to a refresh: its web pages in Prefect and MLflow, if known, and its report files."""
    links = dict(_pages(record))
    report = ledger_of(record.refresh).folder / REPORT_FILE
    if report.exists():
        links["report"] = str(report)
    tables = {name: entry.artifact / TABLE_FILE for name, entry in record.stages.items() if entry.artifact}
    return links | {f"verdict of {name}": str(table) for name, table in tables.items() if table.exists()}


def summary_lines(record: RefreshRecord) -> list[str]:
    """Return the scores, warnings and links of a refresh as lines of text."""
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


def verdict_tables(record: RefreshRecord) -> dict[str, str]:
    """Return the result of each promotion stage as a Markdown table, by stage name."""
    return {name: (folder / TABLE_FILE).read_text(encoding="utf-8") for name, folder in _verdict_folders(record)}


def summary(record: RefreshRecord) -> str:
    """Return the result of a refresh as a notification's text: promotions, scores, errors, warnings, time, link."""
    lines = [record.error] if record.error else []
    lines += [verdict_sentence(folder) for _, folder in _verdict_folders(record)]
    lines += _score_sentences(record)
    lines += [
        f"{name}: {entry.error_class}: {shortened(entry.error or '', SHOWN_CHARACTERS)}"
        for name, entry in record.stages.items()
        if entry.state == "failed"
    ]
    lines += [f"warning: {warning}" for warning in warnings_of(record)]
    lines.append(f"{len(record.stages)} stages in {record.seconds:.1f} s")
    page = page_of(record.refresh)
    return "\n".join([*lines, *([f"MLflow: {page}"] if page else [])])


def _verdict_folders(record: RefreshRecord) -> Iterator[tuple[str, Path]]:
    for name, entry in record.stages.items():
        if entry.verdict and entry.artifact:
            yield name, entry.artifact


def verdict_sentence(folder: Path) -> str:
    """Return a promotion's decision as a line, such as `adder: not promoted: size_mib 2.1 > 2, missed by 0.1; …`."""
    verdict = read_verdict(folder)
    compared = f"compared with {verdict.against}" if verdict.against else "there was nothing to compare it with"
    by_outcome = {AWAITED: f"version {_version(folder)} {verdict.approval}", PROMOTED: f"it {verdict.approval}"}
    approval = [by_outcome[verdict.outcome]] if verdict.approval and verdict.outcome in by_outcome else []
    return "; ".join([f"{verdict.name}: {verdict.outcome}", *verdict.missed, *approval, compared])


def approvals_awaited(record: RefreshRecord) -> list[str]:
    """Return, for each promotion of a refresh that waits for approval, the command that approves it."""
    folders = [folder for name, folder in _verdict_folders(record) if record.stages[name].verdict == AWAITED]
    return [f"lifecycle approve {read_verdict(folder).name} {_version(folder)} --why REASON" for folder in folders]


def _version(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


def _score_sentences(record: RefreshRecord) -> Iterator[str]:
    for name, entry in record.stages.items():
        if makes(entry.kind, "scores") and entry.artifact:
            scores = [(metric, value) for metric, value in entry.metrics.items() if not metric.endswith("_stderr")]
            yield f"{name}: " + ", ".join(f"{metric} {value:.4g}" for metric, value in scores[:SHOWN_SCORES])
