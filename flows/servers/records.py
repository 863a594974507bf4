"""Records of the local servers in `$LIFECYCLE_HOME/servers.json`: process, port and token of each.

They are void in a copy of a home, since the processes are the original's.

python -m flows.servers.records NAME PID DEATHS

records the new process of a server, or that it died (PID 0); the supervisor calls it.
"""

import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from pydantic import Field, ValidationError

from flows.ledger.home import HomeIdentity, home, home_identity
from flows.ledger.process_identity import Heartbeat, ProcessIdentity, is_silent
from flows.servers.programs import LOOPBACK, PREFECT, WORKER
from stages.core.contract import StrictModel
from stages.core.errors import StoreError
from stages.core.fields import what_is_wrong
from stages.core.files import write_atomically

FILE = "servers.json"
ACTIVE = """
    SELECT COUNT(DISTINCT deployment.id) FROM deployment
    JOIN deployment_schedule ON deployment_schedule.deployment_id = deployment.id
    WHERE deployment_schedule.active AND NOT deployment.paused
"""


class ServerRecord(StrictModel):
    """Record of a local server or the worker, such as its process and port.

    All its processes have `token` in their environment, by which they are found. settings: digest of the rest of its
    environment, such as the servers' addresses for the worker. deaths: how often it died in a row. home: path by which
    its processes know the home; None in old records.
    """

    process: ProcessIdentity
    port: int
    token: str
    settings: str | None = None
    deaths: int = 0
    home: Path | None = None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def knows_home(self) -> bool:
        """Return whether the server's processes still find the lifecycle home, which may have been moved."""
        return self.home is None or (self.home.exists() and self.home.samefile(home()))


class ServerRecords(StrictModel):
    """Contents of `servers.json`: the records of all local servers of a lifecycle home.

    home: where it was written; None in old files. is_copy: its schedules must be paused before a worker starts.
    restored_database: a copy's database of Prefect, which the environment names, is its own.
    """

    servers: dict[str, ServerRecord] = Field(default_factory=dict)
    home: HomeIdentity | None = None
    is_copy: bool = False
    restored_database: bool = False


def read_records() -> dict[str, ServerRecord]:
    """Return the records of all local servers, by name. Raises `StoreError` when the file is damaged."""
    return dict(_read().servers)


def is_unsettled_copy() -> bool:
    """Return whether this home is a copy whose servers were never started. Raises what `read_records` raises."""
    return _read().is_copy


def write_records(records: Mapping[str, ServerRecord], *, settled: bool = False) -> None:
    """Replace all servers' records. settled: this home is no copy any more. Raises what `read_records` raises."""
    is_copy = is_unsettled_copy() and not settled
    # The copy's own identity is written: from here on only `is_copy` says that it is one.
    restored = is_copy and has_restored_database()
    written = ServerRecords(servers=dict(records), home=home_identity(), is_copy=is_copy, restored_database=restored)
    write_atomically(_file(), written.model_dump_json(indent=1))


def mark_as_copy(folder: Path, *, restored_database: bool = False) -> None:
    """Record that the home in a folder is a copy whose servers were never started, whatever its original recorded.

    restored_database: Prefect's database, which the environment names, was restored for this home, and is not shared.
    """
    record = ServerRecords(is_copy=True, restored_database=restored_database)
    write_atomically(folder / FILE, record.model_dump_json(indent=1))


def has_restored_database() -> bool:
    """Return whether Prefect's database, which the environment names, was restored for this home alone."""
    return _read().restored_database


def address_of(name: str) -> str | None:
    """Return the address of a local server; None when its process does not live on this machine."""
    record = read_records().get(name)
    return record.address if record and record.process.alive() else None


def host_of(record: ServerRecord) -> str | None:
    """Return the other host on which a server runs; None when the server runs on this host, or counts as dead."""
    if record.process.standing() != "foreign" or is_silent(record.process, _heartbeat_file(), _file()):
        return None
    return record.process.host or "another host"


def server_heartbeat() -> Heartbeat:
    """Return a heartbeat by which other hosts that share the lifecycle home see that the local servers live."""
    return Heartbeat(_heartbeat_file())


def missing_worker() -> str | None:
    """Return a warning when recipes are scheduled but no worker runs to start them; None otherwise.

    It reads the database of this home's Prefect, which need not run. A Prefect that the user names has workers
    elsewhere.
    """
    import sqlite3

    records = read_records()
    prefect, worker = records.get(PREFECT.name), records.get(WORKER.name)
    # A command that has started the servers has set the variable to ours.
    if PREFECT.named() not in (None, prefect and prefect.address + PREFECT.client_path):
        return None
    if worker and (worker.process.alive() or host_of(worker)):
        return None
    try:
        # Read-only, since Prefect's server may be writing, and no empty database must be made where there is none.
        address = f"{(home() / PREFECT.name / 'prefect.db').as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=1.0)) as database:
            (count,) = database.execute(ACTIVE).fetchone()
    except sqlite3.Error:  # there is no database yet, or Prefect uses another one
        count = 0
    return f"no worker runs, so scheduled recipes ({count}) are not refreshed: `lifecycle up`" if count else None


def _read() -> ServerRecords:
    path = _file()
    try:
        records = ServerRecords.model_validate_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return ServerRecords()
    except ValidationError as error:
        wrong = what_is_wrong(error)
        raise StoreError(f"reading {path}: {wrong}; remove it, and stop servers left over by hand") from error
    # A copied file: the processes that it names are the original's.
    return records if records.home is None or records.home.is_here() else ServerRecords(is_copy=True)


def _file() -> Path:
    return home() / FILE


def _heartbeat_file() -> Path:
    return home() / "servers.heartbeat"


def main() -> None:
    """Update a server's deaths in a row, and its process unless that has ended, in its record."""
    name, pid, deaths = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    records = read_records()
    try:
        change = {"process": ProcessIdentity.of(pid), "deaths": deaths}
    except ProcessLookupError:
        # PID 0, or one that has ended since: the former identity stays, which counts as dead.
        change = {"deaths": deaths}
    if name in records:
        write_records({**records, name: records[name].model_copy(update=change)})


if __name__ == "__main__":
    main()
