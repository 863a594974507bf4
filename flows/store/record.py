"""Records of artifacts (`record.json`), with what each was built from, and the index of all artifacts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from flows.recipe.version import Identity, differing, fields_of
from flows.store.content import FileEntry
from stages.core.contract import StrictModel, finding_of, nearest_base
from stages.core.errors import LifecycleError
from stages.core.fields import Product


class UpstreamEntry(StrictModel):
    """Reference to an upstream artifact that another artifact was built from."""

    stage: str
    kind: str
    version: str
    digest: str


class Record(StrictModel):
    """Contents of `record.json`, whose complete presence makes a folder an artifact; the file is written last.

    upstream: artifacts it was built from, by field path. digest: of the content alone. attempt: the ledger's key of the
    attempt that built it, `REFRESH/STAGE-NUMBER`, if one did. Final metrics are in `result.json`.
    """

    # Earlier versions recorded more than is needed; their artifacts are still good.
    model_config = ConfigDict(extra="ignore")

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
    tags: dict[str, str]
    attempt: str | None = None
    mlflow_run_id: str | None = None
    """MLflow run id of artifacts built by old versions of this program; newer artifacts have `attempt` instead."""
    started: datetime
    finished: datetime
    seconds: float
    packages: dict[str, str]
    git_commit: str | None

    @property
    def finding(self) -> LifecycleError | None:
        """Return the error that the stage recorded if it judged its own artifact unusable; else None."""
        return finding_of(self.tags)

    def refusal(self, folder: Path) -> LifecycleError | None:
        """Return the error for building on an artifact that its stage judged unusable, with its folder and a remedy."""
        finding = self.finding
        if finding is None:
            return None
        return type(finding)(
            f"{finding}\nThe result of {self.stage} is kept in {folder}, but nothing is built on it: every run refuses "
            f"it again, without building it again. Change what the message names, or build the same again with "
            f"`--force {self.stage}`"
        )

    def stale_field(self, digests: Mapping[str, str]) -> str | None:
        """Return a config field whose upstream artifact has other content (`digests`) than when used; else None."""
        return next((field for field, entry in self.upstream.items() if digests.get(field) != entry.digest), None)


@dataclass(frozen=True)
class Artifact:
    """Finished artifact in the store: its folder and record, its last use, and which of its files are damaged.

    used_s: when it was built or last found cached, in seconds since the epoch. damage: files that are missing or have
    another size than recorded. pending: its follow-up program (`flows/launch/hook.py`) has yet to succeed. elsewhere:
    address of the shared store that has it, while its folder is not here yet.
    """

    folder: Path
    record: Record
    used_s: float
    damage: tuple[str, ...] = ()
    pending: bool = False
    elsewhere: str | None = None


class Index:
    """All artifacts of a store at one moment, and the leftover folders without a complete record."""

    def __init__(self, artifacts: Iterable[Artifact] = ()) -> None:
        self._artifacts = tuple(artifacts)

    @property
    def artifacts(self) -> tuple[Artifact, ...]:
        """All artifacts, ordered by folder."""
        return self._artifacts

    @property
    def leftovers(self) -> tuple[Path, ...]:
        """Folders without a complete record."""
        return ()

    def find(self, kind: str, version: str) -> Artifact | None:
        """Return the artifact of a stage kind with a version (cache key); None when the store has none."""
        key = (kind, version)
        return next((one for one in self.artifacts if (one.record.kind, one.record.version) == key), None)

    def of_stage(self, kind: str, stage: str) -> Iterable[Artifact]:
        """Return all versions of a stage."""
        return [one for one in self.artifacts if (one.record.kind, one.record.stage) == (kind, stage)]

    def of_product(self, product: Product) -> Sequence[Artifact]:
        """Return all artifacts of one type, such as models, ordered by folder."""
        return [one for one in self.artifacts if one.record.product == product]

    def closure(self, *roots: Artifact) -> Iterator[Artifact]:
        """Yield artifacts and all those in the store that they were made from, directly or not, each once."""
        todo, seen = [*roots], set()
        while todo:
            artifact = todo.pop(0)
            if artifact.folder not in seen:
                seen.add(artifact.folder)
                yield artifact
                entries = artifact.record.upstream.values()
                # An ancestor may be missing from the store.
                todo += [found for entry in entries if (found := self.find(entry.kind, entry.version))]

    def base_of(self, record: Record) -> UpstreamEntry | None:
        """Return the base model that an adapter belongs to; None for other artifacts."""
        return nearest_base(record.upstream) if record.product == "adapter" else None

    def nearest(self, kind: str, stage: str, identity: Identity) -> Artifact | None:
        """Return the stage's artifact whose config differs least from `identity`; the newest of equally near ones."""
        fields = fields_of(identity)  # once, not for each artifact

        def distance(one: Artifact) -> tuple[int, float]:
            return len(differing(fields_of(one.record.identity), fields)), -one.record.finished.timestamp()

        return min(self.of_stage(kind, stage), key=distance, default=None)
