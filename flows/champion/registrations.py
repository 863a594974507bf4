"""Which artifacts were ever registered as a model, kept in files, so that nothing is lost while MLflow is away.

<home>/registrations/<name>/
    lock                one promotion of a name at a time; the kernel releases the lock of a dead process
    <kind>-<version>    a registered model: the artifacts that belong to it. Written before MLflow has it
"""

from __future__ import annotations

from filelock import FileLock
from pydantic import Field

from flows.ledger.home import home
from stages.core.contract import StrictModel
from stages.core.files import write_atomically


class Registration(StrictModel):
    """A candidate or champion: its artifacts as `kind/version`. `digest`: of the model's or adapter's content.

    base: the model that an adapter belongs to; None for a model.
    description, scores, data: for people who look at MLflow's registry.
    """

    name: str
    model: str
    digest: str
    evaluations: tuple[str, ...]
    base: str | None = None
    server: str | None = None
    mlflow_run_id: str | None = None
    description: str = ""
    scores: dict[str, float] = Field(default_factory=dict)
    data: tuple[str, ...] = ()

    @property
    def artifacts(self) -> frozenset[str]:
        """Of all that belongs to it."""
        return frozenset(filter(None, [self.model, self.base, *self.evaluations, self.server]))


def note(registration: Registration) -> None:
    """Remember a registration; to be called before it is sent to MLflow."""
    folder = home() / "registrations" / registration.name
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{registration.model.replace('/', '-')}.json", registration.model_dump_json(indent=1))


def registrations() -> list[Registration]:
    """All that were noted."""
    files = sorted((home() / "registrations").glob("*/*.json"))
    return [Registration.model_validate_json(file.read_bytes()) for file in files]


def only_one(name: str) -> FileLock:
    """What to hold while a model of this name is promoted or rolled back: nobody else in this home does so then."""
    return FileLock(home() / "registrations" / name / "lock", fallback_to_soft=False)
