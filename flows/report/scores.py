"""Evaluations and promotions of a refresh → scores with their standard errors, gates, paired differences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flows.ledger.record import RefreshRecord, StageEntry
from flows.report.model import Promotion, Score, ScoreDifference
from stages.promote.verdict import VERDICT_FILE, Verdict, tables

ERROR = "_stderr"
DIFFERENCE = "_difference"


def scores(record: RefreshRecord) -> Iterator[Score]:
    """Of all evaluations, in the order of the recipe."""
    for stage, entry in record.stages.items():
        for name, value in entry.metrics.items() if entry.kind == "evaluate" else ():
            if "." in name and not name.endswith(ERROR):
                error = entry.metrics.get(f"{name}{ERROR}")
                yield Score(stage=stage, name=name, value=value, standard_error=error)


def promotions(record: RefreshRecord) -> Iterator[Promotion]:
    """Of the stages whose verdict is there."""
    for name, entry in record.stages.items():
        if entry.verdict and entry.artifact and (entry.artifact / VERDICT_FILE).is_file():
            yield _promotion(name, entry, entry.artifact)


def _promotion(stage: str, entry: StageEntry, folder: Path) -> Promotion:
    verdict = Verdict.model_validate_json((folder / VERDICT_FILE).read_bytes())
    differences = [
        ScoreDifference(
            name=name.removesuffix(DIFFERENCE), difference=value, standard_error=entry.metrics[f"{name}{ERROR}"]
        )
        for name, value in entry.metrics.items()
        if name.endswith(DIFFERENCE) and f"{name}{ERROR}" in entry.metrics
    ]
    return Promotion(
        stage=stage,
        name=verdict.name,
        outcome=verdict.outcome,
        against=verdict.against,
        missed=verdict.missed,
        differences=tuple(differences),
        tables=None if verdict.gates is None else tuple(tables(verdict)),
    )
