"""Dumps of the servers' PostgreSQL databases for a backup of their home, by PostgreSQL's own programs.

The databases are those that the environment names (`PREFECT_DATABASE`, `MLFLOW_DATABASE`). A dump is of one moment.
Address and password go to the programs by their environment, never on a command line.
"""

import os
import subprocess
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from flows.servers.programs import DATABASE_PASSWORD_FILE, MLFLOW_DATABASE, PREFECT_DATABASE
from stages.core.errors import StoreError
from stages.core.redaction import redact

VARIABLES = {"prefect": PREFECT_DATABASE, "mlflow": MLFLOW_DATABASE}
"""Environment variable with the URL of each server's database."""
DUMP = ["pg_dump", "--format=custom", "--no-owner", "--no-privileges", "--no-password"]
RESTORE = ["pg_restore", "--no-owner", "--no-privileges", "--no-password", "--single-transaction", "--exit-on-error"]
TIMEOUT_S = 6 * 3600.0


def named_databases() -> dict[str, SplitResult]:
    """Return the URLs of the PostgreSQL databases that the environment names, by server."""
    named = {server: urlsplit(os.environ.get(variable) or "") for server, variable in VARIABLES.items()}
    return {server: url for server, url in named.items() if url.scheme.partition("+")[0] in ("postgresql", "postgres")}


def dump(server: str, url: SplitResult, target: Path) -> None:
    """Dump a database to a file. Raises `StoreError` when it cannot be read."""
    _run([*DUMP, f"--file={target}"], url, f"backing up the database of {server}")


def restore_dump(server: str, url: SplitResult, source: Path) -> None:
    """Restore a dump into a new, empty database, of another owner and name; a `StoreError` leaves it empty."""
    advice = "it must be a new database without tables"
    _run([*RESTORE, f"--dbname={_name(url)}", str(source)], url, f"restoring the database of {server}", advice)


def _run(command: list[str], url: SplitResult, doing: str, advice: str = "") -> None:
    """Run one of PostgreSQL's programs for a database; raise `StoreError` with its words if it fails."""
    place = f"{_name(url)} at {url.hostname or 'this machine'}"
    try:
        done = subprocess.run(
            command, env=_environment(url), capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise StoreError(f"{doing}: {command[0]} is missing; install PostgreSQL's client programs") from error
    except subprocess.TimeoutExpired as error:
        raise StoreError(f"{doing}, {place}: {command[0]} took more than {TIMEOUT_S / 3600:g} h") from error
    if done.returncode:
        said = " ".join(redact(done.stderr, [_password(url)]).split())
        raise StoreError(f"{doing}, {place}: {said}{f'; {advice}' if advice else ''}")


def _name(url: SplitResult) -> str:
    return unquote(url.path.strip("/"))


def _password(url: SplitResult) -> str:
    """Return a database's password, from its URL or from the file that the environment names; "" for none."""
    file = os.environ.get(DATABASE_PASSWORD_FILE)
    if url.password or not file:
        return unquote(url.password or "")
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise StoreError(f"reading the password that {DATABASE_PASSWORD_FILE} names: {error}") from error


def _environment(url: SplitResult) -> dict[str, str]:
    """Return this process's environment with the variables by which PostgreSQL's programs find a database."""
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    found = {
        "PGHOST": url.hostname or query.get("host"),
        "PGPORT": str(url.port) if url.port else query.get("port"),
        "PGUSER": unquote(url.username or "") or query.get("user"),
        "PGPASSWORD": _password(url),
        "PGDATABASE": _name(url),
        "PGSSLMODE": query.get("sslmode") or query.get("ssl"),  # psycopg2's name for it, and asyncpg's
        "PGSSLROOTCERT": query.get("sslrootcert"),
        "LC_ALL": "C.UTF-8",
    }
    return {**os.environ, **{name: value for name, value in found.items() if value}}
