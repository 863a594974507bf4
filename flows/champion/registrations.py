"""Which artifacts were ever registered as a model, kept in files, so that nothing is lost while MLflow is away.

<home>/registrations/<name>/
    lock                one promotion of a name at a time; the kernel releases the lock of a dead process
    <kind>-<version>    a registered model: the artifacts that belong to it. Written before MLflow is told
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from flows.ledger.home import home
from stages.core.contract import StrictModel
from stages.core.files import write_atomically


class Registration(StrictModel):
    """A candidate or champion: its artifacts as `kind/version`. `digest`: of the model's content."""

    name: str
    model: str
    digest: str
    evaluations: tuple[str, ...]
    server: str | None = None
    mlflow_run_id: str | None = None

    @property
    def artifacts(self) -> frozenset[str]:
        """Of all that belongs to it."""
        return frozenset(filter(None, [self.model, *self.evaluations, self.server]))


def note(registration: Registration) -> None:
    """Remember a registration; to be called before MLflow is told of it."""
    folder = home() / "registrations" / registration.name
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{registration.model.replace('/', '-')}.json", registration.model_dump_json(indent=1))


def registrations() -> list[Registration]:
    """All that were noted."""
    files = sorted((home() / "registrations").glob("*/*.json"))
    return [Registration.model_validate_json(file.read_bytes()) for file in files]


@contextmanager
def only_one(name: str) -> Iterator[None]:
    """Wait until nobody else on this machine promotes or rolls back a model of this name, and keep it so."""
    folder = home() / "registrations" / name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
