"""Reaper of refreshes that died, or whose end Prefect missed: it records their end in event logs and in Prefect.

A process is identified by number and start time, so this needs no heartbeat and no patience with a busy machine.
"""

import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.filters import EventFilter, EventIDFilter
from prefect.settings import PREFECT_API_URL
from prefect.states import Crashed, Scheduled

from flows.ledger.home import home
from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import RunningRefreshes, close_interrupted, ledger_of
from flows.running.due import announce_schedule, announce_states
from flows.running.flow_runs import WORK_POOL
from flows.running.refresh import COMPARE, announce, final_state, refresh
from flows.servers.programs import PREFECT
from flows.servers.records import address_of
from stages.core.errors import StoreError
from stages.core.process_tree import marked_processes

ASK_INTERVAL_S = 60.0
"""Seconds between queries to Prefect, 10 ms of its CPU time each, while no refresh ends on this machine."""
START_TIMEOUT_S = 60.0
"""Seconds that a worker may take to start the process of a flow run that it has claimed."""
NEVER_STARTED = "its process ended twice before the refresh began and could not say why; the worker's log may"
DUE_AGAIN = "its process ended, or never started, before the refresh began; it is due again"
ENDED_WITHIN = timedelta(minutes=10)
"""Time after a refresh's end to send a notification that a killed Prefect lost; its restart takes seconds."""
STORED_WITHIN_S = 10.0
"""Seconds within which Prefect's server stores an event, unless the disk is full; twice the server's own interval."""
FULL_BELOW_BYTES = 16 << 20
"""Free bytes below which a disk counts as full, since SQLite cannot extend a database then."""
FLOW_RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
"""Environment variable with the flow run's id in every process that a Prefect worker has started."""


