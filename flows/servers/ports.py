"""Ports of local servers, held from their choice to the server's first answer."""

from __future__ import annotations

import socket
from contextlib import suppress

from flows.servers.programs import LOOPBACK
from stages.core.errors import ServerError

MAX_WAITING_CONNECTIONS = 2048


def listener(*preferred: int | None) -> socket.socket:
    """Return a socket that listens on the first preferred port that is free, else on one that the kernel picks.

    The server inherits it. A server takes seconds before it answers; another program that listened there meanwhile, of
    another user or of another `lifecycle up`, would be taken for it and receive the key. Binding alone is not enough:
    with SO_REUSEADDR others bind the port too, and the first that listens gets it.
    """
    for port in (*filter(None, preferred), 0):
        with suppress(OSError):
            return socket.create_server((LOOPBACK, port), backlog=MAX_WAITING_CONNECTIONS)
    raise ServerError(f"looking for a free port on {LOOPBACK}: there is none; close programs that listen")
