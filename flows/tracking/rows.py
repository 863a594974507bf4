"""Metrics, tags and parameters of a refresh and its stages, in the form in which they are logged to MLflow."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flows.ledger.record import RefreshRecord
from flows.tracking.pages import RUN_LINK
from stages.core.metric_series import LoggedStep, MetricSeries
from stages.kinds.registry import makes
from stages.kinds.train.journal import PER_STEP
from stages.kinds.train.methods.registry import metric_meanings

COMPARISON_IDENTITY = "lifecycle.comparison"
"""MLflow tag that identifies a comparison's run by `COMPARISON`, and the runs of its layouts by `COMPARISON/NUMBER`."""
HELD_OUT = "evaluation_"
"""Prefix of the names of metrics measured on held-out rows during training."""
CURVES = ("loss", f"{HELD_OUT}loss")
METRICS_PER_BATCH = 1000
MEDIAN = "_median"
"""Suffix of a final metric's name, for the median of a metric that is logged in every training step."""
REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)


@dataclass(frozen=True)
class MetricRow:
    """Value of one metric at one step, as MLflow logs it."""

    name: str
    value: float
    time_ms: int
    step: int


@dataclass(frozen=True)
class MetricBatch:
    """Batch of metric values to log, with the byte offset of the next line to read in the metrics file."""

    rows: list[MetricRow]
    next_byte: int


def batches(series: MetricSeries, largest: int = METRICS_PER_BATCH) -> Iterator[MetricBatch]:
    """Yield metric values that have not been read yet from a metrics file, in batches of at most `largest`."""
    rows: list[MetricRow] = []
    next_byte = first_byte = series.position
    for logged in series.steps():
        more = rows_of(logged)
        # A line is never split, so that `next_byte` is the beginning of a line.
        if rows and len(rows) + len(more) > largest:
            yield MetricBatch(rows, next_byte)
            rows = []
        rows = rows + more
        next_byte = series.position
    # Also without rows: lines that hold no new values are not to be read again.
    if series.position > first_byte:
        yield MetricBatch(rows, series.position)


def rows_of(logged: LoggedStep) -> list[MetricRow]:
    """Return the metric values in one line of `metrics.jsonl`."""
    return [MetricRow(acceptable(name), value, logged.time_ms, logged.step) for name, value in logged.values.items()]


def is_curve(name: str) -> bool:
    """Return whether a training metric is drawn as a curve: a loss, a reward, or another measure of the method."""
    return name in CURVES or name.startswith("reward") or name.removeprefix(HELD_OUT) in metric_meanings()


def acceptable(name: str) -> str:
    """Return a metric's name with `_` in place of characters that MLflow refuses."""
    return REFUSED.sub("_", name)


def final_rows(metrics: dict[str, float], folder: Path, last_byte: int | None, ended_ms: int) -> list[MetricRow]:
    """Return a stage's final metrics, to log at its last step, without values already logged there.

    The median of what every step measures has a name of its own: as a second value of the last step, a chart would draw
    it as another point of the curve.
    """
    last: dict[str, MetricRow] = {}
    for logged in MetricSeries(folder, last_byte=last_byte).steps():
        # Later lines replace earlier ones: the last value of each metric.
        last |= {row.name: row for row in rows_of(logged)}
    step = max((row.step for row in last.values()), default=0)
    rows = [MetricRow(acceptable(name), value, ended_ms, step) for name, value in metrics.items()]
    return [
        replace(row, name=f"{row.name}{MEDIAN}") if row.name in last and row.name in PER_STEP else row
        for row in rows
        if row.name not in last or last[row.name].value != row.value
    ]


def parent_params(record: RefreshRecord) -> dict[str, str]:
    """Return what a refresh was asked to do (recipe, overrides) as MLflow parameters."""
    overrides = dict(override.split("=", 1) for override in record.overrides)
    return {"recipe_path": str(record.recipe_path), **overrides, **how_measured(record)}


def parent_tags(record: RefreshRecord) -> dict[str, str]:
    """Return the MLflow tags of a refresh's run (recipe, hardware, commit, …), for searching in MLflow."""
    comparison = record.comparison
    tags = {
        "kind": "comparison" if comparison else "refresh",
        "recipe": record.recipe,
        "stage": comparison.stage if comparison else None,
        "comparison": record.refresh if comparison else None,
        COMPARISON_IDENTITY: record.refresh if comparison else None,
        "refresh": record.refresh,
        "hardware": record.hardware,
        "git_commit": record.git_commit or "unknown",
        "prefect_flow_run_id": record.prefect_flow_run_id,
    }
    return {name: value for name, value in tags.items() if value}


