"""The worker: runs refreshes that Prefect says are due, and reports those whose process died to Prefect.

    python -m flows.service.worker [DESCRIPTOR]

`lifecycle up` starts it with a socket that listens already, on which it says whether it is healthy; without one it
listens where Prefect's settings say. It ends with SIGTERM. A refresh runs in a process of its own, which outlives a
killed worker.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.settings import PREFECT_WORKER_PREFETCH_SECONDS, PREFECT_WORKER_QUERY_SECONDS
from prefect.workers.process import ProcessWorker
from prefect.workers.server import build_healthcheck_server

from flows.ledger.home import HomeIdentity, home, home_identity
from flows.running.flow_runs import WORK_POOL, update_entrypoints
from flows.servers.local import revive_supervisor
from flows.servers.records import server_heartbeat
from flows.service.clock import Clock, plan_schedules
from flows.service.left_folders import remove_left_folders
from flows.service.reaper import Reaper
from flows.service.retention import apply_retention
from stages.core.errors import ServerError
from stages.core.garbage import collect_rarely


@dataclass(frozen=True)
class Duty:
    """Something done again and again beside the worker's own work. `name` completes "could not …"."""

    name: str
    interval_s: float
    perform: Callable[[], object]


def duties() -> list[Duty]:
    """Return what the worker does at its start and then every so often."""
    return [
        Duty("look whether the home was moved", 5.0, functools.partial(end_if_moved, home_identity())),
        Duty("report dead refreshes", 5.0, Reaper().reap),  # a death is to be known within 10 s
        Duty("start the supervisor", 5.0, revive_supervisor),
        Duty("apply the retention policy", 86_400.0, apply_retention),
        Duty("plan runs after the clock was set back", 60.0, Clock(plan_schedules).look),
    ]


class Worker(ProcessWorker):
    """Prefect's worker, but it first asks whether anything is due. The server needs 5 ms for that, and 17 ms for the
    whole question, by which it also notes that the worker lives.
    """

    ASK_WHOLE_S = 30.0
    """Prefect calls a queue not ready of which no worker has asked for a minute."""
    _asks_whole_at_s = 0.0

    async def get_and_submit_flow_runs(self) -> list[FlowRun]:
        """Start what is due."""
        if time.monotonic() < self._asks_whole_at_s and not await self._is_anything_due():
            self._last_polled_time = datetime.now(UTC)
            return []
        self._asks_whole_at_s = time.monotonic() + self.ASK_WHOLE_S
        return await super().get_and_submit_flow_runs()

    async def _is_anything_due(self) -> bool:
        before = datetime.now(UTC) + timedelta(seconds=PREFECT_WORKER_PREFETCH_SECONDS.value())
        due = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            expected_start_time=FlowRunFilterExpectedStartTime(before_=before),
        )
        pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[WORK_POOL]))
        return bool(await self.client.count_flow_runs(flow_run_filter=due, work_pool_filter=pool))


async def work(public: socket.socket | None) -> None:
    """Poll until cancelled; say on `public` whether it does."""
    worker = Worker(name=f"lifecycle-{os.uname().nodename}", work_pool_name=WORK_POOL)
    if public:
        health = build_healthcheck_server(worker, PREFECT_WORKER_QUERY_SECONDS.value())
        threading.Thread(target=health.run, args=([public],), daemon=True).start()
    await worker.start(with_healthcheck=public is None)


def repeat(duty: Duty) -> None:
    """Perform a duty for ever. A failure is printed; what failed, since a server is away, is tried again next time."""
    while True:
        try:
            duty.perform()
        except Exception as error:
            print(f"could not {duty.name}: {type(error).__name__}: {error}", flush=True)
        time.sleep(duty.interval_s)


def end_if_moved(here: HomeIdentity) -> None:
    """End the worker when its home is no longer where it was."""
    if not here.is_here():
        print(f"{home()} was moved: the worker ends; `lifecycle up` starts it in the new place", flush=True)
        os._exit(1)  # refreshes that run find what they have open, and would be stopped otherwise


def main() -> None:
    """Run the worker until SIGTERM or SIGINT."""
    collect_rarely()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    public = socket.socket(fileno=int(sys.argv[1])) if sys.argv[1:] else None
    # Prefect's folders for fetched code stay behind, empty; a killed worker's working directories, too.
    tempfile.tempdir = str(home() / "worker")
    if public:  # else workers in other containers may share the folder
        remove_left_folders(home() / "worker")
    try:
        update_entrypoints()
    except ServerError as error:
        print(f"could not look at the deployments: {error}", flush=True)
    for duty in duties():  # each in a thread of its own: a slow one keeps no other waiting
        threading.Thread(target=repeat, args=(duty,), daemon=True).start()
    server_heartbeat().start()
    try:
        asyncio.run(work(public))
    except KeyboardInterrupt:
        print("stopped", flush=True)
    finally:
        shutil.rmtree(home() / "worker" / "runner_storage", ignore_errors=True)


if __name__ == "__main__":
    main()
