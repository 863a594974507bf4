"""Program that runs the Prefect or MLflow server with access control and limits on slow connections.

python -m flows.servers.guarded prefect|mlflow --descriptor DESCRIPTOR
python -m flows.servers.guarded prefect|mlflow --listen ADDRESS:PORT --host NAME:PORT …

Their own commands do not let anything be put in front of their applications; `local.py` does what else those commands
do (ports, daemons, worker processes). DESCRIPTOR is a socket that listens already. The second form is for servers of a
team (`deploy/compose.yaml`).

Settings come from the environment (`programs.py`): the key as LIFECYCLE_SERVERS_KEY or, in a file, as
LIFECYCLE_SERVERS_KEY_FILE; a database's password in its URL or, in a file, as LIFECYCLE_DATABASE_PASSWORD_FILE.
"""

import argparse
import asyncio
import functools
import gc
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvicorn
from sqlalchemy.engine import make_url
from starlette.routing import Mount
from uvicorn.protocols.http.h11_impl import H11Protocol

from flows.servers.guard import AccessControl, origins
from flows.servers.keyed import KEY_FILE_VARIABLE, USER, read_named_key
from flows.servers.programs import (
    BACKLOG,
    DATABASE_PASSWORD_FILE,
    KEY_VARIABLE,
    LOOPBACK,
    MLFLOW_ARTIFACTS,
    MLFLOW_DATABASE,
    PREFECT_DATABASE,
)
from flows.servers.records import server_heartbeat
from stages.core.errors import LifecycleError, ServerError

MAX_CONNECTIONS = 512
"""Largest number of client connections, half of the files that a process may usually open."""
HEAD_TIMEOUT_S = 15.0
"""Seconds that a client may take, from connecting or its last response, to send a request's whole header."""
BODY_TIMEOUT_S = 300.0
LOOK_EVERY_S = 1.0
RESOLUTION = timedelta(seconds=1)
SWEEP = timedelta(seconds=30)
"""Interval of Prefect's searches for automations that another server changed, and events that wait for earlier ones."""


LONGEST_HELD = timedelta(minutes=1)
"""Longest time for which Prefect holds an event back until the one before has come; its own is 15 minutes."""


class BoundedProtocol(H11Protocol):
    """HTTP connection, as the server sees it, that is closed when the client sends a request too slowly.

    uvicorn closes only connections that had an answer. One that never sends a request, or sends it byte by byte, would
    stay forever; with some hundreds of those, no one else would get an answer.
    """

    _awaited: tuple[str, Any] | None = None
    _since_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Watch a new HTTP connection for slow requests, or abort the connection when too many are open."""
        # Adds this connection to `connections`, which the server shares among its protocols.
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
            # The time begins again with each head and each body.
            self._awaited, self._since_s = awaited, now_s
        limit_s = {"head": HEAD_TIMEOUT_S, "body": BODY_TIMEOUT_S}.get(awaited[0]) if awaited else None
        if limit_s is not None and now_s - self._since_s >= limit_s:
            self.transport.abort()
        else:
            self.loop.call_later(LOOK_EVERY_S, self._look)

    def _find_awaited(self) -> tuple[str, Any] | None:
        """Return what the client must send next, the head or body of which request; None while it awaits a response."""
        if self.cycle is None or self.cycle.response_complete:
            # The cycle tells the next request's head from the former one's.
            return "head", self.cycle
        return ("body", self.cycle) if self.cycle.more_body else None


def release_events_soon() -> None:
    """Patch Prefect's server in this process so that an event waits for a minute at most for the one before it.

    No setting exists for it. The event before may never come: the server forgets at a restart which have come, and a
    client whose server does not answer sends none. Notifications of how a refresh ended would be 15 minutes late.
    """
    from prefect.server.events.ordering import memory

    memory.PRECEDING_EVENT_LOOKBACK = LONGEST_HELD


def reduce_polling() -> None:
    """Patch Prefect's server in this process so that its background loops poll less often, which saves CPU time.

    No setting exists for it. Docket runs its loops (`SERVICES` in `programs.py`) in memory. It looks for due work four
    times a second and, in another thread, ten times a second for messages between its workers, of which there is one.
    """
    from burner_redis.pubsub import PubSub
    from prefect.server.api import background_workers
    from prefect.server.events import triggers

    rarely = dict.fromkeys(("minimum_check_interval", "scheduling_resolution"), RESOLUTION)
    background_workers.Worker = functools.partial(background_workers.Worker, **rarely)
    PubSub._queue_get = _next_message
    triggers.consumer = functools.partial(triggers.consumer, periodic_granularity=SWEEP)


async def _next_message(self: Any, timeout_s: float | None) -> Any:
    """Return Prefect's next task message (Docket), or None after a second's wait; no wait with a `timeout_s` of 0."""
    if self._queue.empty() and timeout_s != 0:
        await asyncio.sleep(RESOLUTION.total_seconds())
    return None if self._queue.empty() else self._queue.get_nowait()


def prefect(hosts: list[str], password: str) -> AccessControl:
    """Return Prefect's application behind access control; its API checks the key itself, its pages are public."""
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = f"{USER}:{password}"
    os.environ["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] = ",".join(origins(hosts))
    _complete(PREFECT_DATABASE)
    from prefect.server.api.server import create_app

    reduce_polling()
    release_events_soon()
    application = create_app(final=True)
    # Only mounts are kept (API and pages): the routes that describe the API ask for no key and take seconds to make.
    application.router.routes = [route for route in application.router.routes if isinstance(route, Mount)]
    return AccessControl(application, hosts)


def mlflow(hosts: list[str], password: str) -> AccessControl:
    """Return MLflow's server application behind access control, after creating or migrating its database."""
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    database, root = _complete(MLFLOW_DATABASE), "mlflow-artifacts:/"
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: database,
        constants.REGISTRY_STORE_URI_ENV_VAR: database,
        constants.ARTIFACT_ROOT_ENV_VAR: root,
        constants.ARTIFACTS_DESTINATION_ENV_VAR: os.environ[MLFLOW_ARTIFACTS],
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(hosts),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins(hosts)),
    }
    initialize_backend_stores(database, database, root)
    from mlflow.server import app as flask_app
    from mlflow.server.fastapi_app import app

    # Otherwise a request of a thousand nested lists is an error of the server, with a traceback in the log.
    flask_app.register_error_handler(RecursionError, lambda _: ("the JSON of this request is nested too deeply", 400))
    return AccessControl(app, hosts, password)