def stage_tags(record: RefreshRecord, runs: Mapping[str, str | None]) -> dict[str, str]:
    """Return MLflow tags `stage.NAME`: each stage's state, version, and the MLflow run that built it."""
    return {
        f"stage.{name}": " ".join(filter(None, [entry.state, entry.version, runs[name]]))
        for name, entry in record.stages.items()
    }


def scores_text(kind: str, metrics: Mapping[str, float]) -> str:
    """Return an evaluation's scores as text such as `addition.exact_match 0.98`; empty for other kinds."""
    metrics = metrics if makes(kind, "scores") else {}
    scores = {name: value for name, value in metrics.items() if "." in name and not name.endswith("_stderr")}
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items())


def score_tags(record: RefreshRecord) -> dict[str, str]:
    """Return the MLflow tag `scores` with all evaluation scores of a refresh by stage; empty without evaluations."""
    by_stage = {name: scores_text(entry.kind, entry.metrics) for name, entry in record.stages.items()}
    text = "; ".join(f"{name}: {scores}" for name, scores in by_stage.items() if scores)
    return {"scores": text} if text else {}


def stage_rows(record: RefreshRecord, ended_ms: int) -> list[MetricRow]:
    """Return metrics `NAME.METRIC` of all stages for a refresh's run: final values, and curves of stages built in it.

    Cached stages are included, so that refreshes can be compared. A resumed attempt's run has only part of a curve.
    """
    rows = []
    for name, entry in record.stages.items():
        if entry.state not in ("built", "cached"):
            continue
        folder = entry.artifact if entry.state == "built" else None
        curve = [row for logged in MetricSeries(folder).steps() for row in rows_of(logged)] if folder else []
        last_step = max((row.step for row in curve), default=0)
        losses = [row for row in curve if is_curve(row.name)]
        # A final value of the same name would be one more point of the curve.
        drawn = {row.name for row in losses}
        final = [
            MetricRow(acceptable(metric), value, ended_ms, last_step)
            for metric, value in entry.metrics.items()
            if acceptable(metric) not in drawn
        ]
        rows += [replace(row, name=f"{name}.{row.name}") for row in [*losses, *final]]
    return rows


def note(record: RefreshRecord, runs: Mapping[str, str | None], experiment: str) -> str:
    """Return Markdown for a refresh's page in MLflow: its stages, with links to the runs that built them."""
    lines = ["| stage | state | version | seconds | run |", "| --- | --- | --- | --- | --- |"]
    for name, entry in record.stages.items():
        run = runs[name]
        link = f"[run]({RUN_LINK.format(experiment=experiment, run=run)})" if run else ""
        lines.append(f"| {name} | {entry.state} | `{entry.version}` | {entry.seconds:.1f} | {link} |")
    return "\n".join(lines)


def how_measured(record: RefreshRecord) -> dict[str, str]:
    """Return how a comparison was measured (steps, warm-up, rounds) as MLflow parameters; empty for other refreshes."""
    comparison = record.comparison
    if comparison is None:
        return {}
    return {
        "measured_steps": str(comparison.num_steps),
        "measured_warmup_steps": str(comparison.num_warmup_steps),
        "measured_rounds": str(comparison.num_rounds),
    }


def layout_tags(record: RefreshRecord, number: int) -> dict[str, str]:
    """Return the MLflow tags of a compared layout's run (comparison, hardware, commit, …), for searching in MLflow."""
    assert record.comparison
    result_tags = {name: value for trial in record.trials_of(number) for name, value in trial.tags.items()}
    return {
        **record.comparison.layouts[number].tags,
        **result_tags,
        "comparison": record.refresh,
        "hardware": record.hardware,
        "git_commit": record.git_commit or "unknown",
    }


def trial_rows(record: RefreshRecord, number: int) -> list[MetricRow]:
    """Return a layout's metric values from all rounds, with step numbers that continue from round to round."""
    assert record.comparison
    steps_per_round = record.comparison.num_warmup_steps + record.comparison.num_steps
    return [
        # With 25 steps a round, step 3 of the second round is step 28.
        replace(row, step=row.step + (trial.round - 1) * steps_per_round)
        for trial in record.trials_of(number)
        for logged in MetricSeries(trial.work).steps()
        for row in rows_of(logged)
    ]
