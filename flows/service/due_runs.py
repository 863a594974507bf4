"""Query of the worker for due runs: in two steps, and of missed runs only the latest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import WorkerFlowRunResponse
from prefect.settings import PREFECT_WORKER_PREFETCH_SECONDS
from prefect.states import Cancelled
from prefect.workers.process import ProcessWorker

from flows.running.due import announce_schedule
from flows.running.flow_runs import WORK_POOL

ASK_WHOLE_S = 30.0
"""Seconds between whole queries; Prefect marks a queue as not ready after a minute without one."""


class DueRuns:
    """Replacement of a worker's own query for due runs.

    It first asks whether there are any: the server needs 5 ms for that, and 17 ms for the whole query, by which it also
    records that the worker lives.
    """

    def __init__(self, worker: ProcessWorker):
        self._worker = worker
        self._ask = worker._get_scheduled_flow_runs
        self._asks_whole_at_s = 0.0

    async def get(self) -> list[WorkerFlowRunResponse]:
        """Return the due runs; of the runs that a schedule has missed only the latest.

        Each of the others would be a process for some seconds, all at once, only to find out the same.
        """
        if time.monotonic() < self._asks_whole_at_s and not await self._is_anything_due():
            return []
        found = await self._ask()
        self._asks_whole_at_s = time.monotonic() + ASK_WHOLE_S
        left_out = set()
        for *missed, latest in missed_runs([one.flow_run for one in found], datetime.now(UTC)):
            await self._leave_out(missed, latest)
            left_out |= {run.id for run in missed}
        return [one for one in found if one.flow_run.id not in left_out]

    async def _is_anything_due(self) -> bool:
        before = datetime.now(UTC) + timedelta(seconds=PREFECT_WORKER_PREFETCH_SECONDS.value())
        due = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            expected_start_time=FlowRunFilterExpectedStartTime(before_=before),
        )
        pool = WorkPoolFilter(name=WorkPoolFilterName(any_=[WORK_POOL]))
        return bool(await self._worker.client.count_flow_runs(flow_run_filter=due, work_pool_filter=pool))

    async def _leave_out(self, missed: list[FlowRun], latest: FlowRun) -> None:
        """Cancel missed runs. People are notified of one of them, whose message covers all."""
        first, last, due = (f"{run.expected_start_time:%Y-%m-%d %H:%M}" for run in (missed[0], missed[-1], latest))
        span = f"{len(missed)} runs, due from {first} to {last} UTC," if missed[1:] else f"one run, due at {last} UTC,"
        message = f"{span} did not begin in time; the latest does, due at {due} UTC"
        await asyncio.to_thread(_announce, missed[-1])
        for run in missed:
            name = "Superseded" if run is missed[-1] else "Missed"
            await self._worker.client.set_flow_run_state(run.id, Cancelled(name=name, message=message), force=True)


def missed_runs(runs: Iterable[FlowRun], now: datetime) -> list[list[FlowRun]]:
    """Return, for each schedule that has several due runs, those runs, the latest last. Pure."""
    due: dict[UUID | None, list[FlowRun]] = {}
    for run in runs:
        if run.auto_scheduled and not run.run_count and run.expected_start_time <= now:
            due.setdefault(run.deployment_id, []).append(run)
    return [sorted(one, key=lambda run: run.expected_start_time) for one in due.values() if one[1:]]


def _announce(flow_run: FlowRun) -> None:
    with get_client(sync_client=True) as client:
        announce_schedule(client, flow_run)
