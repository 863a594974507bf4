"""Patch of Prefect's server so that it looks less often for work of its own; no setting exists for it.

Its loops (`SERVICES` in `programs.py`) are run by Docket, in memory. Docket looks for due work four times a second and,
through another thread, ten times a second for messages between its workers, of which there is only one.
"""

from __future__ import annotations

import asyncio
import functools
from datetime import timedelta
from typing import Any

RESOLUTION = timedelta(seconds=1)
SWEEP = timedelta(seconds=30)
"""Interval of looking for automations that another server changed, and for events that wait for others in vain."""


def look_rarely() -> None:
    """Patch Prefect in this process, before the server's application is made."""
    from burner_redis.pubsub import PubSub
    from prefect.server.api import background_workers
    from prefect.server.events import triggers

    rarely = dict.fromkeys(("minimum_check_interval", "scheduling_resolution"), RESOLUTION)
    background_workers.Worker = functools.partial(background_workers.Worker, **rarely)
    PubSub._queue_get = _next_message
    triggers.consumer = functools.partial(triggers.consumer, periodic_granularity=SWEEP)


async def _next_message(self: Any, timeout_s: float | None) -> Any:
    """Return the next message or None, at once if `timeout_s` is 0, else after a wait."""
    if self._queue.empty() and timeout_s != 0:
        await asyncio.sleep(RESOLUTION.total_seconds())
    return None if self._queue.empty() else self._queue.get_nowait()
