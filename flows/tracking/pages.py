"""Web addresses of refreshes and runs in MLflow, and the columns that its list of runs shows.

By default MLflow opens an experiment on its traces, of which we have none, and lists runs without our columns. The
address selects runs; the columns are a *view*, stored in a tag of the experiment.
"""

import json
import os

from flows.ledger.refreshes import REPORT_FILE, ledger_of, ledgers
from flows.servers.records import address_of
from flows.tracking.cursor import read_shipped, run_id_of

RUNS_NOT_TRACES = "workflowType=machine_learning"
RUN_LINK = f"#/experiments/{{experiment}}/runs/{{run}}?{RUNS_NOT_TRACES}"
VIEW = "refreshes"
RUNS_LINK = f"#/experiments/{{experiment}}/runs?viewStateShareKey={VIEW}&{RUNS_NOT_TRACES}"
COLUMNS = (
    "tags.`recipe`",
    "tags.`stage`",
    "tags.`layout`",
    "tags.`scores`",
    "metrics.`real_tokens_per_s`",
    "metrics.`mfu`",
)
EXPERIMENT_TAGS = {
    "mlflow.experimentKind": "custom_model_development",  # for older versions of the pages
    f"mlflow.sharedViewState.{VIEW}": json.dumps(
        {"name": VIEW, "createdAt": 0, "updatedAt": 0, "state": json.dumps({"selectedColumns": COLUMNS})}
    ),
}
UNFOLDED = {"mlflow.runType": "evaluation"}
"""MLflow tag of an evaluation's run, which makes MLflow's list of runs show a refresh with all its stages unfolded."""


def run_page_of(attempt: str | None) -> str | None:
    """Return the web address of a stage attempt's run in MLflow; None without an MLflow server or without the run."""
    run = run_id_of(attempt)
    return _run_page(attempt.partition("/")[0], run) if attempt and run else None


def page_of(refresh: str) -> str | None:
    """Return the web address of a refresh's run in MLflow; None without an MLflow server or without the run."""
    run = read_shipped(ledger_of(refresh)).parent_run_id
    return _run_page(refresh, run) if run else None


def report_page_of(refresh: str) -> str | None:
    """Return the web address of a refresh's HTML report in MLflow; None without an MLflow server or the run."""
    page, _, options = (page_of(refresh) or "").rpartition("?")
    return f"{page}/artifacts/{REPORT_FILE}?{options}" if page else None


def runs_page() -> str:
    """Return the path of MLflow's list of runs, for appending to the server's address; empty without any run."""
    experiments = (read_shipped(ledger).experiment_id for ledger in ledgers())
    experiment = next(filter(None, experiments), None)
    return RUNS_LINK.format(experiment=experiment) if experiment else ""


def _run_page(refresh: str, run: str) -> str | None:
    uri = os.environ.get("MLFLOW_TRACKING_URI") or address_of("mlflow") or ""
    experiment = read_shipped(ledger_of(refresh)).experiment_id
    return f"{uri.rstrip('/')}/{RUN_LINK.format(experiment=experiment, run=run)}" if uri.startswith("http") else None
