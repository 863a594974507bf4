"""Steps of `lifecycle run`, `rerun` and `retry`: plan, start servers, run the Prefect flow, print the outcome."""

import logging
import os
import sys
from typing import Any

from flows.cli.answers import print_json
from flows.cli.live import PlainView, TerminalView, View
from flows.cli.show import entry_as_json, find_refresh, state_of
from flows.launch import stage_process
from flows.ledger.home import home
from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import close_interrupted, ledgers
from flows.recipe.text import closest
from flows.running.outcome import approvals_awaited, summary_lines, verdict_tables
from flows.running.refresh_run import RefreshRun
from flows.running.request import RefreshRequest, make_plan, retry_of
from flows.running.runner import Launcher
from flows.servers import local as servers
from flows.servers.keyed import set_variables
from flows.servers.programs import NAMED_BY, uses_mlflow
from stages.core.errors import (
    INTERNAL_ERROR,
    NotPromotedError,
    RefreshStoppedError,
    ServerError,
    StoreError,
    WaitingForApprovalError,
    error_classes,
)
from stages.core.lines import raw_stream, say

PREFECT_SETTINGS = {
    # Milestones go to Prefect's server; on stdout and stderr, this process shows its own lines.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    # A server that dies during a refresh holds up its end by 6 s instead of 62 s.
    "PREFECT_CLIENT_MAX_RETRIES": "2",
}
"""Environment variables that Prefect reads when it is imported: quiet logs, and few retries of a dead server."""
ANSWERED_FIELDS = ("kind", "version", "state", "seconds", "artifact", "mlflow_run_id", "metrics", "verdict", "error")


def run_refresh(
    request: RefreshRequest,
    *,
    quiet: bool,
    retried: RefreshRecord | None = None,
    launch: Launcher = stage_process.start,
) -> RefreshRecord:
    """Run a refresh to its end and return its record; `quiet` keeps stdout free of messages.

    retried: the refresh that is continued. Raises what keeps a refresh from starting: a bad recipe, servers that do not
    answer. Later failures are in the record.
    """
    planned = make_plan(request)
    for note in planned.notes:
        say(note, sys.stderr)
    endpoints = ready_servers()
    run = RefreshRun(planned, retried.refresh if retried else None, launch=launch)
    run.tracker.start(endpoints.environment())
    with view_of(run, quiet):
        try:
            _run_flow(request, run, retried)
        finally:
            run.finish()
    return run.record


def retry_refresh(name: str | None, *, quiet: bool, launch: Launcher = stage_process.start) -> RefreshRecord:
    """Continue a refresh that failed, was cancelled or killed (default: the latest), as the same refresh.

    Raises `StoreError` when there is nothing to continue, and what `run_refresh` raises.
    """
    record = _to_retry(name)
    return run_refresh(retry_of(record), quiet=quiet, retried=record, launch=launch)


def _to_retry(name: str | None) -> RefreshRecord:
    close_interrupted()
    known = [ledger.folder.name for ledger in ledgers()]
    ledger = find_refresh(name) if name else next((one for one in ledgers() if not one.read().comparison), None)
    if ledger is None:
        raise StoreError(f"retrying {name or 'the latest refresh'}: there is none{closest(name or '', known[:20])}")
    record = ledger.read()
    if record.comparison:
        raise StoreError(f"retrying {record.refresh}: it compares layouts; measure them again with `lifecycle compare`")
    is_whole = all(entry.state != "skipped" for entry in record.stages.values())
    # What an approval has let pass since then is still to be run.
    if record.state == "running" or (record.state == "completed" and is_whole):
        raise StoreError(
            f"retrying {record.refresh}: it is {state_of(record)}, expected one that failed or was stopped"
        )
    return record


