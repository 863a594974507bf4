"""Refreshes whose process died without a word: close their records, and tell Prefect, which cannot know.

A process is known by number and start time, so that this needs no heartbeat, and no patience with a busy machine.
"""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from flows.history import RefreshRecord, RunningRefreshes, close_interrupted


class Reaper:
    """To be asked again and again."""

    def __init__(self) -> None:
        self._running = RunningRefreshes()

    def reap(self) -> list[str]:
        """Mark what died as failed here and as crashed in Prefect; returns the refreshes. Raises when Prefect is away.

        Prefect is told first: a refresh is closed here only once that was done.
        """
        dead = [record for record in self._running.all() if record.interrupted]
        if not dead:
            return []
        with get_client(sync_client=True) as client:
            for record in dead:
                _tell_prefect(client, record)
        return close_interrupted()


def _tell_prefect(client: SyncPrefectClient, record: RefreshRecord) -> None:
    """Leave the flow run alone when it has begun another try, or Prefect knows already."""
    if record.prefect_flow_run_id is None:
        return
    with suppress(ObjectNotFound):
        flow_run = client.read_flow_run(UUID(record.prefect_flow_run_id))
        unknown = flow_run.state is not None and not flow_run.state.is_final() and not flow_run.state.is_scheduled()
        if unknown and flow_run.run_count == record.prefect_run_count:
            message = (
                f"the process of {record.refresh} was killed; retry it here, or `lifecycle retry {record.refresh}`"
            )
            client.set_flow_run_state(flow_run.id, Crashed(message=message), force=True)
