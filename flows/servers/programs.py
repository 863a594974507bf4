"""How the local servers and the worker are started: commands, ports, environment. When belongs to `local.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
NO_TELEMETRY = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
PREFECT_DATABASE = "PREFECT_API_DATABASE_CONNECTION_URL"
MLFLOW_DATABASE = "MLFLOW_BACKEND_STORE_URI"
"""Where a user names databases, such as PostgreSQL's; default: sqlite. Never arguments: they may hold a password."""


@dataclass(frozen=True)
class ServerProgram:
    """A server or the worker. `variable` is where a user names another server; paths are relative to its address.

    command: (its folder, port) → the command. environment: (its folder, port) → variables.
    """

    name: str
    variable: str | None
    preferred_port: int
    health_path: str
    client_path: str
    command: Callable[[Path, int], list[str]]
    environment: Callable[[Path, int], dict[str, str]]

    def named(self) -> str | None:
        """The server that the user named, if any."""
        return (os.environ.get(self.variable) if self.variable else None) or None


def _prefect_command(_: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)]


def _prefect_environment(folder: Path, _: int) -> dict[str, str]:
    database = os.environ.get(PREFECT_DATABASE) or f"sqlite+aiosqlite:///{folder}/prefect.db"
    return {"PREFECT_HOME": str(folder), PREFECT_DATABASE: database}


def _mlflow_command(folder: Path, port: int) -> list[str]:
    program = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    return [*program, "--artifacts-destination", str(folder / "artifacts")]


def _mlflow_environment(folder: Path, _: int) -> dict[str, str]:
    return {
        MLFLOW_DATABASE: os.environ.get(MLFLOW_DATABASE) or f"sqlite:///{folder}/mlflow.db",
        # Its job runner serves features that need a model provider, and costs seconds at every start.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def _worker_command(_: Path, __: int) -> list[str]:
    return [sys.executable, "-m", "flows.service.worker"]


def _worker_environment(folder: Path, port: int) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(folder.parent / PREFECT.name),
        "PREFECT_WORKER_WEBSERVER_HOST": LOOPBACK,
        "PREFECT_WORKER_WEBSERVER_PORT": str(port),
        "PREFECT_WORKER_QUERY_SECONDS": "3",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
    }


PREFECT = ServerProgram(
    "prefect", "PREFECT_API_URL", 4200, "/api/health", "/api", _prefect_command, _prefect_environment
)
MLFLOW = ServerProgram("mlflow", "MLFLOW_TRACKING_URI", 5000, "/health", "", _mlflow_command, _mlflow_environment)
WORKER = ServerProgram("worker", None, 4300, "/health", "", _worker_command, _worker_environment)
SERVERS = (PREFECT, MLFLOW)
