"""Runs of stages, retries included, for `lifecycle runs`: newest first, each with its MLflow run. Needs no server."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from flows.cli.live import metrics_text
from flows.ledger.home import home
from flows.ledger.record import AttemptRecord, RefreshRecord
from flows.ledger.refreshes import ledgers
from flows.tracking.cursor import run_id_of
from stages.core.errors import StoreError


@dataclass(frozen=True)
class StageRun:
    """One run of a stage in a refresh; a retry is another run.

    outcome: None while it runs, or when its process died and no command has recorded that yet. mlflow_run_id: None
    while MLflow does not have it. host: where it may run, unseen from here.
    """

    refresh: str
    recipe: str
    stage: str
    number: int
    kind: str
    version: str
    outcome: str | None
    started_ms: int
    seconds: float | None
    metrics: dict[str, float]
    mlflow_run_id: str | None
    host: str | None = None


def stage_runs(*, recipe: str | None, stage: str | None, limit: int, unreadable: list[str]) -> list[StageRun]:
    """Return the newest `limit` stage runs, of a recipe or stage if named. unreadable: gets skipped refreshes."""
    return list(islice(_newest_first(recipe, stage, unreadable), limit))


def not_listed(unreadable: Sequence[str]) -> list[str]:
    """Return a sentence for each group of refreshes that `lifecycle runs` cannot list, for lack of readable records."""
    earlier = home() / "refreshes"  # where versions before ledgers kept refreshes
    num_earlier = sum(folder.is_dir() for folder in earlier.iterdir()) if earlier.is_dir() else 0
    sentences = []
    if num_earlier:
        sentences.append(f"not listed: refreshes of an earlier version ({num_earlier}), in {earlier}")
    if unreadable:
        known = ", ".join(unreadable[:3]) + (", …" if unreadable[3:] else "")
        remedy = "another version wrote them, or they are damaged; `lifecycle show REFRESH` says more"
        sentences.append(f"not listed: refreshes whose ledgers cannot be read ({len(unreadable)}: {known}): {remedy}")
    return sentences


def as_json(runs: list[StageRun]) -> dict[str, Any]:
    """Return stage runs as the object that `lifecycle runs --json` prints."""
    return {"runs": [asdict(run) for run in runs]}


def as_text(runs: list[StageRun]) -> str:
    """Return stage runs as text, one line for each."""
    return "\n".join(_line(run) for run in runs) or "no stage has been run here yet"


def _newest_first(recipe: str | None, stage: str | None, unreadable: list[str]) -> Iterator[StageRun]:
    for ledger in ledgers():
        try:
            record = ledger.read()
        except StoreError:
            unreadable.append(ledger.folder.name)
            continue
        for attempt in reversed(record.attempts.values()):
            if recipe in (None, record.recipe) and stage in (None, attempt.began.stage):
                yield _stage_run(record, attempt)


def _stage_run(record: RefreshRecord, attempt: AttemptRecord) -> StageRun:
    return StageRun(
        refresh=record.refresh,
        recipe=record.recipe,
        stage=attempt.began.stage,
        number=attempt.began.number,
        kind=attempt.tags["kind"],
        version=attempt.tags["version"],
        outcome=attempt.outcome,
        started_ms=attempt.began.time_ms,
        seconds=attempt.seconds,
        metrics=attempt.metrics,
        mlflow_run_id=run_id_of(record.key_of(attempt.began.stage, attempt.began.number)),
        host=None if attempt.outcome else record.elsewhere,
    )


def _line(run: StageRun) -> str:
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_ms / 1000))
    took = f"{run.seconds:8.1f} s" if run.seconds is not None else f"{'':10}"
    name = f"{run.stage} #{run.number}"
    outcome = run.outcome or (f"unknown, on {run.host}" if run.host else "running")
    metrics = metrics_text(dict(islice(run.metrics.items(), 3)))
    mlflow = f"{run.mlflow_run_id or 'not in MLflow yet':32}"
    return f"{began}  {run.refresh:<36} {name:<24} {outcome:<9} {took}  {mlflow}  {metrics}".rstrip()
