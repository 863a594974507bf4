"""Tells MLflow of comparisons: a run a layout under one parent run. A process of its own, as `shipper.py` is.

    python -m flows.tracking.comparison_shipper

Ships every recorded comparison that is over and that MLflow does not have yet. Steps of a layout's second round go on
counting where those of the first one end; the last value of every metric is the figure of the tables. A run that
exists already is found by its tag and completed: values told twice are kept once by MLflow.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from flows.compare.figures import Row, rows_of
from flows.compare.names import COMPARISON_IDENTITY, GIT_COMMIT, HARDWARE
from flows.compare.record import ComparisonFolder, ComparisonRecord, LayoutEntry, ShippedComparison, comparisons
from flows.compare.table import grid
from flows.tracking.rows import MetricRow, acceptable
from flows.tracking.shipper import CLIENT_ENVIRONMENT, experiment_id
from flows.tracking.writing import LONGEST_VALUE, log_metrics, log_params

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class ComparisonShipper:
    """Brings MLflow up to date with one comparison, which is over."""

    def __init__(self, folder: ComparisonFolder, client: MlflowClient):
        self.folder = folder
        self.client = client
        self.record = folder.read()
        self.experiment = experiment_id(client)

    def ship(self) -> ShippedComparison:
        """Raises what the MLflow client raises when the server is away; call it again later."""
        record, rows = self.record, rows_of(self.record)
        parent = self._run(record.comparison, record.comparison, _parent_tags(record))
        log_params(self.client, parent, parent_params(record))
        children = tuple(
            self._ship_layout(number, layout, row, parent)
            for number, (layout, row) in enumerate(zip(record.layouts, rows, strict=True))
        )
        for file in (self.folder.report, self.folder.path / "comparison.json"):
            if file.exists():
                self.client.log_artifact(parent, str(file))
        self.client.set_tag(parent, "mlflow.note.content", note(rows))
        self.client.set_terminated(parent, RUN_STATUS[record.state], self._ended_ms)
        shipped = ShippedComparison(experiment_id=self.experiment, parent_run_id=parent, run_ids=children)
        self.folder.write_shipped(shipped)
        return shipped

    @property
    def _ended_ms(self) -> int:
        return self.record.started_ms + round(1000 * self.record.seconds)

    def _ship_layout(self, number: int, layout: LayoutEntry, row: Row, parent: str) -> str:
        told = {name: value for trial in self.record.trials_of(number) for name, value in trial.tags.items()}
        tags = {**layout.tags, **told, **_shared_tags(self.record), "mlflow.parentRunId": parent}
        tags |= {"error": row.error} if row.error else {}
        run = self._run(f"{self.record.comparison}/{number}", layout.text, tags)
        log_params(self.client, run, {**layout.params, **trial_params(self.record, layout)})
        steps = _step_rows(self.record, number)
        last_step = max((step.step for step in steps), default=0)
        figures = [MetricRow(acceptable(name), value, self._ended_ms, last_step) for name, value in row.metrics.items()]
        log_metrics(self.client, run, [*steps, *figures])
        self.client.set_terminated(run, "FAILED" if row.error else "FINISHED", self._ended_ms)
        return run

    def _run(self, identity: str, name: str, tags: dict[str, str]) -> str:
        """Create a run, or find it when an earlier process created it and died before it could say so."""
        found = self.client.search_runs(
            [self.experiment], f"tags.`{COMPARISON_IDENTITY}` = '{identity}'", max_results=1
        )
        if found:
            return str(found[0].info.run_id)
        tags = {key: value[:LONGEST_VALUE] for key, value in tags.items()} | {COMPARISON_IDENTITY: identity}
        created = self.client.create_run(self.experiment, start_time=self.record.started_ms, tags=tags, run_name=name)
        return str(created.info.run_id)


def main() -> None:
    """Ship what is pending."""
    os.environ.update(CLIENT_ENVIRONMENT)
    from mlflow import MlflowClient

    client = MlflowClient()
    for folder in comparisons():
        if folder.read_shipped() is None and folder.read().state != "running":
            ComparisonShipper(folder, client).ship()


def parent_params(record: ComparisonRecord) -> dict[str, str]:
    """What the comparison was asked for."""
    overrides = dict(override.split("=", 1) for override in record.overrides)
    return {"recipe_path": str(record.recipe_path), **overrides, **_how_measured(record)}


def trial_params(record: ComparisonRecord, layout: LayoutEntry) -> dict[str, str]:
    """What a run of a comparison has beside the parameters of its stage."""
    return {"num_devices": str(layout.num_devices), **_how_measured(record)}


def note(rows: list[Row]) -> str:
    """Markdown for the parent run's page."""
    heading, *lines = grid(rows)
    table = [heading, ["---"] * len(heading), *lines]
    failures = [f"- `{row.text}`: {row.error}" for row in rows if row.error]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in table), "", *failures])


def _how_measured(record: ComparisonRecord) -> dict[str, str]:
    return {
        "measured_steps": str(record.num_steps),
        "measured_warmup_steps": str(record.num_warmup_steps),
        "measured_rounds": str(record.num_rounds),
    }


def _shared_tags(record: ComparisonRecord) -> dict[str, str]:
    return {
        "comparison": record.comparison,
        HARDWARE: record.hardware,
        GIT_COMMIT: record.git_commit or "unknown",
    }


def _parent_tags(record: ComparisonRecord) -> dict[str, str]:
    tags = {"kind": "comparison", "recipe": record.recipe, "stage": record.stage, **_shared_tags(record)}
    return tags | ({"prefect_flow_run_id": record.prefect_flow_run_id} if record.prefect_flow_run_id else {})


def _step_rows(record: ComparisonRecord, layout: int) -> list[MetricRow]:
    rows = []
    for trial in record.trials_of(layout):
        before = (trial.round - 1) * (record.num_warmup_steps + record.num_steps)
        for step in trial.steps:
            place = before + int(step["step"])
            figures = {name: value for name, value in step.items() if name not in ("step", "time_ms")}
            rows += [MetricRow(acceptable(name), value, int(step["time_ms"]), place) for name, value in figures.items()]
    return rows


if __name__ == "__main__":
    main()
