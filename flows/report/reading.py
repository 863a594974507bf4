"""Reader that makes a refresh's report from its ledger (event log) and the store, without asking any server."""

from collections.abc import Iterator

from flows.ledger.home import hardware_file
from flows.ledger.record import RefreshRecord, StageEntry
from flows.report.answers import answers, episodes
from flows.report.evaluations import promotions, scores
from flows.report.layouts import rows_of
from flows.report.lineage import node_of
from flows.report.model import Cost, RefreshReport, Span, StageReport
from flows.report.sentences import fastest_layout_sentence, outcome_sentence, result_sentence, warnings_of
from flows.report.trainings import data_of_trainings, training_curves
from flows.store.content import LOG_FILE
from flows.store.record import Index
from flows.tracking.pages import page_of
from stages.core.errors import RecipeError
from stages.core.files import read_end
from stages.core.redaction import redact
from stages.planner.hardware import from_yaml

LOG_LINES = 40
LOG_BYTES = 16_384
SECONDS_PER_HOUR = 3600
JOULES_PER_KWH = 3_600_000


def read_report(record: RefreshRecord, index: Index) -> RefreshReport:
    """Return the report of a refresh, made from its ledger (event log) and those artifacts that are still stored."""
    stages = tuple(_stage(record, name, entry) for name, entry in record.stages.items())
    verdicts = tuple(promotions(record))
    found_scores = tuple(scores(record))
    layouts = tuple(rows_of(record)) if record.comparison else ()
    page = page_of(record.refresh)
    return RefreshReport(
        refresh=record.refresh,
        recipe=record.recipe,
        recipe_path=record.recipe_path,
        overrides=record.overrides,
        state="killed" if record.killed else record.state,
        happened=outcome_sentence(record),
        means=fastest_layout_sentence(layouts)
        if record.comparison
        else result_sentence(record, verdicts, found_scores),
        started_ms=record.started_ms,
        seconds=record.seconds,
        hardware=record.hardware,
        git_commit=record.git_commit,
        num_tries=record.num_tries,
        stages=stages,
        spans=tuple(_spans(record)),
        comparison=record.comparison,
        layouts=layouts,
        trainings=tuple(training_curves(record, index)),
        learned_from=tuple(data_of_trainings(record)),
        scores=found_scores,
        answers=tuple(answers(record)),
        episodes=tuple(episodes(record)),
        promotions=verdicts,
        lineage=tuple(
            node_of(artifact, index)
            for entry in record.stages.values()
            if (artifact := index.find(entry.kind, entry.version))
        ),
        cost=_cost(record),
        warnings=tuple(warnings_of(record)),
        links={"MLflow": page} if page else {},
    )


def _stage(record: RefreshRecord, name: str, entry: StageEntry) -> StageReport:
    builder = entry.attempt.partition("/")[0] if entry.attempt else None
    attempts = record.attempts_at(name)
    folder = entry.work or (attempts[-1].folder if attempts else None)
    log = read_end(folder / LOG_FILE, LOG_BYTES) if entry.error and folder else ""
    return StageReport(
        name=name,
        kind=entry.kind,
        version=entry.version,
        state=entry.state,
        reason=entry.reason,
        seconds=entry.seconds,
        upstream=entry.upstream,
        built_by=builder if builder != record.refresh else None,
        metrics=entry.metrics,
        error=entry.error,
        error_class=entry.error_class,
        log_tail=tuple(redact(log).splitlines()[-LOG_LINES:]),
    )


def _spans(record: RefreshRecord) -> Iterator[Span]:
    """Yield a time-line bar for each attempt of the latest try; an attempt that still runs has length 0."""
    attempts = record.latest_try
    begin_ms = min((attempt.began.time_ms for attempt in attempts), default=0)
    for attempt in attempts:
        yield Span(
            stage=attempt.began.stage,
            number=attempt.began.number,
            outcome=attempt.outcome or "running",
            start_s=(attempt.began.time_ms - begin_ms) / 1000,
            seconds=attempt.seconds or 0.0,
            num_devices=attempt.began.num_devices,
            retried=bool(attempt.ended and attempt.ended.retried),
        )


def _cost(record: RefreshRecord) -> Cost:
    attempts = record.attempts.values()
    file, price, damage = hardware_file(), None, ""
    try:
        price = from_yaml(file).price_per_device_hour if file.is_file() else None
    except RecipeError as error:
        damage = str(error)
    ends = [attempt.ended for attempt in attempts if attempt.ended]
    energies_j = [end.energy_j for end in ends if end.energy_j is not None]
    device_seconds = sum((attempt.began.num_devices or 0) * (attempt.seconds or 0.0) for attempt in attempts)
    if record.comparison:
        layouts = record.comparison.layouts
        device_seconds += sum(layouts[trial.layout].num_devices * trial.seconds for trial in record.trials)
    return Cost(
        device_hours=device_seconds / SECONDS_PER_HOUR,
        price_per_device_hour=price,
        damage=damage,
        hardware_file=file,
        energy_kwh=sum(energies_j) / JOULES_PER_KWH if energies_j else None,
        unknown=tuple(dict.fromkeys(attempt.began.stage for attempt in attempts if attempt.began.num_devices is None)),
    )
