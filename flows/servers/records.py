"""Which servers we have started: `<home>/servers.json`, server name → process, port, token."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, ValidationError

from flows.ledger.home import home
from flows.ledger.process_identity import ProcessIdentity
from flows.servers.programs import LOOPBACK
from stages.core.contract import StrictModel
from stages.core.errors import StoreError
from stages.core.files import write_atomically


class ServerRecord(StrictModel):
    """A server that we started. All its processes carry `token` in their environment.

    settings: digest of what it got in its environment beyond that, as the worker gets where the servers are.
    """

    process: ProcessIdentity
    port: int
    token: str
    settings: str | None = None

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


class ServerRecords(StrictModel):
    """`servers.json`: server name → record."""

    servers: dict[str, ServerRecord] = Field(default_factory=dict)


def read_records() -> dict[str, ServerRecord]:
    """All of them. Raises `StoreError` when the file is damaged."""
    path = home() / "servers.json"
    try:
        return dict(ServerRecords.model_validate_json(path.read_text()).servers)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValidationError as error:
        raise StoreError(f"reading {path}: {error}; remove it, and stop servers left over by hand") from error


def address_of(name: str) -> str | None:
    """Of a server that we started and whose process lives."""
    record = read_records().get(name)
    return record.address if record and record.process.alive() else None


def write_records(records: Mapping[str, ServerRecord]) -> None:
    """Replace them all."""
    write_atomically(home() / "servers.json", ServerRecords(servers=dict(records)).model_dump_json(indent=1))
