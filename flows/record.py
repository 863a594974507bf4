"""What the store knows of an artifact (`record.json`), and of all artifacts together (`Index`)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from flows.version import Identity
from stages.contract import Product, StrictModel


class FileEntry(StrictModel):
    """One file of an artifact."""

    size: int
    sha256: str


class UpstreamEntry(StrictModel):
    """An artifact that another one was built from."""

    stage: str
    kind: str
    version: str
    digest: str


class Record(StrictModel):
    """`record.json`, the last file written: its folder is an artifact if and only if this one is whole."""

    schema_number: Literal[1] = 1
    recipe: str | None
    stage: str
    kind: str
    product: Product
    version: str
    identity: Identity
    upstream: dict[str, UpstreamEntry]
    digest: str
    files: dict[str, FileEntry]
    metrics: dict[str, float]
    tags: dict[str, str]
    mlflow_run_id: str | None
    started: datetime
    finished: datetime
    seconds: float
    packages: dict[str, str]
    git_commit: str | None


@dataclass(frozen=True)
class Artifact:
    """A committed artifact. `damage` names files that are missing or have another size than recorded."""

    folder: Path
    record: Record
    damage: tuple[str, ...] = ()


@dataclass(frozen=True)
class Index:
    """All artifacts of a store at one moment. `leftovers` are folders without a whole record."""

    artifacts: tuple[Artifact, ...]
    leftovers: tuple[Path, ...] = ()

    def find(self, kind: str, version: str) -> Artifact | None:
        """The artifact of this kind and version."""
        raise NotImplementedError

    def nearest(self, kind: str, stage: str, identity: dict[str, JsonValue]) -> Artifact | None:
        """The artifact of this stage name with the fewest differences; the newest of equals."""
        raise NotImplementedError
