"""Worker process that runs scheduled refreshes when due (of missed ones only the latest), and reports dead refreshes.

python -m flows.service.worker [DESCRIPTOR]

`lifecycle up` starts it with a socket that listens already, on which it answers `/health`, `/metrics` to those who
have the servers' key, and `/approvals` to a signing-in proxy (default: the address in Prefect's settings). It ends on
SIGTERM. A refresh runs in a process of its own, which survives the worker.
"""

import asyncio
import base64
import functools
import hmac
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.settings import PREFECT_WORKER_PREFETCH_SECONDS, PREFECT_WORKER_QUERY_SECONDS
from prefect.states import Cancelled
from prefect.workers.process import ProcessWorker
from prefect.workers.server import build_healthcheck_server

from flows.ledger.home import HomeIdentity, home, home_identity
from flows.running.due import announce_schedule
from flows.running.flow_runs import WORK_POOL, prefect_client, update_entrypoints
from flows.running.refresh import refresh
from flows.servers.keyed import USER, read_key, read_named_key
from flows.servers.local import revive_supervisor
from flows.servers.records import server_heartbeat
from flows.service.approval_door import PROXY_KEY_VARIABLE, add_approvals
from flows.service.reaper import Reaper
from flows.service.reserve import keep_reserve
from flows.store.policy import policy_file
from flows.tracking.exposition import CONTENT_TYPE, metrics_text
from stages.core.errors import LifecycleError, ServerError
from stages.core.garbage import collect_rarely
from stages.core.lines import print_timed
from stages.core.process_tree import working_directories
from stages.core.supervised import SupervisedProcess

ASK_WHOLE_S = 30.0
"""Seconds between full queries for due runs; Prefect marks a work queue as not ready after a minute without one."""
TOLERATED_S = 60.0
POLL_INTERVAL_S = 1.0


class DueRuns:
    """Query for due flow runs that is cheaper than the Prefect worker's own, and replaces it.

    Whether there are any costs the server 5 ms, the whole query 17 ms; that one also records that the worker lives.
    """

    def __init__(self, worker: ProcessWorker):
        self._worker = worker
        self._ask = worker._get_scheduled_flow_runs
        self._asks_whole_at_s = 0.0

    async def get(self) -> list[WorkerFlowRunResponse]:
        """Return the due flow runs; of several that a schedule has missed, only the latest.

        Each of the others would be a process for some seconds, all at once, only to find out the same.
        """
        if time.monotonic() < self._asks_whole_at_s and not await self._is_anything_due():
            return []
        scheduled = await self._ask()
        self._asks_whole_at_s = time.monotonic() + ASK_WHOLE_S
        left_out = set()
        for *missed, latest in missed_runs([one.flow_run for one in scheduled], datetime.now(UTC)):
            await self._leave_out(missed, latest)
            left_out |= {run.id for run in missed}
        return [one for one in scheduled if one.flow_run.id not in left_out]

    async def _is_anything_due(self) -> bool:
        before = datetime.now(UTC) + timedelta(seconds=PREFECT_WORKER_PREFETCH_SECONDS.value())
        due = filters.FlowRunFilter(
            state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            expected_start_time=filters.FlowRunFilterExpectedStartTime(before_=before),
        )
        pool = filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[WORK_POOL]))
        return bool(await self._worker.client.count_flow_runs(flow_run_filter=due, work_pool_filter=pool))

    async def _leave_out(self, missed: list[FlowRun], latest: FlowRun) -> None:
        """Cancel flow runs that a schedule missed, and notify people once about all of them."""
        first, last, due = (f"{run.expected_start_time:%Y-%m-%d %H:%M}" for run in (missed[0], missed[-1], latest))
        span = f"{len(missed)} runs, due from {first} to {last} UTC," if missed[1:] else f"one run, due at {last} UTC,"
        message = f"{span} did not begin in time; the latest does, due at {due} UTC"
        await asyncio.to_thread(_announce, missed[-1])
        for run in missed:
            name = "Superseded" if run is missed[-1] else "Missed"
            await self._worker.client.set_flow_run_state(run.id, Cancelled(name=name, message=message), force=True)


