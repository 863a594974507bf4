"""Queue of the proxy for requests that wait while no engine runs, such as during an engine's restart.

Time, and the size of all bodies together, are bounded. A request of whose answer nothing was sent is sent to the next
engine; not endlessly, since it may be what the engines die of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web

from stages.serving.http_messages import error

MAX_WAIT_S = 120.0
MAX_WAITING_BYTES = 256 * 2**20
MAX_ENGINES = 3
"""Number of engines that may die while handling the same request before the request is refused."""
RETRY_AFTER_S = 10
LOOK_INTERVAL_S = 1.0
PAUSE_S = 0.1


class EngineGoneError(Exception):
    """Error for an engine that ended before its answer began. was_sent: whether it may have got the request."""

    def __init__(self, message: str, *, was_sent: bool = True):
        super().__init__(message)
        self.was_sent = was_sent


class RequestQueue:
    """Requests of one event loop that wait for an engine: total size of their bodies, and the event that wakes them."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def visit(self, num_bytes: int) -> WaitingRequest:
        """Create the state of a request, with a body of `num_bytes`, that may have to wait until an engine runs."""
        self._loop = asyncio.get_running_loop()
        return WaitingRequest(self, num_bytes)

    def wake(self) -> None:
        """Make all requests that wait for an engine look for a new one. May be called from any thread."""
        if self._loop:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # Those that wait hold this event; later ones wait for the next change.
        self.changed.set()
        self.changed = asyncio.Event()


class WaitingRequest:
    """State of one request that may wait for a running engine; all its waits share one time limit."""

    def __init__(self, room: RequestQueue, num_bytes: int):
        self._room = room
        self._num_bytes = num_bytes
        self._left_s = MAX_WAIT_S
        self._num_engines = 0

    async def wait(
        self, gone: EngineGoneError, is_replaced: Callable[[], bool], is_healthy: Callable[[], Awaitable[bool]]
    ) -> web.Response | None:
        """Wait until the request can be sent to an engine again; return an error response if that takes too long.

        gone: why the asked engine did not answer. is_replaced: whether there is another by now. is_healthy: whether it
        answers.
        """
        self._num_engines += gone.was_sent  # an engine that never got the request did not die of it
        if self._num_engines >= MAX_ENGINES:
            return error(502, f"{self._num_engines} engines ended while they had this request: {gone}")
        if self._room.num_bytes + self._num_bytes > MAX_WAITING_BYTES:
            return not_served("too much waits for the model server, which is started again")
        self._room.num_bytes += self._num_bytes
        give_up_s, was_away = time.monotonic() + self._left_s, not gone.was_sent
        try:
            while (left_s := give_up_s - time.monotonic()) > 0:
                # Taken before the checks, so that a change between them and the wait below is seen.
                changed = self._room.changed
                if is_replaced():
                    return None
                if await is_healthy():
                    # It has the request, failed at it, and is well: another try would fail as well.
                    if not was_away:
                        return error(502, f"the model server does not answer: {gone}")
                    await asyncio.sleep(PAUSE_S)
                    return None
                was_away = True
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, LOOK_INTERVAL_S)):
                        await changed.wait()
            return not_served(f"the model server has not answered for {MAX_WAIT_S:g} s")
        finally:
            self._room.num_bytes -= self._num_bytes
            self._left_s = max(0.0, give_up_s - time.monotonic())


def not_served(why: str) -> web.Response:
    """Return an error response (503): no engine runs at the moment, so the client should try again later."""
    return error(503, why, {"Retry-After": str(RETRY_AFTER_S)})
