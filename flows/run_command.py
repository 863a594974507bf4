"""`lifecycle run` and `rerun`: plan, servers, the Prefect flow, and what is said of it."""

from __future__ import annotations

import os
import sys
from typing import Any

from flows import servers
from flows.history import RefreshRecord
from flows.home import home
from flows.launch import local
from flows.live import PlainView, TerminalView, View
from flows.refresh_run import RefreshRequest, RefreshRun, make_plan
from flows.runner import Launcher
from stages.errors import INTERNAL_ERROR, RefreshStoppedError, ServerError, error_classes

PREFECT_SETTINGS = {
    # Milestones go to Prefect's server; on stdout and stderr, this process shows its own lines.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    # A server that dies during a refresh holds up its end by 6 s instead of 62 s.
    "PREFECT_CLIENT_MAX_RETRIES": "2",
}
"""Read by Prefect when it is imported."""


def run_refresh(request: RefreshRequest, *, quiet: bool, launch: Launcher = local.start) -> RefreshRecord:
    """Run a refresh to its end; `quiet` keeps stdout free (all that is said goes to stderr).

    Raises what keeps a refresh from starting: a bad recipe, servers that do not answer. What goes wrong later is in
    the record.
    """
    planned = make_plan(request)
    endpoints = _servers()
    run = RefreshRun(planned, launch=launch)
    run.tracker.start(endpoints.environment())
    with view_of(run, quiet):
        try:
            _run_flow(request, run)
        finally:
            run.finish()
    return run.record


def _servers() -> servers.Endpoints:
    if any(status.ours and not status.healthy for status in servers.status()):
        print("starting the local Prefect and MLflow servers (stop them with `lifecycle down`)", file=sys.stderr)
    endpoints = servers.up()
    for status in servers.status():
        print(f"{status.name}: {status.url}", file=sys.stderr)
    os.environ.update(endpoints.environment())
    for name, value in PREFECT_SETTINGS.items():
        os.environ.setdefault(name, value)
    if "prefect" in endpoints.local:
        os.environ.setdefault("PREFECT_HOME", str(home() / "prefect"))
    return endpoints


def _run_flow(request: RefreshRequest, run: RefreshRun) -> None:
    from flows.refresh import OPENED_RUN, refresh

    OPENED_RUN.set(run)
    options = (request.recipe, request.overrides, request.until, request.force, run.record.refresh)
    try:
        refresh(*options, return_state=True)
    except Exception as error:
        if run.record.state == "running":
            raise ServerError(f"Prefect could not run the refresh: {type(error).__name__}: {error}") from error
        print(f"the Prefect server was not told how the refresh ended: {error}", file=sys.stderr)


def view_of(run: RefreshRun, quiet: bool) -> View:
    """A live table on a terminal, lines elsewhere; on stderr if stdout is to be kept free."""
    stream = sys.stderr if quiet else sys.stdout
    if stream.isatty():
        from rich.console import Console

        return TerminalView(lambda: run.record, Console(file=stream))
    return PlainView(lambda: run.record, stream)


def exit_code(record: RefreshRecord) -> int:
    """0, or the code of the first failed stage's error class."""
    if record.state == "completed":
        return 0
    if record.state == "cancelled":
        return RefreshStoppedError.exit_code
    failed = [entry for entry in record.stages.values() if entry.state == "failed"]
    known = error_classes().get(failed[0].error_class or "") if failed else None
    return known.exit_code if known else INTERNAL_ERROR


def as_json(record: RefreshRecord) -> dict[str, Any]:
    """The object that `--json` prints."""
    stages = {
        name: entry.model_dump(
            mode="json",
            include={"kind", "version", "state", "seconds", "artifact", "mlflow_run_id", "metrics", "error"},
        )
        for name, entry in record.stages.items()
    }
    return {
        "refresh": record.refresh,
        "state": record.state,
        "seconds": record.seconds,
        "stages": stages,
        "error": record.error,
    }


def closing_words(record: RefreshRecord) -> str:
    """How it ended, and where to look."""
    words = f"{record.refresh}: {record.state} in {record.seconds:.1f} s"
    if record.error:
        words += f" ({record.error})"
    return f"{words}\nlifecycle show {record.refresh}"