def missed_runs(runs: Iterable[FlowRun], now: datetime) -> list[list[FlowRun]]:
    """Return the due runs of each schedule that has several, the latest run last. Pure."""
    due: dict[UUID | None, list[FlowRun]] = {}
    for run in runs:
        # A run that has begun before is a retry, and never left out.
        if run.auto_scheduled and not run.run_count and run.expected_start_time <= now:
            due.setdefault(run.deployment_id, []).append(run)
    return [sorted(one, key=lambda run: run.expected_start_time) for one in due.values() if one[1:]]


def _announce(flow_run: FlowRun) -> None:
    with get_client(sync_client=True) as client:
        announce_schedule(client, flow_run)


class Clock:
    """Detector of a machine clock that was set back, which plans scheduled runs while Prefect's server does not.

    The server plans nothing until the old time comes again, because its loops are due at clock times. Planned runs
    begin at their new time; late ones are not reported as late.
    """

    def __init__(self, plan: Callable[[], object], wall_s: Callable[[], float] = time.time):
        self._plan = plan
        self._wall_s = wall_s
        self._offset_s = self._read_offset_s()
        self._behind_until_s = 0.0

    def look(self) -> None:
        """Plan scheduled runs for Prefect while the machine's clock is behind an earlier time; print that once."""
        # Wall clock minus monotonic clock: it changes only when the wall clock is set.
        offset_s = self._read_offset_s()
        behind_s = self._offset_s - offset_s
        self._offset_s = offset_s
        if behind_s > TOLERATED_S:
            self._behind_until_s = time.monotonic() + behind_s
            print_timed(
                f"the clock was set back by {behind_s / 60:.0f} min: for so long Prefect's server plans no runs and "
                "reports none as late; the worker plans them; `lifecycle down`, then `up` ends this"
            )
        if time.monotonic() < self._behind_until_s:
            self._plan()

    def _read_offset_s(self) -> float:
        return self._wall_s() - time.monotonic()


def plan_schedules() -> None:
    """Make Prefect plan the next runs of all schedules now. Raises `ServerError` when Prefect does not answer."""
    with prefect_client() as client:
        for found in client.read_deployments(
            flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=[refresh.name]))
        ):
            if found.schedules and not found.paused:
                client.request("POST", "/deployments/{id}/schedule", path_params={"id": found.id}, json={})


@dataclass(frozen=True)
class BackgroundTask:
    """Task that the worker repeats in the background. name: completes the error message "could not …"."""

    name: str
    interval_s: float
    perform: Callable[[], object]


def background_tasks() -> list[BackgroundTask]:
    """Return the background tasks that the worker performs at its start and then at intervals."""
    return [
        BackgroundTask("look whether the home was moved", 5.0, functools.partial(end_if_moved, home_identity())),
        BackgroundTask("report dead refreshes", 5.0, Reaper().reap),  # so that a death is known within 10 s
        BackgroundTask("start the supervisor", 5.0, revive_supervisor),
        BackgroundTask("keep the reserve of disk space", 0.5, keep_reserve),  # a refresh that fails ends within seconds
        BackgroundTask("apply the retention policy", 86_400.0, apply_retention),
        BackgroundTask("plan runs after the clock was set back", 60.0, Clock(plan_schedules).look),
    ]


async def work(public: socket.socket | None) -> None:
    """Run the worker: start due refreshes until cancelled, and answer health checks on the socket `public`."""
    worker = ProcessWorker(name=f"lifecycle-{os.uname().nodename}", work_pool_name=WORK_POOL)
    # Prefect has no public place for another query.
    worker._get_scheduled_flow_runs = DueRuns(worker).get
    answering = build_healthcheck_server(worker, PREFECT_WORKER_QUERY_SECONDS.value())
    add_metrics(answering.config.app, read_key() or read_named_key())
    add_approvals(answering.config.app, read_named_key(PROXY_KEY_VARIABLE))
    threading.Thread(target=answering.run, args=([public] if public else None,), daemon=True).start()
    await worker.start(with_healthcheck=False)