def _complete(variable: str) -> str:
    """Insert the password from a file into a database URL in this process's environment; return the URL."""
    file = os.environ.get(DATABASE_PASSWORD_FILE)
    if file:
        url = make_url(os.environ[variable]).set(password=Path(file).read_text(encoding="utf-8").strip())
        os.environ[variable] = url.render_as_string(hide_password=False)
    return os.environ[variable]


APPLICATIONS = {"prefect": prefect, "mlflow": mlflow}


def main() -> None:
    """Run the Prefect or MLflow server that the arguments name, until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m flows.servers.guarded")
    parser.add_argument("server", choices=APPLICATIONS)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument(
        "--descriptor",
        type=int,
        help="File descriptor number of a socket that already listens on the loopback interface.",
    )
    place.add_argument("--listen", metavar="ADDRESS:PORT")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME:PORT",
        help="Host name and port by which browsers and clients call the server; repeatable.",
    )
    options = parser.parse_args()
    try:
        public = _socket(options.descriptor, options.listen)
        hosts = options.host or [f"{name}:{public.getsockname()[1]}" for name in (LOOPBACK, "localhost")]
        gc.disable()  # imports make half a million objects that stay: collecting garbage among them is wasted time
        application = APPLICATIONS[options.server](hosts, _password())
        # What was imported leaves the collector's lists, so that later collections do not visit it.
        gc.freeze()
        gc.enable()
    except LifecycleError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if options.descriptor is not None:
        server_heartbeat().start()
    # Not the loop that uvicorn picks, uvloop where it is installed: Prefect and MLflow are not tested on that.
    server = uvicorn.Server(uvicorn.Config(application, access_log=False, http=BoundedProtocol, loop="asyncio"))
    server.run(sockets=[public])
    sys.exit(0 if server.started else 1)


def _socket(descriptor: int | None, place: str | None) -> socket.socket:
    if place is None:
        return socket.socket(fileno=descriptor)
    address, _, port = place.rpartition(":")
    try:
        return socket.create_server((address, int(port)), backlog=BACKLOG)
    except (OSError, ValueError) as error:
        raise ServerError(f"cannot listen on {place}: {error}; expected ADDRESS:PORT of this machine") from error


def _password() -> str:
    password = os.environ.pop(KEY_VARIABLE, None) or read_named_key()
    if not password:
        raise ServerError(
            f"no server runs without a key: name a file that holds {USER}:PASSWORD as {KEY_FILE_VARIABLE}"
        )
    return password


if __name__ == "__main__":
    main()
