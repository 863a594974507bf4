"""Evaluation and promotion results for a refresh's report: scores, gates and score differences."""

from collections.abc import Iterator
from pathlib import Path

from flows.ledger.record import RefreshRecord, StageEntry
from flows.report.model import (
    Promotion,
    Score,
    ScoreDifference,
)
from stages.core.intervals import score_interval
from stages.harnesses.scores import samples_by_score
from stages.kinds.promote.verdict import VERDICT_FILE, Verdict, tables
from stages.kinds.registry import makes

ERROR = "_stderr"
DIFFERENCE = "_difference"


def scores(record: RefreshRecord) -> Iterator[Score]:
    """Yield the scores of all evaluation stages of a refresh, in the order of the recipe."""
    for stage, entry in record.stages.items():
        if not makes(entry.kind, "scores"):
            continue
        num_samples = samples_by_score(entry.artifact) if entry.artifact else {}
        for name, value in entry.metrics.items():
            if "." in name and not name.endswith(ERROR):
                error = entry.metrics.get(f"{name}{ERROR}")
                interval = None if error is None else score_interval(value, error, num_samples.get(name))
                yield Score(stage=stage, name=name, value=value, standard_error=error, interval=interval)


def promotions(record: RefreshRecord) -> Iterator[Promotion]:
    """Yield the results of a refresh's promotion stages that have decided whether to promote."""
    for name, entry in record.stages.items():
        if entry.verdict and entry.artifact and (entry.artifact / VERDICT_FILE).is_file():
            yield _promotion(name, entry, entry.artifact)


def _promotion(stage: str, entry: StageEntry, folder: Path) -> Promotion:
    verdict = Verdict.model_validate_json((folder / VERDICT_FILE).read_bytes())
    if verdict.differences is None:  # an old verdict kept them only as metrics
        differences = [
            ScoreDifference(
                name=name.removesuffix(DIFFERENCE),
                difference=value,
                interval=score_interval(value, entry.metrics[f"{name}{ERROR}"], None),
            )
            for name, value in entry.metrics.items()
            if name.endswith(DIFFERENCE) and f"{name}{ERROR}" in entry.metrics
        ]
    else:
        differences = [
            ScoreDifference(
                name=paired.name,
                difference=paired.difference,
                interval=paired.shown_interval,
                nothing_solved=paired.num_samples if paired.solved_by_neither else None,
            )
            for paired in verdict.differences
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
