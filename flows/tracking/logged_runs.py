"""Runs measured earlier, as plain values from MLflow (imported when asked) or a `gpu.json` of `tests/benchmarks`."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from flows.recipe.text import closest
from flows.tracking.rows import MEDIAN
from flows.tracking.shipper import CLIENT_ENVIRONMENT
from stages.core.errors import RecipeError, ServerError
from stages.parallel.layout import ENGINES

MOST_RUNS = 5000
PAGE = 1000


@dataclass(frozen=True)
class LoggedRun:
    """Run measured earlier, with parameters, tags and final metrics (of one logged at every step, the median)."""

    run_id: str
    name: str
    status: str
    params: dict[str, str]
    metrics: dict[str, float]
    tags: dict[str, str]


def find_runs(experiment: str, where: str = "") -> list[LoggedRun]:
    """Return an experiment's runs that match MLflow's search expression `where`, oldest first.

    Raises RecipeError for an unknown experiment or a refused expression; ServerError when MLflow does not answer.
    """
    os.environ.update(CLIENT_ENVIRONMENT)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    try:
        known = client.get_experiment_by_name(experiment)
        names = [] if known else [other.name for other in client.search_experiments()]
    except MlflowException as error:
        raise ServerError(f"asking MLflow for experiment {experiment}: {error}; see `lifecycle status`") from error
    if known is None:
        raise RecipeError(f"MLflow has no experiment `{experiment}`{closest(experiment, names)}")
    runs: list[LoggedRun] = []
    token = None
    while len(runs) < MOST_RUNS:
        try:
            page = client.search_runs([known.experiment_id], where, max_results=PAGE, page_token=token)
        except MlflowException as error:
            raise RecipeError(f"searching runs where {where}: {error}") from error
        runs += [_logged(run) for run in page]
        token = page.token
        if not token:
            break
    # MLflow answers newest first.
    return runs[::-1]


def _logged(run: object) -> LoggedRun:
    info, data = run.info, run.data  # type: ignore[attr-defined]
    medians = {name.removesuffix(MEDIAN): value for name, value in data.metrics.items() if name.endswith(MEDIAN)}
    # `step_time_s_median` replaces `step_time_s`, of which MLflow gives the last step's value.
    metrics = dict(data.metrics) | medians
    return LoggedRun(info.run_id, info.run_name, info.status, dict(data.params), metrics, dict(data.tags))


def measured_runs(file: Path) -> list[LoggedRun]:
    """Return the measurements of our engines in a `gpu.json` of `tests/benchmarks/gpu.py`, else raise RecipeError."""
    try:
        rows = [row for row in json.loads(file.read_text()) if row["status"] == "measured"]
        runs = [
            LoggedRun(
                run_id=row["name"],
                name=row["name"],
                status="FINISHED",
                params=row["params"],
                metrics={name: value for name, value in row["metrics"].items() if value is not None},
                tags={**row["tags"], "hardware": row["tags"]["device_name"]},
            )
            for row in rows
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecipeError(
            f"reading measurements from {file}: {type(error).__name__}: {error}; expected the gpu.json that "
            "tests/benchmarks/gpu.py writes"
        ) from error
    return [run for run in runs if run.params["engine"] in ENGINES]