class Reaper:
    """Periodic task that records the end of refreshes whose process died; it queries Prefect only when necessary."""

    def __init__(self) -> None:
        self._running = RunningRefreshes()
        self._seen: set[str] = set()
        self._asks_at_s = 0.0
        self._began = datetime.now(UTC)
        self._announced: set[UUID] = set()
        self._missing_since_s: dict[UUID, float] = {}
        self._unstored_since_s: dict[UUID, float] = {}
        self._announced_ends: set[UUID] = set()

    def reap(self) -> list[str]:
        """Set dead or ended refreshes' final state in Prefect; record dead ones as failed and return their ids.

        Raises when Prefect is away. Prefect is updated first: a refresh is closed here only once that was done.
        """
        records = list(self._running.all())
        died = [record for record in records if record.interrupted]
        running = {record.refresh for record in records}
        # One that was running at the last look is not among the running ones now.
        ended = not running >= self._seen
        # Replaced only after Prefect has answered: no end is forgotten while it is away.
        self._seen |= running
        if not died and not ended and time.monotonic() < self._asks_at_s:
            return []
        with get_client(sync_client=True) as client:
            for flow_run in _running_flow_runs(client):
                _set_end(client, flow_run)
            for flow_run in self._never_started(client):
                was_tried_again = any(state.message == DUE_AGAIN for state in client.read_flow_run_states(flow_run))
                state = Crashed(message=NEVER_STARTED) if was_tried_again else Scheduled(message=DUE_AGAIN)
                client.set_flow_run_state(flow_run, state, force=True)
            for flow_run in self._never_begun(client):
                announce_schedule(client, flow_run)
                self._announced.add(flow_run.id)
            for flow_run in self._ended_without_event(client):
                announce_states(client, flow_run, client.read_flow_run_states(flow_run.id))
                self._announced_ends.add(flow_run.state_id)
        self._seen = running
        # At the next look already, while the event of an end is missing.
        self._asks_at_s = time.monotonic() + (0.0 if self._unstored_since_s else ASK_INTERVAL_S)
        return close_interrupted() if died else []

    def _never_started(self, client: SyncPrefectClient) -> list[UUID]:
        """Return flow runs that a worker claimed a while ago, but that have neither a process nor an event log.

        The worker may have been killed before it started one. It reports a process's early death to Prefect once, as
        the process does its own failure; a full disk may keep both from being recorded.
        """
        states = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PENDING, StateType.RUNNING]))
        found = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[refresh.name])),
            flow_run_filter=FlowRunFilter(state=states),
        )
        # On a server of several homes, a run may have its ledger and its process elsewhere.
        is_own_server = PREFECT_API_URL.value() == f"{address_of(PREFECT.name)}/api"
        taken = [
            run
            for run in found
            if run.work_pool_name == WORK_POOL
            and (run.state_type == StateType.PENDING or (is_own_server and not _has_ledger(run)))
        ]
        missing = {run.id for run in taken if not marked_processes(f"{FLOW_RUN_VARIABLE}={run.id}")}
        now_s = time.monotonic()
        self._missing_since_s = {run: self._missing_since_s.get(run, now_s) for run in missing}
        return [run for run, since_s in self._missing_since_s.items() if now_s - since_s >= START_TIMEOUT_S]

    def _never_begun(self, client: SyncPrefectClient) -> Iterator[FlowRun]:
        """Yield crashed flow runs whose process died before the refresh began, so that people are notified of them."""
        crashed = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
            end_time=FlowRunFilterEndTime(after_=self._began),
        )
        found = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[refresh.name])), flow_run_filter=crashed
        )
        return (one for one in found if not one.run_count and one.id not in self._announced)

    def _ended_without_event(self, client: SyncPrefectClient) -> list[FlowRun]:
        """Return flow runs that ended lately without a notification, because Prefect lost the event of their end.

        Prefect's server hands on a state's event in memory as it commits the state, and stores it within 5 s, unless
        the disk is full or it is killed in between. An end is returned after `STORED_WITHIN_S`, and announced once: if
        the event had been handled, that is one notification too many.
        """
        ended = client.read_flow_runs(
            flow_filter=FlowFilter(name=FlowFilterName(any_=[refresh.name])),
            flow_run_filter=FlowRunFilter(end_time=FlowRunFilterEndTime(after_=datetime.now(UTC) - ENDED_WITHIN)),
        )
        last = {run.state_id: run for run in ended if run.state_id and run.state_id not in self._announced_ends}
        # On a full disk, events wait in the server's memory and are not lost.
        if last and shutil.disk_usage(home()).free >= FULL_BELOW_BYTES:
            stored = client.read_events(EventFilter(id=EventIDFilter(id=list(last))), limit=len(last))
            unstored = last.keys() - {event.id for event in stored.events}
        else:
            unstored = set()
        now_s = time.monotonic()
        self._unstored_since_s = {state: self._unstored_since_s.get(state, now_s) for state in unstored}
        return [last[state] for state, since_s in self._unstored_since_s.items() if now_s - since_s >= STORED_WITHIN_S]


def _running_flow_runs(client: SyncPrefectClient) -> Iterator[FlowRun]:
    """Yield the refreshes of this lifecycle home that Prefect shows as running."""
    running = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING]))
    found = client.read_flow_runs(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[refresh.name, COMPARE])),
        flow_run_filter=FlowRunFilter(state=running),
    )
    return (flow_run for flow_run in found if ledger_of(flow_run.name).exists())


def _has_ledger(flow_run: FlowRun) -> bool:
    try:
        ledger_of(flow_run.name).read()
    except StoreError:
        return False
    return True


def _set_end(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """Record in Prefect how a refresh ended, unless the refresh's process lives or the refresh has been retried."""
    try:
        record = ledger_of(flow_run.name).read()
    except StoreError:  # `RunningRefreshes` has named it
        return
    if record.is_copied:  # the first start of the copy's servers has set its end in Prefect
        return
    if record.standing == "dead" and record.prefect_run_count in (None, flow_run.run_count):
        # A server that was started again has forgotten them.
        announce_states(client, flow_run, client.read_flow_run_states(flow_run.id))
        end = announce(str(flow_run.id), _end_of(record))
        client.set_flow_run_state(flow_run.id, end, force=True)


def _end_of(record: RefreshRecord) -> State[Any]:
    if record.killed and record.comparison:
        return Crashed(message=f"the process of {record.refresh} was killed; compare again")
    if record.killed:
        return Crashed(
            message=f"the process of {record.refresh} was killed; retry it here, or `lifecycle retry {record.refresh}`"
        )
    return final_state(record)
