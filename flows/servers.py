"""The local Prefect and MLflow servers: start, find, check, stop. Loopback, sqlite, everything under LIFECYCLE_HOME.

A server that the user named (`PREFECT_API_URL`, `MLFLOW_TRACKING_URI`) is used and checked, never started or stopped.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pydantic import Field, ValidationError

from flows.home import home
from flows.process_identity import ProcessIdentity
from flows.server_programs import LOOPBACK, MLFLOW, NO_TELEMETRY, PREFECT, PROGRAMS, ServerProgram
from stages.contract import StrictModel, write_atomically
from stages.errors import ServerError, StoreError
from stages.supervisor import TOKEN_VARIABLE, kill_until_gone, marked_processes, send

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
ANSWER_TIMEOUT_S = 5.0


class ServerRecord(StrictModel):
    """A server that we started. All its processes carry `token` in their environment."""

    process: ProcessIdentity
    port: int
    token: str

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


class ServerRecords(StrictModel):
    """`servers.json`: server name → record."""

    servers: dict[str, ServerRecord] = Field(default_factory=dict)


@dataclass(frozen=True)
class ServerStatus:
    """What `lifecycle status` tells of a server. `ours`: started here, so that `down` stops it."""

    name: str
    url: str | None
    healthy: bool
    ours: bool
    pid: int | None = None


@dataclass(frozen=True)
class Endpoints:
    """Where the two servers are. `local` are those that run under LIFECYCLE_HOME."""

    prefect_api_url: str
    mlflow_tracking_uri: str
    local: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """What Prefect and MLflow clients need in their environment."""
        return {
            **NO_TELEMETRY,
            "PREFECT_API_URL": self.prefect_api_url,
            "MLFLOW_TRACKING_URI": self.mlflow_tracking_uri,
        }


def up() -> Endpoints:
    """Make sure that both servers answer, and start what is absent, both at once.

    Raises `ServerError` when a server that the user named does not answer, or one of ours does not start.
    """
    named = {program.name: os.environ[program.variable] for program in PROGRAMS if os.environ.get(program.variable)}
    for program in PROGRAMS:
        if program.name in named:
            _check_named(program, named[program.name])
    with _locked():
        records = _read_records()
        missing = [program for program in PROGRAMS if program.name not in named and not _healthy(program, records)]
        records |= _start(missing, records)
    urls = {name: record.address for name, record in records.items()}
    return Endpoints(
        prefect_api_url=named.get("prefect") or urls["prefect"] + PREFECT.client_path,
        mlflow_tracking_uri=named.get("mlflow") or urls["mlflow"] + MLFLOW.client_path,
        local=tuple(program.name for program in PROGRAMS if program.name not in named),
    )


def down() -> list[str]:
    """Stop the servers that `up` started, with all their children; returns their names."""
    with _locked():
        records = _read_records()
        _stop(records.values())
        _write_records({})
    return [name for name, record in records.items()]


def status() -> list[ServerStatus]:
    """Where each server is and whether it answers."""
    records = _read_records()
    return [_status_of(program, records.get(program.name)) for program in PROGRAMS]


def answers(url: str, timeout_s: float = ANSWER_TIMEOUT_S) -> bool:
    """Whether an HTTP server answers a GET with a success."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310 (http addresses only)
            return bool(response.status < 400)
    except (OSError, ValueError):
        return False


def _status_of(program: ServerProgram, record: ServerRecord | None) -> ServerStatus:
    named = os.environ.get(program.variable)
    if named:
        return ServerStatus(program.name, named, _named_answers(program, named), ours=False)
    if record is None or not record.process.alive():
        return ServerStatus(program.name, None, healthy=False, ours=True)
    healthy = answers(record.address + program.health_path)
    return ServerStatus(program.name, record.address, healthy, ours=True, pid=record.process.pid)


def _check_named(program: ServerProgram, url: str) -> None:
    if not _named_answers(program, url):
        raise ServerError(
            f"reaching the {program.name} server that {program.variable} names: {url} does not answer within "
            f"{ANSWER_TIMEOUT_S:.0f} s; start it, correct {program.variable}, or unset it to use a local server"
        )


def _named_answers(program: ServerProgram, url: str) -> bool:
    """Databases, folders and other addresses that are not HTTP are left to the client."""
    if not url.startswith(("http://", "https://")):
        return True
    return answers(url.rstrip("/").removesuffix(program.client_path) + program.health_path)


def _healthy(program: ServerProgram, records: Mapping[str, ServerRecord]) -> bool:
    record = records.get(program.name)
    return bool(record and record.process.alive() and answers(record.address + program.health_path))


def _start(programs: list[ServerProgram], records: Mapping[str, ServerRecord]) -> dict[str, ServerRecord]:
    """Start servers side by side and wait until all answer; if one fails, none of them stays."""
    _stop([records[program.name] for program in programs if program.name in records])
    started: dict[str, ServerRecord] = {}
    try:
        for program in programs:
            started[program.name] = _launch(program)
            _write_records({**records, **started})
        for program in programs:
            _await(program, started[program.name])
    except BaseException:
        _stop(started.values())
        _write_records({name: record for name, record in records.items() if name not in started})
        raise
    return started


def _launch(program: ServerProgram) -> ServerRecord:
    folder = home() / program.name
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port(program.preferred_port)
    token = os.urandom(16).hex()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            program.command(folder, port),
            env={**inherited, **NO_TELEMETRY, **program.environment(folder), TOKEN_VARIABLE: token},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
    return ServerRecord(process=ProcessIdentity.of(process.pid), port=port, token=token)


def _await(program: ServerProgram, record: ServerRecord) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while not answers(record.address + program.health_path, timeout_s=1.0):
        if not record.process.alive() or time.monotonic() > end:
            log = home() / program.name / "server.log"
            lines = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise ServerError(
                f"starting the {program.name} server on port {record.port}: it does not answer; see {log}, which "
                f"ends with:\n{lines}"
            )
        time.sleep(0.1)


def _stop(records: Collection[ServerRecord]) -> None:
    """SIGTERM to exactly the recorded processes and their descendants, then SIGKILL to what is left."""
    tokens = [record.token for record in records]

    def remaining() -> list[int]:
        return [pid for token in tokens for pid in marked_processes(token)]

    send(signal.SIGTERM, remaining())
    end = time.monotonic() + STOP_TIMEOUT_S
    while remaining() and time.monotonic() < end:
        time.sleep(0.1)
    kill_until_gone(remaining)


def _free_port(preferred: int) -> int:
    """The preferred port if it is free, else one that the kernel picks."""
    for port in (preferred, 0):
        with suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
            return int(probe.getsockname()[1])
    raise ServerError(f"looking for a free port on {LOOPBACK}: none is to be had")


@contextmanager
def _locked() -> Iterator[None]:
    """Keep two `up`s or `down`s apart; the kernel releases the lock of a dead process."""
    home().mkdir(parents=True, exist_ok=True)
    with (home() / "servers.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_records() -> dict[str, ServerRecord]:
    path = home() / "servers.json"
    try:
        return dict(ServerRecords.model_validate_json(path.read_text()).servers)
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        raise StoreError(f"reading {path}: {error}; remove it, and stop servers left over by hand") from error


def _write_records(records: Mapping[str, ServerRecord]) -> None:
    write_atomically(home() / "servers.json", ServerRecords(servers=dict(records)).model_dump_json(indent=1))
