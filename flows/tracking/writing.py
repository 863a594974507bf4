"""Values into an MLflow run, in requests of the size that MLflow takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flows.tracking.rows import MetricRow

if TYPE_CHECKING:
    from mlflow import MlflowClient

METRICS_PER_BATCH = 1000
PARAMS_PER_BATCH = 100
LONGEST_VALUE = 6000


def log_params(client: MlflowClient, run: str, params: Mapping[str, str]) -> None:
    """Log parameters; those that the run has must have the same values."""
    from mlflow.entities import Param

    entities = [Param(name, value[:LONGEST_VALUE]) for name, value in params.items()]
    for start in range(0, len(entities), PARAMS_PER_BATCH):
        client.log_batch(run, params=entities[start : start + PARAMS_PER_BATCH])


def log_metrics(client: MlflowClient, run: str, rows: Sequence[MetricRow]) -> None:
    """Log values; one that the run has already, with the same step and time, is kept once."""
    from mlflow.entities import Metric

    metrics = [Metric(row.name, row.value, row.time_ms, row.step) for row in rows]
    for start in range(0, len(metrics), METRICS_PER_BATCH):
        client.log_batch(run, metrics=metrics[start : start + METRICS_PER_BATCH])


def set_tags(client: MlflowClient, run: str, tags: Mapping[str, str]) -> None:
    """Set tags; one that the run has is replaced."""
    from mlflow.entities import RunTag

    client.log_batch(run, tags=[RunTag(name, value[:LONGEST_VALUE]) for name, value in tags.items()])
