"""Evaluation and promotion results for a refresh's report: scores, gates and score differences."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flows.ledger.record import RefreshRecord, StageEntry
from flows.report.model import (
    Promotion,
    Score,
    ScoreDifference,
)
from stages.core.intervals import score_interval
from stages.harnesses.scores import samples_by_score
from stages.kinds.promote.verdict import CHAMPION_FILE, VERDICT_FILE, ComparedChampion, read_verdict, tables
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
    verdict = read_verdict(folder)
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
        approval=verdict.approval,
        differences=tuple(differences),
        tables=None if verdict.gates is None else tuple(tables(verdict)),
    )


def evaluations_of_champions(record: RefreshRecord) -> Iterator[tuple[str, Path]]:
    """Yield the evaluations of the champions that candidates of the refresh were compared with, each with its name."""
    for entry in record.stages.values():
        if not entry.verdict or not entry.artifact:
            continue
        with suppress(OSError, ValueError):  # of artifacts that are gone, or of older versions
            standing = ComparedChampion.model_validate_json((entry.artifact / CHAMPION_FILE).read_bytes()).champion
            if standing and not standing.same_model:
                yield from ((f"champion (version {standing.version})", folder) for folder in standing.evaluations)
