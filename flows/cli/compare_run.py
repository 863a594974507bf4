"""What `lifecycle compare` does once it has been asked: plan, servers, the Prefect flow."""

from __future__ import annotations

import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from flows.cli.run_command import ready_servers, view_of
from flows.compare.figures import Row
from flows.compare.record import ComparisonRecord
from flows.compare.run import ComparisonRequest, ComparisonRun, plan_comparison
from flows.launch import choice
from flows.ledger.home import home
from flows.running.refresh_run import RefreshRun
from flows.running.runner import Launcher
from stages.core.errors import RefreshStoppedError, ServerError, StageCrashError

NOT_IN_FILE_NAMES = r"[^\w.-]"


def run_comparison(request: ComparisonRequest, *, stream: TextIO, launch: Launcher = choice.start) -> ComparisonRun:
    """Run a comparison to its end; what happens is told on `stream` as it happens.

    Raises what keeps it from starting: a bad recipe, a bad layout, servers that do not answer. What goes wrong later is
    in the record.
    """
    planned = plan_comparison(request)
    endpoints = ready_servers()
    run = ComparisonRun(planned, launch=launch)
    upstream = RefreshRun(planned.upstream_refresh, launch=launch) if planned.upstream_refresh else None
    if upstream:
        upstream.tracker.start(endpoints.environment())
    with view_of(upstream, quiet=stream is sys.stderr) if upstream else nullcontext():
        _run_flow(request, run, upstream, stream)
    write_report(run)
    tell_mlflow(run, stream)
    return run


def compare_logged(experiment: str, where: str, *, allow_mixed: bool) -> tuple[list[Row], Path]:
    """Rows of runs that MLflow has, and the HTML page made of them. Raises what `rows_of_runs` and `find_runs` do."""
    from flows.compare.logged import rows_of_runs
    from flows.compare.report import html_report
    from flows.tracking.logged_runs import find_runs

    ready_servers()
    rows = rows_of_runs(find_runs(experiment, where), allow_mixed=allow_mixed)
    report = home() / "comparisons" / f"{re.sub(NOT_IN_FILE_NAMES, '_', experiment)}.html"
    report.parent.mkdir(parents=True, exist_ok=True)
    facts = [f"{len(rows)} runs of the MLflow experiment {experiment}", *([f"where {where}"] if where else [])]
    report.write_text(html_report(f"Layouts in {experiment}", facts, rows), encoding="utf-8")
    return rows, report


def write_report(run: ComparisonRun) -> None:
    """Leave the HTML page in the comparison's folder."""
    from flows.compare.figures import rows_of
    from flows.compare.report import facts_of, html_report

    record = run.record
    title = f"Layouts of {record.stage}: {record.comparison}"
    run.folder.report.write_text(html_report(title, facts_of(record), rows_of(record)), encoding="utf-8")


def tell_mlflow(run: ComparisonRun, stream: TextIO) -> None:
    """Log the comparison, and say where it is to be seen."""
    from flows.tracking.comparison_tracker import page, ship

    shipped = ship(run.folder)
    if shipped is None:
        log = run.folder.path / "tracking.log"
        print(f"MLflow was not told (see {log}); the next comparison tells it of this one too", file=sys.stderr)
    elif link := page(shipped):
        print(f"MLflow: {link}", file=stream)


def _run_flow(request: ComparisonRequest, run: ComparisonRun, upstream: RefreshRun | None, stream: TextIO) -> None:
    from flows.compare.flow import OPENED_COMPARISON, compare

    run.upstream = upstream
    OPENED_COMPARISON.set(run)
    run.listen(lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", file=stream, flush=True))
    names = (request.recipe, request.stage, request.layouts, request.overrides)
    options = (request.num_steps, request.num_warmup_steps, request.num_rounds, run.record.comparison)
    try:
        compare(*names, *options, return_state=True)
    except Exception as error:
        if run.record.state == "running":
            raise ServerError(f"Prefect could not run the comparison: {type(error).__name__}: {error}") from error
        print(f"the Prefect server was not told how the comparison ended: {error}", file=sys.stderr)


def exit_code(record: ComparisonRecord) -> int:
    """0 as soon as one layout was measured: that others do not fit is what was asked."""
    codes = {"completed": 0, "cancelled": RefreshStoppedError.exit_code}
    return codes.get(record.state, StageCrashError.exit_code)
