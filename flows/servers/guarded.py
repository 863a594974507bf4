"""Program that runs Prefect's or MLflow's server behind a guard.

    python -m flows.servers.guarded prefect|mlflow --descriptor DESCRIPTOR
    python -m flows.servers.guarded prefect|mlflow --listen ADDRESS:PORT --host NAME:PORT …

Their own commands do not let anything be put in front of their applications; what those commands do beyond starting
them (ports, daemons, worker processes) is done by `local.py`. DESCRIPTOR is a socket that listens already. The second
form is for servers of a team (`deploy/compose.yaml`), which answer to the names given.

Settings come from the environment (`programs.py`): the key as LIFECYCLE_SERVERS_KEY or, in a file, as
LIFECYCLE_SERVERS_KEY_FILE; a database's password in its URL or, in a file, as LIFECYCLE_DATABASE_PASSWORD_FILE.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
from pathlib import Path

import uvicorn
from sqlalchemy.engine import make_url
from starlette.routing import Mount

from flows.servers.bounds import BoundedProtocol
from flows.servers.guard import Guard, origins
from flows.servers.key import KEY_FILE_VARIABLE, USER, read_named_key
from flows.servers.programs import BACKLOG, KEY_VARIABLE, LOOPBACK, MLFLOW_ARTIFACTS, MLFLOW_DATABASE, PREFECT_DATABASE
from flows.servers.quiet import look_rarely
from flows.servers.records import server_heartbeat
from stages.core.errors import LifecycleError, ServerError

DATABASE_PASSWORD_FILE = "LIFECYCLE_DATABASE_PASSWORD_FILE"  # noqa: S105 (a variable's name)


def prefect(hosts: list[str], password: str) -> Guard:
    """Return Prefect's application. Its API asks for the key itself; its pages are public, but use the API."""
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = f"{USER}:{password}"
    os.environ["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] = ",".join(origins(hosts))
    _complete(PREFECT_DATABASE)
    from prefect.server.api.server import create_app

    look_rarely()
    application = create_app(final=True)
    # Only mounts are kept (API and pages): the routes that describe the API ask for no key and take seconds to make.
    application.router.routes = [route for route in application.router.routes if isinstance(route, Mount)]
    return Guard(application, hosts)


def mlflow(hosts: list[str], password: str) -> Guard:
    """Return MLflow's application with its database made or migrated; the server stores and sends artifacts."""
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
    return Guard(app, hosts, password)


def _complete(variable: str) -> str:
    """Put the password of the file into a database's URL, in this process's environment only; return the URL."""
    file = os.environ.get(DATABASE_PASSWORD_FILE)
    if file:
        url = make_url(os.environ[variable]).set(password=Path(file).read_text(encoding="utf-8").strip())
        os.environ[variable] = url.render_as_string(hide_password=False)
    return os.environ[variable]


APPLICATIONS = {"prefect": prefect, "mlflow": mlflow}


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m flows.servers.guarded")
    parser.add_argument("server", choices=APPLICATIONS)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--descriptor", type=int, help="of a socket that listens on the loopback")
    place.add_argument("--listen", metavar="ADDRESS:PORT")
    parser.add_argument("--host", action="append", default=[], metavar="NAME:PORT", help="what it is called")
    options = parser.parse_args()
    try:
        public = _socket(options.descriptor, options.listen)
        hosts = options.host or [f"{name}:{public.getsockname()[1]}" for name in (LOOPBACK, "localhost")]
        gc.disable()  # imports make half a million objects that stay: collecting garbage among them is wasted time
        application = APPLICATIONS[options.server](hosts, _password())
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
