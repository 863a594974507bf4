"""Steps of `lifecycle compare`: plan, start servers, run the Prefect flow; or compare runs already in MLflow."""

import re
import sys
from pathlib import Path
from typing import TextIO

from flows.cli.run_command import ready_servers, view_of
from flows.compare.plan import ComparisonRequest, plan_comparison
from flows.ledger.home import home
from flows.ledger.record import RefreshRecord
from flows.report.layouts import Row
from flows.running.refresh_run import RefreshRun
from flows.servers.programs import uses_mlflow
from flows.tracking.cursor import read_shipped
from flows.tracking.pages import page_of
from stages.core.errors import RefreshStoppedError, ServerError, StageCrashError
from stages.core.lines import say

NOT_IN_FILE_NAMES = r"[^\w.-]"


def run_comparison(request: ComparisonRequest, *, stream: TextIO) -> RefreshRun:
    """Measure all layouts of a comparison, printing progress on `stream`, and return the finished run.

    Raises what keeps it from starting: a bad recipe or layout, dead servers. Later failures are in the record.
    """
    planned = plan_comparison(request)
    ready_servers()
    run = RefreshRun(planned)
    with view_of(run, quiet=stream is sys.stderr):
        try:
            _run_flow(request, run)
        finally:
            run.finish()
    if uses_mlflow() and not read_shipped(run.ledger).has_all_of(run.ledger):
        log = run.ledger.folder / "tracking.log"
        say(f"MLflow does not have all of it yet (see {log}); the next refresh ships the rest", sys.stderr)
    elif link := page_of(run.record.refresh):
        say(f"MLflow: {link}", stream)
    return run


def compare_logged(experiment: str, where: str, *, allow_mixed: bool) -> tuple[list[Row], Path]:
    """Compare training runs already in MLflow, without running any; return the table's rows and the HTML page."""
    from flows.compare.logged import rows_of_runs
    from flows.report.page import layouts_page
    from flows.tracking.logged_runs import find_runs

    ready_servers()
    rows = rows_of_runs(find_runs(experiment, where), allow_mixed=allow_mixed)
    report = home() / "comparisons" / f"{re.sub(NOT_IN_FILE_NAMES, '_', experiment)}.html"
    report.parent.mkdir(parents=True, exist_ok=True)
    facts = [f"{len(rows)} runs of the MLflow experiment {experiment}", *([f"where {where}"] if where else [])]
    report.write_text(layouts_page(f"Layouts in {experiment}", facts, rows), encoding="utf-8")
    return rows, report


def exit_code(record: RefreshRecord) -> int:
    """Return the exit code of a comparison: 0 if any layout was measured, since some often do not fit into memory."""
    codes = {"completed": 0, "cancelled": RefreshStoppedError.exit_code}
    return codes.get(record.state, StageCrashError.exit_code)


def _run_flow(request: ComparisonRequest, run: RefreshRun) -> None:
    from flows.running.refresh import flow_of

    try:
        flow_of(run)(request.recipe, request.overrides, until=request.stage, return_state=True)
    except Exception as error:
        if run.record.state == "running":
            raise ServerError(f"Prefect could not run the comparison: {type(error).__name__}: {error}") from error
        say(f"Prefect does not know how the comparison ended: {error}", sys.stderr)
