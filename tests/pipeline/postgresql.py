"""Debian's PostgreSQL on a free port of the loopback, for as long as a test wants it."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
from refreshes import eventually

USER = "postgres"
BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
MISSING = None if BINARIES and os.geteuid() == 0 else "needs Debian's package postgresql, and root to become its user"


@contextmanager
def postgresql(databases: list[str]) -> Iterator[tuple[str, str]]:
    """Yields `USER:PASSWORD@HOST:PORT` and the password of a cluster with these databases."""
    password = secrets.token_hex(16)
    folder = Path(tempfile.mkdtemp(prefix="lifecycle-postgresql-"))
    shutil.chown(folder, USER)
    try:
        with _running(folder, password) as port:
            _create(databases, password, port)
            yield f"{USER}:{password}@127.0.0.1:{port}", password
    finally:
        shutil.rmtree(folder)


@contextmanager
def _running(folder: Path, password: str) -> Iterator[int]:
    """PostgreSQL refuses to run as root: it runs as the user that Debian's package made."""
    port = _free_port()
    words = folder / "password"
    words.write_text(password)
    shutil.chown(words, USER)
    data = folder / "data"
    options = ["-U", USER, f"--pwfile={words}", "--auth=scram-sha-256", "--no-sync"]
    subprocess.run(
        [BINARIES[-1] / "initdb", "-D", data, *options], user=USER, cwd=folder, check=True, capture_output=True
    )
    settings = ["listen_addresses=127.0.0.1", f"port={port}", "unix_socket_directories=", "fsync=off"]
    flags = [flag for setting in settings for flag in ("-c", setting)]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [BINARIES[-1] / "postgres", "-D", data, *flags], user=USER, cwd=folder, stdout=log, stderr=log
        )
    try:
        ready = [BINARIES[-1] / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
        eventually(lambda: subprocess.run(ready).returncode == 0)
        yield port
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


def _create(databases: list[str], password: str, port: int) -> None:
    connection = psycopg2.connect(host="127.0.0.1", port=port, user=USER, password=password, dbname="postgres")
    connection.autocommit = True
    with connection.cursor() as cursor:
        for database in databases:
            cursor.execute(f"CREATE DATABASE {database}")
    connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
