"""How the two local servers are started: commands, ports, environment. What runs and when belongs to `servers.py`."""

from __future__ import annotations

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


@dataclass(frozen=True)
class ServerProgram:
    """One of the two servers. `variable` is where a user names another one; paths are relative to its address.

    command: (its folder, port) → the command. environment: its folder → variables.
    """

    name: str
    variable: str
    preferred_port: int
    health_path: str
    client_path: str
    command: Callable[[Path, int], list[str]]
    environment: Callable[[Path], dict[str, str]]


def _prefect_command(_: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)]


def _prefect_environment(folder: Path) -> dict[str, str]:
    database = f"sqlite+aiosqlite:///{folder}/prefect.db"
    return {"PREFECT_HOME": str(folder), "PREFECT_API_DATABASE_CONNECTION_URL": database}


def _mlflow_command(folder: Path, port: int) -> list[str]:
    program = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    storage = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    return [*program, *storage, "--artifacts-destination", str(folder / "artifacts")]


def _mlflow_environment(_: Path) -> dict[str, str]:
    # Its job runner serves features that need a model provider, and costs seconds at every start.
    return {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


PREFECT = ServerProgram(
    "prefect", "PREFECT_API_URL", 4200, "/api/health", "/api", _prefect_command, _prefect_environment
)
MLFLOW = ServerProgram("mlflow", "MLFLOW_TRACKING_URI", 5000, "/health", "", _mlflow_command, _mlflow_environment)
PROGRAMS = (PREFECT, MLFLOW)
