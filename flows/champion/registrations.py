"""Local records of all registered models, so that none of their artifacts is deleted while MLflow is away.

<home>/registrations/<name>/
    lock                one promotion of a name at a time; the kernel releases the lock of a dead process
    <kind>-<version>    a registered model and the artifacts that belong to it; written before MLflow has it
"""

import re
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import Field

from flows.ledger.home import home
from flows.tracking.rows import acceptable
from stages.core.contract import StrictModel
from stages.core.errors import StoreError
from stages.core.files import write_atomically
from stages.core.redaction import quoted
from stages.kinds.promote.config import LONGEST_NAME, MODEL_NAME

TAG = "lifecycle."


class Registration(StrictModel):
    """Record of a registered model or adapter, with its artifacts as `KIND/VERSION`: base model, evaluations, server.

    digest: of the content. base: of an adapter. description, scores, data, approval (who approved or rejected it, when
    and why): for people who look at MLflow's registry.
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
    approval: str = ""

    @property
    def artifacts(self) -> frozenset[str]:
        """Return the artifacts of a registered model: model, base model, evaluations and server."""
        return frozenset(filter(None, [self.model, self.base, *self.evaluations, self.server]))


def note(registration: Registration) -> None:
    """Write the local record of a registered model; call it before the model is sent to MLflow."""
    folder = _folder(registration.name)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{registration.model.replace('/', '-')}.json", registration.model_dump_json(indent=1))


def tags_of(registration: Registration, **more: str | None) -> dict[str, str]:
    """Return the tags for a registered version in MLflow's registry, which point to its artifacts."""
    tags = {
        "model": registration.model,
        "base": registration.base,
        "digest": registration.digest,
        "evaluations": ",".join(registration.evaluations),
        "server": registration.server,
        "data": "; ".join(registration.data),
        "approval": registration.approval,
        **{f"score.{acceptable(name)}": f"{value:.6g}" for name, value in registration.scores.items()},
        **more,
    }
    return {f"{TAG}{name}": value for name, value in tags.items() if value}


def registration_of(version: Any) -> Registration:
    """Return the registration that the tags of a version in MLflow describe, without scores and description.

    Raises StoreError for a version that somebody registered by other means.
    """
    tags = version.tags
    if f"{TAG}model" not in tags:
        raise StoreError(
            f"version {version.version} of {version.name} in MLflow's registry names no artifact of a store: it was "
            "not registered by a promotion; move the alias to a version that was"
        )
    return Registration(
        name=version.name,
        model=tags[f"{TAG}model"],
        digest=tags[f"{TAG}digest"],
        evaluations=tuple(filter(None, tags.get(f"{TAG}evaluations", "").split(","))),
        base=tags.get(f"{TAG}base"),
        server=tags.get(f"{TAG}server"),
        mlflow_run_id=version.run_id or None,
        approval=tags.get(f"{TAG}approval", ""),
    )


def registrations() -> list[Registration]:
    """Return the local records of all models that were ever registered."""
    files = sorted((home() / "registrations").glob("*/*.json"))
    return [Registration.model_validate_json(file.read_bytes()) for file in files]


def promotion_lock(name: str) -> FileLock:
    """Return the lock to hold while a registered model is promoted or rolled back on this lifecycle home.

    Taking it makes a folder, so ask MLflow first whether there is such a model. Raises StoreError for a bad name.
    """
    return FileLock(_folder(name) / "lock", fallback_to_soft=False)


def _folder(name: str) -> Path:
    if not re.fullmatch(MODEL_NAME, name) or len(name) > LONGEST_NAME:
        raise StoreError(
            f"{quoted(name, 60)} is no name of a registered model; expected letters, digits, `.`, `_` and `-`, at most "
            "128, with a letter or a digit first"
        )
    return home() / "registrations" / name
