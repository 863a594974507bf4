"""Ports of local servers: nobody else gets one between its choice and the first answer of the server."""

from __future__ import annotations

import socket
from contextlib import suppress

from flows.servers.programs import LOOPBACK
from stages.core.errors import ServerError

MAX_WAITING_CONNECTIONS = 2048


def listener(*preferred: int | None) -> socket.socket:
    """A socket that listens on the first of the preferred ports that is free, else on one that the kernel picks.

    For the server to inherit: it takes seconds before it answers, and who listened there meanwhile, another user of the
    machine or another `lifecycle up`, would be taken for it and be sent the key. A port that is bound only is not ours
    yet: with SO_REUSEADDR others bind it too, and it goes to the first that listens.
    """
    for port in (*filter(None, preferred), 0):
        with suppress(OSError):
            return socket.create_server((LOOPBACK, port), backlog=MAX_WAITING_CONNECTIONS)
    raise ServerError(f"looking for a free port on {LOOPBACK}: there is none; close programs that listen")
