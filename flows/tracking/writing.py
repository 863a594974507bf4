"""Writer of parameters, metrics, files and tables into an MLflow run, in requests of the size that MLflow accepts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.tracking.datasets import ReadDataset
from flows.tracking.rows import METRICS_PER_BATCH, MetricRow
from stages.core.redaction import shortened

if TYPE_CHECKING:
    from mlflow import MlflowClient

import math
from contextlib import suppress
from itertools import islice
from typing import Any

MOST_ROWS = 1000
"""Most rows of a table in MLflow, since a browser loads the whole table."""
PARAMS_PER_BATCH = 100
LONGEST_VALUE = 6000
TABLES_TAG = "mlflow.loggedArtifacts"
"""MLflow tag that lists a run's tables, by which MLflow's web pages and `load_table` find them."""


def log_params(client: MlflowClient, run: str, params: Mapping[str, str]) -> None:
    """Log parameters to an MLflow run; MLflow refuses another value for one that the run already has."""
    from mlflow.entities import Param

    entities = [Param(name, shortened(value, LONGEST_VALUE)) for name, value in params.items()]
    for start in range(0, len(entities), PARAMS_PER_BATCH):
        client.log_batch(run, params=entities[start : start + PARAMS_PER_BATCH])


def log_metrics(client: MlflowClient, run: str, rows: Sequence[MetricRow]) -> None:
    """Log metric values to an MLflow run; a value already logged with the same step and time is kept only once."""
    from mlflow.entities import Metric

    metrics = [Metric(row.name, row.value, row.time_ms, row.step) for row in rows]
    for start in range(0, len(metrics), METRICS_PER_BATCH):
        client.log_batch(run, metrics=metrics[start : start + METRICS_PER_BATCH])


def log_datasets(client: MlflowClient, run: str, datasets: Iterable[ReadDataset]) -> None:
    """Log the datasets that a run has read to MLflow; an input already logged is kept only once."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = [
        DatasetInput(
            Dataset(
                dataset.name,
                dataset.digest,
                dataset.source_type,
                json.dumps(dataset.source),
                schema=json.dumps({"mlflow_colspec": dataset.columns}) if dataset.columns else None,
                profile=json.dumps(dataset.profile),
            ),
            [InputTag("mlflow.data.context", dataset.context)],
        )
        for dataset in datasets
    ]
    if inputs:
        client.log_inputs(run, inputs)


def log_files(client: MlflowClient, run: str, folder: Path, files: Iterable[str]) -> None:
    """Upload those of a stage folder's named files that exist, and its plots, to an MLflow run.

    JSON-lines files also become tables. MLflow's own `log_table` needs pandas, and appends to an earlier try's.
    """
    # A stage may list its plots among its files as well; `dict.fromkeys` keeps each once.
    plots = [str(plot.relative_to(folder)) for plot in sorted((folder / "plots").glob("*"))]
    existing = [Path(file) for file in dict.fromkeys([*files, *plots]) if (folder / file).is_file()]
    for file in existing:
        client.log_artifact(run, str(folder / file), None if file.parent == Path() else str(file.parent))
    tables = {f"{file.with_suffix('')}.table.json": folder / file for file in existing if file.suffix == ".jsonl"}
    for name, file in tables.items():
        client.log_dict(run, table_of(file), name)
    if tables:
        # After the tables are uploaded: the tag makes MLflow's pages load them.
        set_tags(client, run, {TABLES_TAG: json.dumps([{"path": name, "type": "table"} for name in tables])})


def table_of(file: Path) -> dict[str, list[Any]]:
    """Convert a JSON-lines file to MLflow's form of a table: `columns` and `data`, a list of rows.

    At most `MOST_ROWS` rows, evenly spaced. The values of an object have columns of their own: `rewards.right`.
    """
    with file.open("rb") as stream:
        # 2,500 lines -> every third one. Read twice, since the lines of a large file need not fit in memory.
        stride = math.ceil(sum(1 for _ in stream) / MOST_ROWS) or 1
    rows: list[dict[str, Any]] = []
    with file.open("rb") as stream:
        for line in islice(stream, 0, None, stride):
            with suppress(ValueError):  # a kill may have torn a line
                rows.append(_flat(json.loads(line)))
    # Rows need not have the same fields: the columns are all names, in the order of their first row.
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def set_tags(client: MlflowClient, run: str, tags: Mapping[str, str]) -> None:
    """Set tags of an MLflow run; existing ones are replaced."""
    from mlflow.entities import RunTag

    # One request for all tags; `set_tag` takes one each.
    client.log_batch(run, tags=[RunTag(name, shortened(value, LONGEST_VALUE)) for name, value in tags.items()])
