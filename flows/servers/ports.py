"""Ports of local servers: nobody else gets one between its choice and the moment the server listens."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

from flows.servers.programs import LOOPBACK
from stages.core.errors import ServerError


def free_port(reservations: ExitStack, *preferred: int | None) -> int:
    """The first of the preferred ports that is free, else one that the kernel picks.

    Until the reservations are closed, no other `lifecycle up` of this machine gets it: a server takes seconds before it
    listens, and the other's health check would take it for its own. The name of a socket goes with its process.
    """
    for port in (*(port for port in preferred if port), 0):
        with suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            number = int(probe.getsockname()[1])
            reservations.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0lifecycle-port-{number}")
            return number
    raise ServerError(f"looking for a free port on {LOOPBACK}: there is none; close programs that listen")
