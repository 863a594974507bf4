"""What a refresh came to, in words: the tables of its promotions, and sentences for those who are notified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flows.ledger.record import RefreshRecord
from flows.report.warnings import warnings_of
from flows.tracking.pages import page_of
from stages.core.redaction import shortened
from stages.kinds.promote.verdict import TABLE_FILE, VERDICT_FILE, Verdict

SHOWN_SCORES = 3
SHOWN_CHARACTERS = 300
"""Of an error; all of it is on the refresh's pages."""


def verdict_tables(record: RefreshRecord) -> dict[str, str]:
    """Name of each promotion that was built or found cached → Markdown."""
    return {name: (folder / TABLE_FILE).read_text(encoding="utf-8") for name, folder in _verdict_folders(record)}


def summary(record: RefreshRecord) -> str:
    """What became of candidates and by how much, scores, why stages failed, warnings, the page in MLflow; lines."""
    lines = [record.error] if record.error else []
    lines += [_verdict_sentence(folder) for _, folder in _verdict_folders(record)]
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


def _verdict_sentence(folder: Path) -> str:
    """`adder: not promoted: size_mib 2.1 > 2, missed by 0.1; compared with champion (version 1)`."""
    verdict = Verdict.model_validate_json((folder / VERDICT_FILE).read_bytes())
    compared = f"compared with {verdict.against}" if verdict.against else "there was nothing to compare it with"
    return "; ".join([f"{verdict.name}: {verdict.outcome}", *verdict.missed, compared])


def _score_sentences(record: RefreshRecord) -> Iterator[str]:
    for name, entry in record.stages.items():
        if entry.kind == "evaluate" and entry.artifact:
            scores = [(metric, value) for metric, value in entry.metrics.items() if not metric.endswith("_stderr")]
            yield f"{name}: " + ", ".join(f"{metric} {value:.4g}" for metric, value in scores[:SHOWN_SCORES])
