"""Lineage of an artifact: the tree of artifacts that it was made from, down to sources outside the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pydantic import Field, JsonValue

from flows.ledger.record import final_result
from flows.planning.changes import rows_of
from flows.store.content import CONTENT_FOLDERS
from flows.store.record import Artifact, Index, UpstreamEntry
from flows.tracking.cursor import run_id_of
from stages.core.contract import StageResult
from stages.core.fields import Product, StrictModel
from stages.core.lines import counted
from stages.models.media import DIFFERENT, MEDIA_FILE, MEDIA_TAG, NOUNS

COUNTS = ("num_rows", "num_documents", "num_tokens", "num_target_tokens")
"""Metrics that a lineage shows of each artifact: rows, documents and tokens that its stage read or made."""


class ContentFile(StrictModel):
    """Content file of an artifact. num_rows: None if rows cannot be counted or the file is gone."""

    name: str
    size_bytes: int
    sha256: str
    num_rows: int | None


class LearnedMedia(StrictModel):
    """Media that a training learned from. numbers: of different ones, by noun. sha256: over all their contents.

    list_file: names each with its digest, as `sha256sum` does; None once it is gone.
    """

    numbers: dict[str, int]
    sha256: str
    list_file: Path | None

    def __str__(self) -> str:
        return " and ".join(counted(number, noun) for noun, number in self.numbers.items())


class Node(StrictModel):
    """Artifact in a lineage tree, with the artifacts that it was made from, by config field.

    folder: None, and nothing else known, once the artifact is no longer in the store. rebuilt: it was built again with
    other content since. refresh: the one that built it. source, revision: of a download.
    """

    stage: str
    kind: str
    version: str
    digest: str
    folder: Path | None = None
    rebuilt: bool = False
    damage: tuple[str, ...] = ()
    product: Product | None = None
    recipe: str | None = None
    refresh: str | None = None
    mlflow_run_id: str | None = None
    git_commit: str | None = None
    finished: datetime | None = None
    source: str | None = None
    revision: str | None = None
    config: dict[str, JsonValue] = Field(default_factory=dict)
    counts: dict[str, int] = Field(default_factory=dict)
    media: LearnedMedia | None = None
    files: tuple[ContentFile, ...] = ()
    upstream: dict[str, Node] = Field(default_factory=dict)


class ScoredEvaluation(StrictModel):
    """Evaluation in a lineage, with its scores."""

    stage: str
    version: str
    scores: dict[str, float]


class Lineage(StrictModel):
    """Lineage of an artifact, as `lifecycle lineage` shows it. registered: such as `version 3 of adder`.

    approval: who approved its latest promotion, rollback or challenge, when and why; None if none was needed.
    """

    name: str
    registered: str | None
    tree: Node
    approval: str | None = None
    evaluations: tuple[ScoredEvaluation, ...]


@dataclass(frozen=True)
class LineageSubject:
    """Artifact whose lineage a person asks for, with its evaluations."""

    name: str
    root: Artifact
    evaluations: tuple[Artifact, ...]
    registered: str | None = None
    approval: str | None = None


def artifact_subject(name: str, root: Artifact, index: Index) -> LineageSubject:
    """Return an artifact together with all evaluations of it, or of a server of it, newest first."""
    asked = {root.record.version}
    asked |= {one.record.version for one in index.of_product("server") if _stands_on(one, asked)}
    evaluations = [one for one in index.of_product("scores") if _stands_on(one, asked)]
    return LineageSubject(name, root, tuple(sorted(evaluations, key=lambda one: one.record.finished, reverse=True)))


def lineage_of(subject: LineageSubject, index: Index) -> Lineage:
    """Return the lineage of an artifact: the tree down to sources outside the store, and its evaluations."""
    scored = [
        ScoredEvaluation(stage=one.record.stage, version=one.record.version, scores=scores_of([one]))
        for one in subject.evaluations
    ]
    return Lineage(
        name=subject.name,
        registered=subject.registered,
        approval=subject.approval,
        tree=node_of(subject.root, index),
        evaluations=tuple(scored),
    )


def node_of(artifact: Artifact, index: Index) -> Node:
    """Return the lineage tree of an artifact."""
    return _node(entry_of(artifact), index, {})


def scores_of(evaluations: Sequence[Artifact]) -> dict[str, float]:
    """Return all evaluations' scores by TASK.METRIC; of two with the same name, the first evaluation's."""
    return {
        name: value
        for one in reversed(evaluations)
        for name, value in final_result(one.folder).metrics.items()
        if "." in name and not name.endswith("_stderr")
    }


def entry_of(artifact: Artifact) -> UpstreamEntry:
    """Return the reference (stage, kind, version, digest) that names an artifact in its dependents' records."""
    record = artifact.record
    return UpstreamEntry(stage=record.stage, kind=record.kind, version=record.version, digest=record.digest)


def _stands_on(artifact: Artifact, versions: set[str]) -> bool:
    return any(entry.version in versions for entry in artifact.record.upstream.values())


def _node(entry: UpstreamEntry, index: Index, known: dict[tuple[str, str], Node]) -> Node:
    """Return the lineage tree of a referenced artifact. known: trees made so far, since a tree may repeat one."""
    key = (entry.kind, entry.version)
    if key not in known:
        artifact = index.find(*key)
        known[key] = _node_of(artifact, index, known) if artifact else Node(**entry.model_dump())
    node = known[key]
    return node if node.digest == entry.digest else node.model_copy(update={"rebuilt": True})


def _node_of(artifact: Artifact, index: Index, known: dict[tuple[str, str], Node]) -> Node:
    record = artifact.record
    config = record.identity.get("config")
    result = final_result(artifact.folder)
    metrics = result.metrics
    return Node(
        **entry_of(artifact).model_dump(),
        folder=artifact.folder,
        damage=artifact.damage,
        product=record.product,
        recipe=record.recipe,
        refresh=record.attempt.partition("/")[0] if record.attempt else None,
        mlflow_run_id=run_id_of(record.attempt) or record.mlflow_run_id,
        git_commit=record.git_commit,
        finished=record.finished,
        source=record.tags.get("source"),
        revision=record.tags.get("revision"),
        config=dict(config) if isinstance(config, dict) else {},
        counts={name: int(metrics[name]) for name in COUNTS if name in metrics},
        media=_media(artifact.folder, result),
        files=tuple(_files(artifact)),
        upstream={field: _node(one, index, known) for field, one in record.upstream.items()},
    )


def _media(folder: Path, result: StageResult) -> LearnedMedia | None:
    if (digest := result.tags.get(MEDIA_TAG)) is None:
        return None
    numbers = {NOUNS[kind]: int(result.metrics[name]) for kind, name in DIFFERENT.items() if name in result.metrics}
    list_file = folder / MEDIA_FILE
    return LearnedMedia(numbers=numbers, sha256=digest, list_file=list_file if list_file.exists() else None)


def _files(artifact: Artifact) -> Iterator[ContentFile]:
    folder = CONTENT_FOLDERS.get(artifact.record.product)
    for name, entry in artifact.record.files.items():
        if folder and name.startswith(folder):
            num_rows = None
            with suppress(OSError):
                num_rows = rows_of(artifact.folder / name)
            yield ContentFile(
                name=name.removeprefix(folder), size_bytes=entry["size"], sha256=entry["sha256"], num_rows=num_rows
            )