def add_metrics(application: Any, password: str | None) -> None:
    """Add `/metrics` to the ASGI application that answers health checks; without a password no one may read it."""
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse

    expected = base64.b64encode(f"{USER}:{password}".encode()).decode()

    # Not a coroutine: it reads files, and runs in a thread of its own, so that health checks are answered meanwhile.
    def answer(request: Request) -> PlainTextResponse:
        given = request.headers.get("authorization", "")
        if not password or not hmac.compare_digest(given.encode(), f"Basic {expected}".encode()):
            refused = {"www-authenticate": 'Basic realm="llm-lifecycle"'}
            return PlainTextResponse("the metrics ask for the servers' key\n", 401, headers=refused)
        try:
            return PlainTextResponse(metrics_text(), media_type=CONTENT_TYPE)
        except LifecycleError as error:  # such as of damaged totals
            return PlainTextResponse(f"{error}\n", 500)

    application.add_route("/metrics", answer)


def repeat(duty: BackgroundTask) -> None:
    """Perform a background task of the worker forever; a failure is printed, and the task is tried again next time."""
    while True:
        try:
            duty.perform()
        except Exception as error:
            print_timed(f"could not {duty.name}: {type(error).__name__}: {error}")
        time.sleep(duty.interval_s)


def end_if_moved(here: HomeIdentity) -> None:
    """End the worker when its lifecycle home has been moved or removed."""
    if not here.is_here():
        print_timed(f"{home()} was moved: the worker ends; `lifecycle up` starts it in the new place")
        os._exit(1)  # without cleanup, which would stop running refreshes; those keep their open files


def remove_left_folders(folder: Path) -> None:
    """Remove the working directories that a killed worker left, except those of refreshes that outlive it."""
    in_use = {folder for directory in working_directories() for folder in (directory, *directory.parents)}
    for left in folder.resolve().glob("tmp*prefect"):  # Prefect's worker names its folders so
        if left not in in_use:
            shutil.rmtree(left, ignore_errors=True)


def apply_retention() -> None:
    """Remove the refreshes and artifacts that the retention policy, if any, does not keep.

    Runs in a process of its own, so that the memory of its imports is freed. Its output is in the worker's log.
    """
    if not policy_file().exists():
        return
    print_timed(f"applying {policy_file()}")
    command = [sys.executable, "-c", "from flows.cli.main import main; main()", "gc", "--policy"]
    program = SupervisedProcess(command, environment=os.environ, output=sys.stdout.buffer)
    try:
        while program.poll() is None:
            time.sleep(POLL_INTERVAL_S)
    finally:
        program.stop()


def main() -> None:
    """Run the worker for scheduled refreshes until SIGTERM or SIGINT."""
    collect_rarely()
    # SIGTERM ends the worker as Ctrl-C does, by KeyboardInterrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    public = socket.socket(fileno=int(sys.argv[1])) if sys.argv[1:] else None
    # Prefect leaves empty folders for fetched code, and a killed worker its working directories: keep them here.
    (home() / "worker").mkdir(mode=0o700, parents=True, exist_ok=True)
    tempfile.tempdir = str(home() / "worker")
    if public:  # without it, workers in other containers may share the folder
        remove_left_folders(home() / "worker")
    try:
        update_entrypoints()
    except ServerError as error:
        print_timed(f"could not look at the deployments: {error}")
    for duty in background_tasks():  # each in a thread of its own: a slow one keeps no other waiting
        threading.Thread(target=repeat, args=(duty,), daemon=True).start()
    server_heartbeat().start()
    try:
        asyncio.run(work(public))
    except KeyboardInterrupt:
        print_timed("stopped")
    finally:
        shutil.rmtree(home() / "worker" / "runner_storage", ignore_errors=True)


if __name__ == "__main__":
    main()
