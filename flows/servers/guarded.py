"""Prefect's and MLflow's servers, each behind a guard.

    python -m flows.servers.guarded prefect|mlflow DESCRIPTOR

Their own commands let nobody put anything before their applications; what those commands do beyond starting them
(ports, daemons, worker processes) is done by `local.py` here, which listens already: DESCRIPTOR is its socket. Settings
come from the environment (`programs.py`).
"""

from __future__ import annotations

import os
import socket
import sys

import uvicorn

from flows.servers.guard import Guard
from flows.servers.key import USER
from flows.servers.programs import KEY_VARIABLE, MLFLOW_ARTIFACTS, MLFLOW_DATABASE


def prefect(port: int) -> Guard:
    """Prefect's API asks for the key itself; its pages are the same for everybody, and ask for it to be of use."""
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = f"{USER}:{os.environ.pop(KEY_VARIABLE)}"
    from prefect.server.api.server import create_app

    return Guard(create_app(final=True), port)


def mlflow(port: int) -> Guard:
    """MLflow with its database made or migrated; artifacts are stored, and sent, by the server."""
    from mlflow.server import constants
    from mlflow.server.handlers import initialize_backend_stores

    database, root = os.environ[MLFLOW_DATABASE], "mlflow-artifacts:/"
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: database,
        constants.REGISTRY_STORE_URI_ENV_VAR: database,
        constants.ARTIFACT_ROOT_ENV_VAR: root,
        constants.ARTIFACTS_DESTINATION_ENV_VAR: os.environ[MLFLOW_ARTIFACTS],
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    initialize_backend_stores(database, database, root)
    from mlflow.server.fastapi_app import app

    return Guard(app, port, password=os.environ.pop(KEY_VARIABLE))


APPLICATIONS = {"prefect": prefect, "mlflow": mlflow}


def main() -> None:
    """Serve until SIGTERM."""
    name, public = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    application = APPLICATIONS[name](public.getsockname()[1])
    uvicorn.Server(uvicorn.Config(application, access_log=False)).run(sockets=[public])


if __name__ == "__main__":
    main()
