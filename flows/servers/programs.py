"""Command lines, ports and environments of the local Prefect and MLflow servers and the worker.

A port is held by a listening socket from its choice to the server's first answer.
"""

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flows.servers.supervised_commands import DESCRIPTOR
from stages.core.errors import ServerError
from stages.core.lines import logs_json

LOOPBACK = "127.0.0.1"
NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
PREFECT_DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"
MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"
"""Variable with the URL of MLflow's database (default: an SQLite file); no argument, since URLs contain passwords."""
DATABASE_PASSWORD_FILE = "LIFECYCLE_DATABASE_PASSWORD_FILE"  # noqa: S105 (a variable's name)
MLFLOW_ARTIFACTS = "MLFLOW_ARTIFACTS_DESTINATION"
MLFLOW_FILE = "mlflow.db"
QUERY_SECONDS = "PREFECT_WORKER_QUERY_SECONDS"
KEY_VARIABLE = "LIFECYCLE_SERVERS_KEY"
"""Environment variable by which a local server gets its password."""
SERVICES = {
    # A home's server has nothing to do for most of the day, and its loops took 2% of a core. Nothing here pauses flow
    # runs; new schedules are planned when they are made (`flows/service/schedule.py`), not by a loop that looks.
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CLEANUP_RECONCILER_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_FOREMAN_LOOP_SECONDS": "60",
    "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "60",
    "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT15S",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_LOOP_SECONDS": "15",
    # People are notified of late runs: not of a worker that is just started again. Prefect holds the event of such a
    # state back that follows another one within 5 minutes, since its scheduler emits no event of that.
    "PREFECT_SERVER_SERVICES_LATE_RUNS_AFTER_SECONDS": "300",
    # While the disk is full, events wait in memory, at most 50,000. Those that are dropped, by default after 25 s, look
    # like those that a killed server did not hand on, and people would be notified again.
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_MAX_FLUSH_RETRIES": "1000000",
}
"""Settings that make the background services of Prefect's server poll less often, which saves CPU time."""
_WORKER_COMMAND = [sys.executable, "-m", "flows.service.worker", DESCRIPTOR]
BACKLOG = 2048
"""Largest number of connections that wait until a server accepts them."""


@dataclass(frozen=True)
class ServerProgram:
    """Command, port and environment of a local server or the worker.

    variable: names another server, if the user sets it. health_path, client_path: relative to the server's address.
    command: with its listening socket as `{descriptor}`. environment: (its folder, port) → variables.
    """

    name: str
    variable: str | None
    preferred_port: int
    health_path: str
    client_path: str
    command: list[str]
    environment: Callable[[Path, int], dict[str, str]]

    def named(self) -> str | None:
        """Return the address of the user's own server, which replaces the local one; None without such a server."""
        return (os.environ.get(self.variable) if self.variable else None) or None


def listener(*preferred: int | None) -> socket.socket:
    """Return a socket that listens on the first preferred port that is free, else on a free port that the kernel picks.

    The server inherits it, seconds before it answers: another program that listened there meanwhile would be taken for
    it and receive the key. Binding alone is not enough: with SO_REUSEADDR others bind the port too, and the first that
    listens gets it.
    """
    for port in (*filter(None, preferred), 0):
        with suppress(OSError):
            return socket.create_server((LOOPBACK, port), backlog=BACKLOG)
    raise ServerError(f"looking for a free port on {LOOPBACK}: there is none; close programs that listen")


def guarded(name: str) -> list[str]:
    """Return the command line that runs a server behind access control, on an inherited listening socket."""
    return [sys.executable, "-m", "flows.servers.guarded", name, f"--descriptor={DESCRIPTOR}"]


def _prefect_environment(folder: Path, port: int) -> dict[str, str]:
    return {
        **SERVICES,
        "PREFECT_HOME": str(folder),
        PREFECT_DATABASE: os.environ.get(PREFECT_DATABASE) or f"sqlite+aiosqlite:///{folder}/prefect.db",
        # Its pages would ask the server on port 4200, which may be another home's.
        "PREFECT_SERVER_UI_API_URL": f"http://{LOOPBACK}:{port}/api",
        "PREFECT_UI_URL": f"http://{LOOPBACK}:{port}",  # links in notifications
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",  # it is fetched from the internet
    }


def _mlflow_environment(folder: Path, _: int) -> dict[str, str]:
    return {
        MLFLOW_DATABASE: os.environ.get(MLFLOW_DATABASE) or f"sqlite:///{folder}/{MLFLOW_FILE}",
        MLFLOW_ARTIFACTS: str(folder / "artifacts"),
        # Its job runner serves features that need a model provider, and costs seconds at every start.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _worker_environment(folder: Path, _: int) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(folder.parent / PREFECT.name),
        QUERY_SECONDS: os.environ.get(QUERY_SECONDS) or "5",
        **({"PREFECT_LOGGING_HANDLERS_CONSOLE_FORMATTER": "json"} if logs_json() else {}),
        # Else Prefect's client starts a server of its own where it finds none.
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    }


PREFECT = ServerProgram(
    "prefect", "PREFECT_API_URL", 4200, "/api/health", "/api", guarded("prefect"), _prefect_environment
)
MLFLOW = ServerProgram("mlflow", "MLFLOW_TRACKING_URI", 5000, "/health", "", guarded("mlflow"), _mlflow_environment)
WORKER = ServerProgram("worker", None, 4300, "/health", "", _WORKER_COMMAND, _worker_environment)
SERVERS = (PREFECT, MLFLOW)
MLFLOW_SWITCH = "LIFECYCLE_MLFLOW"
"""Environment variable that with the value `off` has a home do without MLflow: no tracking in it, no champions."""
PROGRAMS = {program.name: program for program in (*SERVERS, WORKER)}
NAMED_BY = {program.name: str(program.variable) for program in SERVERS}
"""Environment variable with the address of the user's own server, by server name (`prefect`, `mlflow`)."""


def uses_mlflow() -> bool:
    """Return whether refreshes are tracked in MLflow, which also knows the champions. Raises ServerError."""
    asked = os.environ.get(MLFLOW_SWITCH) or "on"
    if asked not in ("on", "off"):
        raise ServerError(f"reading {MLFLOW_SWITCH}: found {asked!r}, expected `on` or `off`")
    return asked == "on"


def used_servers() -> tuple[ServerProgram, ...]:
    """Return the servers that refreshes of this home use."""
    return tuple(program for program in SERVERS if program is not MLFLOW or uses_mlflow())
