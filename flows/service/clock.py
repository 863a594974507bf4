"""Detector of a machine clock that was set back.

Prefect's server then plans nothing until the old time comes again, because its loops are due at clock times. Planned
runs begin at their new time; late ones are not reported as late.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from prefect.client.schemas.filters import FlowFilter, FlowFilterName

from flows.running.flow_runs import prefect_client
from flows.running.refresh import refresh

TOLERATED_S = 60.0


class Clock:
    """Comparison of the wall clock with the monotonic one; plans schedules while Prefect's server does not."""

    def __init__(self, plan: Callable[[], object], wall_s: Callable[[], float] = time.time):
        self._plan = plan
        self._wall_s = wall_s
        self._offset_s = self._read_offset_s()
        self._behind_until_s = 0.0

    def look(self) -> None:
        """Print once that the clock was set back, and plan runs for as long as Prefect's server does not."""
        offset_s = self._read_offset_s()
        behind_s = self._offset_s - offset_s
        self._offset_s = offset_s
        if behind_s > TOLERATED_S:
            self._behind_until_s = time.monotonic() + behind_s
            print(
                f"the clock was set back by {behind_s / 60:.0f} min: for so long Prefect's server plans no runs and "
                "reports none as late; the worker plans them; `lifecycle down`, then `up` ends this",
                flush=True,
            )
        if time.monotonic() < self._behind_until_s:
            self._plan()

    def _read_offset_s(self) -> float:
        return self._wall_s() - time.monotonic()


def plan_schedules() -> None:
    """Make Prefect plan the next runs of all schedules now. Raises `ServerError` when it does not answer."""
    with prefect_client() as client:
        for found in client.read_deployments(flow_filter=FlowFilter(name=FlowFilterName(any_=[refresh.name]))):
            if found.schedules and not found.paused:
                client.request("POST", "/deployments/{id}/schedule", path_params={"id": found.id}, json={})
