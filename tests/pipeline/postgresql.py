"""PostgreSQL server of Debian's package on a free loopback port, for the duration of a test."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
from refreshes import eventually

from tests.slurm_cluster import free_ports

USER = "postgres"
BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
MISSING = None if BINARIES and os.geteuid() == 0 else "needs Debian's package postgresql, and root to become its user"


class PostgreSql:
    """PostgreSQL server with its data in `folder`. `address` is `USER:PASSWORD@HOST:PORT`."""

    def __init__(self, folder: Path) -> None:
        """Create the database files as the user of Debian's package, since PostgreSQL refuses to run as root."""
        self.folder = folder
        self.password = secrets.token_hex(16)
        (self.port,) = free_ports(1)
        shutil.chown(folder, USER)
        words = folder / "password"
        words.write_text(self.password)
        shutil.chown(words, USER)
        options = ["-U", USER, f"--pwfile={words}", "--auth=scram-sha-256", "--no-sync"]
        command = [BINARIES[-1] / "initdb", "-D", folder / "data", *options]
        subprocess.run(command, user=USER, cwd=folder, check=True, capture_output=True)

    @property
    def address(self) -> str:
        return f"{USER}:{self.password}@127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the PostgreSQL server, and wait until it accepts connections."""
        settings = ["listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories=", "fsync=off"]
        settings += ["dynamic_shared_memory_type=mmap"]  # a killed one leaves nothing in /dev/shm
        flags = [flag for setting in settings for flag in ("-c", setting)]
        with (self.folder / "log").open("ab") as log:
            self.server = subprocess.Popen(
                [BINARIES[-1] / "postgres", "-D", self.folder / "data", *flags],
                user=USER,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ready = [BINARIES[-1] / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        eventually(lambda: subprocess.run(ready).returncode == 0)

    def kill(self) -> None:
        """Kill all processes of the PostgreSQL server with SIGKILL."""
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()

    def stop(self) -> None:
        self.server.send_signal(signal.SIGINT)
        self.server.wait()

    def create(self, databases: list[str]) -> None:
        connection = psycopg2.connect(
            host="127.0.0.1", port=self.port, user=USER, password=self.password, dbname="postgres"
        )
        connection.autocommit = True
        with connection.cursor() as cursor:
            for database in databases:
                cursor.execute(f"CREATE DATABASE {database}")
        connection.close()


@contextmanager
def postgresql(databases: list[str]) -> Iterator[PostgreSql]:
    """Run a PostgreSQL server with these databases until the `with` block ends."""
    # Its user may not enter the temporary folders of pytest.
    folder = Path(tempfile.mkdtemp(prefix="lifecycle-postgresql-", dir="/tmp"))
    try:
        cluster = PostgreSql(folder)
        cluster.start()
        try:
            cluster.create(databases)
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(folder)


def database_environment(cluster: PostgreSql) -> dict[str, str]:
    """Return the environment variables that make Prefect and MLflow store their data in this PostgreSQL server."""
    return {
        "PREFECT_API_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{cluster.address}/prefect",
        "MLFLOW_BACKEND_STORE_URI": f"postgresql://{cluster.address}/mlflow",
    }
