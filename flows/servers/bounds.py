"""Bounds on the connections to our servers: their number, and how long each may make the server wait.

uvicorn closes a connection that had an answer and sends nothing more. It would hold a connection forever that never
sends a request, or sends it byte by byte; with some hundreds of those, no one else would get an answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 512
"""Most connections: half of the files that a process may usually open."""
HEAD_TIMEOUT_S = 15.0
"""Seconds from the connection, or the last answer, to the end of a request's header."""
BODY_TIMEOUT_S = 300.0
LOOK_EVERY_S = 1.0


class BoundedProtocol(H11Protocol):
    """Server side of a connection, closed when the client takes too long. Answers may take any time."""

    _awaited: tuple[str, Any] | None = None
    _since_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and start watching it."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self._look()

    def _look(self) -> None:
        # A web socket has a protocol object of its own.
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        now_s = self.loop.time()
        if (awaited := self._find_awaited()) != self._awaited:
            self._awaited, self._since_s = awaited, now_s
        limit_s = {"head": HEAD_TIMEOUT_S, "body": BODY_TIMEOUT_S}.get(awaited[0]) if awaited else None
        if limit_s is not None and now_s - self._since_s >= limit_s:
            self.transport.abort()
        else:
            self.loop.call_later(LOOK_EVERY_S, self._look)

    def _find_awaited(self) -> tuple[str, Any] | None:
        """Return the part that the client has yet to send, and of which request; None if it waits."""
        if self.cycle is None or self.cycle.response_complete:
            return "head", self.cycle
        return ("body", self.cycle) if self.cycle.more_body else None