def ready_servers(*, worker: bool = False) -> servers.Endpoints:
    """Start the local Prefect and MLflow servers, unless the environment names others, and point clients to them.

    Prefect, if it was imported before, reads its settings again. Raises `ServerError`.
    """
    absent = (one for one in servers.status() if one.ours and not one.healthy and not one.host)
    if any(one.name in NAMED_BY for one in absent):
        which = "Prefect and MLflow servers" if uses_mlflow() else "Prefect server, and no MLflow"
        say(f"starting the local {which} (stop them with `lifecycle down`)", sys.stderr)
    endpoints = servers.up(worker=worker)
    for status in servers.status():
        if status.url:
            say(f"{status.name}: {status.url}", sys.stderr)
    folder = {"PREFECT_HOME": str(home() / "prefect")} if "prefect" in endpoints.local else {}
    # Settings that the user made stay.
    set_variables({**PREFECT_SETTINGS, **folder, **os.environ, **endpoints.environment()})
    return endpoints


def _run_flow(request: RefreshRequest, run: RefreshRun, retried: RefreshRecord | None) -> None:
    logging.raiseExceptions = False  # Prefect's log handler writes to the terminal when its server is away
    from prefect.flow_engine import run_flow

    from flows.running.flow_runs import create_flow_run, reset_flow_run
    from flows.running.refresh import flow_of

    try:
        flow_run = reset_flow_run(retried) if retried else None
        flow_run = flow_run or create_flow_run(request, run.record.refresh)
        run_flow(flow_of(run), flow_run=flow_run, parameters=flow_run.parameters, return_type="state")
    except Exception as error:
        if run.record.state == "running":
            raise ServerError(f"Prefect could not run the refresh: {type(error).__name__}: {error}") from error
        say(f"Prefect does not know how the refresh ended: {error}", sys.stderr)


def view_of(run: RefreshRun, quiet: bool) -> View:
    """Return a refresh's progress display: a live table on a terminal, plain lines elsewhere; `quiet`: on stderr."""
    stream = sys.stderr if quiet else sys.stdout
    if stream.isatty():
        from rich.console import Console

        return TerminalView(lambda: run.record, Console(file=raw_stream(stream)))
    return PlainView(lambda: run.record, stream)


def print_outcome(record: RefreshRecord, as_json: bool) -> int:
    """Print the outcome of a finished refresh; return its exit code."""
    if as_json:
        print_json(to_json(record))
    else:
        say(closing_lines(record), sys.stdout)
    return exit_code(record)


def exit_code(record: RefreshRecord) -> int:
    """Return the exit code of a refresh: 0, or the code of the first failed stage's error class."""
    if record.state == "completed":
        return 0
    if record.state == "not_promoted":
        return NotPromotedError.exit_code
    if record.state == "waiting_for_approval":
        return WaitingForApprovalError.exit_code
    if record.state == "cancelled":
        return RefreshStoppedError.exit_code
    failed = [entry for entry in record.stages.values() if entry.state == "failed"]
    known = error_classes().get(failed[0].error_class or "") if failed else None
    return known.exit_code if known else INTERNAL_ERROR


def to_json(record: RefreshRecord) -> dict[str, Any]:
    """Return the outcome of a refresh as the object that `lifecycle run --json` prints."""
    stages = {
        name: {field: value for field, value in entry_as_json(entry).items() if field in ANSWERED_FIELDS}
        for name, entry in record.stages.items()
    }
    return {
        "refresh": record.refresh,
        "state": record.state,
        "seconds": record.seconds,
        "stages": stages,
        "error": record.error,
    }


def closing_lines(record: RefreshRecord) -> str:
    """Return the last lines that `lifecycle run` prints: the refresh's outcome, and the commands that show more."""
    words = f"{record.refresh}: {record.state.replace('_', ' ')} in {record.seconds:.1f} s"
    if record.error:
        words += f" ({record.error})"
    tables = verdict_tables(record).values() if record.state == "not_promoted" else ()
    goes_on = record.state in ("failed", "cancelled") and not record.comparison
    hint = [f"to go on where it stopped: lifecycle retry {record.refresh}"] if goes_on else []
    hint += [f"to approve it: {command}" for command in approvals_awaited(record)]
    return "\n".join([*tables, words, *summary_lines(record), *hint, f"lifecycle show {record.refresh}"])
