"""Artifact records that a publish stage reads: of the promotion, its model, and all artifacts the model was made from.

Records refer to one another by kind and version, also where an artifact was built under another name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from stages.core.approval import VERDICT_TAG, read_result
from stages.core.contract import StageResult, nearest_base
from stages.core.errors import StoreError
from stages.core.fields import Product

FOLDERS: dict[Product, str] = {"model": "model", "adapter": "adapter", "dataset": "data"}
NAME_TAG, APPROVAL_TAG, TABLE_FILE = "registered_model", "approval", "verdict.md"
"""Names in a promotion's artifact that publishing reads, beside the verdict: two result tags, and the report file."""


class _Recorded(BaseModel):
    """Base class for the fields of an artifact's `record.json` that a publication reads; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class UpstreamEntry(_Recorded):
    """Reference in an artifact's `record.json` to another artifact from which it was built."""

    kind: str
    version: str


class FileEntry(_Recorded):
    """Size in bytes and sha256 of one file of an artifact."""

    size: int
    sha256: str


class Record(_Recorded):
    """Fields of an artifact's `record.json` that a publication reads."""

    recipe: str | None
    stage: str
    kind: str
    product: Product
    version: str
    identity: dict[str, Any]
    upstream: dict[str, UpstreamEntry]
    files: dict[str, FileEntry]
    finished: datetime
    git_commit: str | None = None


@dataclass(frozen=True)
class LineageArtifact:
    """Artifact in a published model's lineage: its folder, its record, and the result of its stage."""

    folder: Path
    record: Record
    result: StageResult

    @property
    def label(self) -> str:
        """Name of the artifact in messages and the model card: its stage and its version."""
        return f"{self.record.stage}-{self.record.version}"

    @property
    def config(self) -> Mapping[str, Any]:
        """Config of the stage, defaults included, without `execution`, names of input stages and paths."""
        config = self.record.identity.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def is_source(self) -> bool:
        """True if the artifact was downloaded rather than made from other artifacts."""
        return not self.record.upstream

    @property
    def content(self) -> Path:
        """Folder with the artifact's model, adapter or dataset."""
        return self.folder / FOLDERS[self.record.product]

    def stands_on(self, other: LineageArtifact) -> bool:
        """Return whether the artifact was built directly from another given artifact."""
        entry = UpstreamEntry(kind=other.record.kind, version=other.record.version)
        return entry in self.record.upstream.values()


class Inputs:
    """Artifacts that a publish stage can read: its inputs, and all artifacts that the inputs were made from."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.named = {name: _read(folder) for name, folder in folders.items()}
        self._made = {(one.record.kind, one.record.version): one for one in self.named.values()}

    def upstream(self, made: LineageArtifact, *fields: str) -> list[LineageArtifact]:
        """Return those direct inputs of an artifact that its stage's config names in the given fields."""
        entries = made.record.upstream.items()
        return [self._find(entry) for field, entry in entries if field in fields or field.split(".")[0] in fields]

    def lineage(self, made: LineageArtifact) -> list[LineageArtifact]:
        """Return an artifact and all that it was made from, each once; inputs come before what uses them."""
        made_by_folder: dict[Path, LineageArtifact] = {}

        def visit(one: LineageArtifact) -> None:
            if one.folder not in made_by_folder:
                for entry in one.record.upstream.values():
                    visit(self._find(entry))
                made_by_folder[one.folder] = one

        visit(made)
        return list(made_by_folder.values())

    def bases(self, made: LineageArtifact) -> Iterator[LineageArtifact]:
        """Yield the base model of a model, then the base model's own base model, and so on."""
        while made.record.upstream.keys() & {"base", "model"}:
            made = self._find(nearest_base(made.record.upstream))
            yield made

    def _find(self, entry: UpstreamEntry) -> LineageArtifact:
        try:
            return self._made[entry.kind, entry.version]
        except KeyError:
            raise StoreError(
                f"the record of what is published refers to the {entry.kind} artifact of version {entry.version}, "
                "which is none of the stages that this one stands on; run the refresh again"
            ) from None


def _read(folder: Path) -> LineageArtifact:
    record = Record.model_validate_json((folder / "record.json").read_bytes())
    return LineageArtifact(folder, record, read_result(folder))


@dataclass(frozen=True)
class PromotedModel:
    """Promoted model with everything that its card needs.

    lineage: artifacts that it was made from; the model last. bases: its own base first, the oldest last.
    """

    name: str
    outcome: str
    promotion: LineageArtifact
    model: LineageArtifact
    evaluations: tuple[LineageArtifact, ...]
    lineage: tuple[LineageArtifact, ...]
    bases: tuple[LineageArtifact, ...]

    @property
    def approval(self) -> str | None:
        """Return who approved the promotion, when and why; None if none was needed."""
        return self.promotion.result.tags.get(APPROVAL_TAG)

    @property
    def table(self) -> str:
        """Result of the promotion as Markdown: gates, and the comparison with the earlier champion."""
        return (self.promotion.folder / TABLE_FILE).read_text(encoding="utf-8")


def read_promoted(folders: Mapping[str, Path], promotion_stage: str) -> PromotedModel:
    """Read the records of a promotion and its lineage. Raises StoreError if they do not fit together."""
    inputs = Inputs(folders)
    promotion = inputs.named[promotion_stage]
    (model,) = inputs.upstream(promotion, "model")
    return PromotedModel(
        name=promotion.result.tags[NAME_TAG],
        outcome=promotion.result.tags[VERDICT_TAG],
        promotion=promotion,
        model=model,
        evaluations=tuple(inputs.upstream(promotion, "evaluations")),
        lineage=tuple(inputs.lineage(model)),
        bases=tuple(inputs.bases(model)),
    )
