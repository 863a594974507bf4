"""Supervision of `lifecycle serve --follow`: a parent process restarts the serving process whenever it dies.

The supervisor holds the listening socket: when the serving process dies, its engines end with it, and clients wait in
the socket's queue until the next one answers.
"""

import os
import secrets
import sys
from collections.abc import Sequence
from typing import NoReturn

from flows.champion import champions
from flows.servers.supervised_commands import DESCRIPTOR, SupervisedCommand
from flows.servers.supervisor import keep
from stages.core.process_tree import TOKEN_VARIABLE
from stages.serving.config import ServeExecution
from stages.serving.proxy import API_KEY_VARIABLE
from stages.serving.server import listening_socket, reachable

PROGRAM = "from flows.cli.main import main; main()"
CHECKS_S = 300.0
"""Seconds that `serve --follow` may take beyond the engine's start limit, to query MLflow and check answers."""


def serve_supervised(name: str, alias: str, host: str, port: int | None, arguments: Sequence[str]) -> NoReturn:
    """Supervise `lifecycle serve --follow` in a child that inherits the listening socket.

    Raises StoreError when there is no champion, ResourceError for a taken port.
    """
    environment = {**os.environ, TOKEN_VARIABLE: secrets.token_hex(16)}
    champions.find(champions.connect(), name, alias)
    public = listening_socket(host, port)
    if API_KEY_VARIABLE not in environment:
        environment[API_KEY_VARIABLE] = secrets.token_urlsafe(32)
        print(f"API key: {environment[API_KEY_VARIABLE]}", flush=True)
    serving = SupervisedCommand(
        name=f"the server of {name}",
        command=[sys.executable, "-c", PROGRAM, *arguments, "--descriptor", DESCRIPTOR],
        environment=environment,
        host=reachable(host),
        port=public.getsockname()[1],
        health_path="/health",
        start_timeout_s=ServeExecution().ready_timeout_s + CHECKS_S,
    )
    keep(serving, public)
