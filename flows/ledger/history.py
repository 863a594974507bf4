"""Records of refreshes: what ran, how it ended, and what MLflow has still to be told. Files, no server needed.

<home>/refreshes/<refresh>/
    refresh.json            the refresh and its stages; written by the process that runs it
    attempts/<stage>-<n>    one try at building a stage; written by the same process
    mlflow.json             how much of it has reached MLflow; written by `flows/tracking/shipper.py` only
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from flows.ledger.home import refreshes_root
from flows.ledger.process_identity import ProcessIdentity
from stages.core.contract import StrictModel
from stages.core.errors import StoreError, full_disk_named
from stages.core.files import write_atomically

StageState = Literal["waiting", "running", "built", "cached", "failed", "skipped"]
RefreshState = Literal["running", "completed", "not_promoted", "failed", "cancelled"]
KILLED = "its process was killed"
"""The error of a refresh that could not say itself how it ended."""


class StageEntry(StrictModel):
    """A stage within a refresh. `work` is its work folder while it runs; `artifact` is set once it is there.

    verdict: of a promotion, `promoted`, `not promoted` or `already champion`.
    """

    kind: str
    version: str
    state: StageState = "waiting"
    reason: str = ""
    seconds: float = 0.0
    work: Path | None = None
    artifact: Path | None = None
    mlflow_run_id: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    verdict: str | None = None
    error: str | None = None
    error_class: str | None = None


class RefreshRecord(StrictModel):
    """`refresh.json`.

    num_tries: how often it was started; a retry goes on in the same record. seconds: of the latest try.
    prefect_run_count: how often Prefect had started the flow run when the latest try began.
    """

    refresh: str
    recipe: str
    recipe_path: Path
    overrides: tuple[str, ...] = ()
    until: str | None = None
    force: tuple[str, ...] = ()
    state: RefreshState = "running"
    num_tries: int = 1
    started_ms: int
    seconds: float = 0.0
    process: ProcessIdentity
    hardware: str
    git_commit: str | None
    prefect_flow_run_id: str | None = None
    prefect_run_count: int | None = None
    error: str | None = None
    stages: dict[str, StageEntry]

    @property
    def interrupted(self) -> bool:
        """Whether its process died without saying how the refresh ended."""
        return self.state == "running" and not self.process.alive()

    @property
    def killed(self) -> bool:
        """Whether its process died so, be that recorded already or not."""
        return self.interrupted or self.error == KILLED

    @property
    def nothing_new(self) -> bool:
        """Whether all that it wanted was there already."""
        return self.state == "completed" and all(entry.state == "cached" for entry in self.stages.values())


class AttemptRecord(StrictModel):
    """One try at building a stage. Of `metrics.jsonl`, the bytes from `first_byte` to `last_byte` are this try's."""

    stage: str
    number: int
    work: Path
    started_ms: int
    first_byte: int
    params: dict[str, str]
    tags: dict[str, str]
    folder: Path | None = None
    last_byte: int | None = None
    ended_ms: int | None = None
    outcome: Literal["finished", "failed", "killed"] | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    files: tuple[str, ...] = ()
    error: str | None = None

    @property
    def key(self) -> str:
        return f"{self.stage}-{self.number}"


class ShippedAttempt(StrictModel):
    """How much of an attempt MLflow has: `next_byte` is where the rest of its `metrics.jsonl` begins."""

    run_id: str
    next_byte: int
    done: bool = False


class Shipped(StrictModel):
    """`mlflow.json`. `done`: MLflow has all of the refresh's tries up to this one, of which there are `num_tries`."""

    experiment_id: str | None = None
    parent_run_id: str | None = None
    attempts: dict[str, ShippedAttempt] = Field(default_factory=dict)
    done: bool = False
    num_tries: int = 1
    trouble: str | None = None

    def has_all_of(self, record: RefreshRecord) -> bool:
        """Whether nothing is left to be told; a retry has something to tell again."""
        return self.done and self.num_tries == record.num_tries


class RefreshFolder:
    """The folder of one refresh."""

    def __init__(self, path: Path):
        self.path = path

    def read(self) -> RefreshRecord:
        """Raises `StoreError` when there is none, or it cannot be read."""
        try:
            return RefreshRecord.model_validate_json((self.path / "refresh.json").read_text())
        except (OSError, ValidationError) as error:
            raise StoreError(f"reading the record of refresh {self.path.name}: {error}") from error

    def exists(self) -> bool:
        """Whether the refresh was begun."""
        return (self.path / "refresh.json").exists()

    def write(self, record: RefreshRecord) -> None:
        self._write("refresh.json", record)

    def attempts(self, stage: str | None = None) -> list[AttemptRecord]:
        """All attempts, or those at one stage, oldest first."""
        files = (self.path / "attempts").glob(f"{stage or '*'}-*.json")
        found = [AttemptRecord.model_validate_json(file.read_text()) for file in files]
        found = [attempt for attempt in found if stage in (None, attempt.stage)]
        return sorted(found, key=lambda attempt: attempt.started_ms)

    def write_attempt(self, attempt: AttemptRecord) -> None:
        self._write(f"attempts/{attempt.key}.json", attempt)

    def read_shipped(self) -> Shipped:
        try:
            return Shipped.model_validate_json((self.path / "mlflow.json").read_text())
        except FileNotFoundError:
            return Shipped()

    def write_shipped(self, shipped: Shipped) -> None:
        self._write("mlflow.json", shipped)

    def _write(self, name: str, record: StrictModel) -> None:
        """Raises `ResourceError` when the disk is full."""
        file = self.path / name
        with full_disk_named("recording the refresh", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, record.model_dump_json(indent=1))


def new_refresh_id(recipe: str) -> str:
    """Sortable, readable and unique: quickstart-20261121-084512-3f2a."""
    return f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def folder_of(refresh: str) -> RefreshFolder:
    """Where the refresh of this id is, or will be, recorded."""
    return RefreshFolder(refreshes_root() / refresh)


def refreshes() -> Iterator[RefreshFolder]:
    """All recorded refreshes, newest first."""
    files = refreshes_root().glob("*/refresh.json")
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        yield RefreshFolder(file.parent)


class RunningRefreshes:
    """Refreshes that say that they run; reads only records that have changed since it last looked, and theirs."""

    def __init__(self) -> None:
        self._ended: dict[str, int] = {}

    def all(self) -> Iterator[RefreshRecord]:
        """Those whose process died are among them."""
        for folder in refreshes():
            changed_ns = (folder.path / "refresh.json").stat().st_mtime_ns
            if self._ended.get(folder.path.name) == changed_ns:
                continue
            record = folder.read()
            if record.state == "running":
                yield record
            else:
                self._ended[folder.path.name] = changed_ns

    def of(self, recipe: str) -> list[RefreshRecord]:
        """Those of a recipe whose process lives."""
        return [record for record in self.all() if record.recipe == recipe and not record.interrupted]


def close_interrupted() -> list[str]:
    """Say of refreshes whose process died that they failed, and where their metrics end; returns their ids.

    It must be done before another attempt appends to the `metrics.jsonl` of the same work folder.
    """
    closed = []
    for folder in refreshes():
        record = folder.read()
        if record.interrupted:
            for attempt in folder.attempts():
                if attempt.outcome is None:
                    folder.write_attempt(end_attempt(attempt, "killed", error="the refresh was killed"))
            folder.write(_closed(record))
            closed.append(record.refresh)
    return closed


def end_attempt(
    attempt: AttemptRecord,
    outcome: Literal["finished", "failed", "killed"],
    *,
    folder: Path | None = None,
    metrics: dict[str, float] | None = None,
    tags: dict[str, str] | None = None,
    files: tuple[str, ...] = (),
    error: str | None = None,
) -> AttemptRecord:
    """The attempt with its end filled in. `folder` is where its files are now; default: where it worked."""
    folder = folder or attempt.work
    return attempt.model_copy(
        update={
            "folder": folder,
            "last_byte": metrics_size(folder),
            "ended_ms": now_ms(),
            "outcome": outcome,
            "metrics": metrics or {},
            "tags": {**attempt.tags, **(tags or {})},
            "files": files,
            "error": error,
        }
    )


def metrics_size(folder: Path) -> int:
    """Bytes of a work folder's `metrics.jsonl`, 0 when there is none."""
    try:
        return (folder / "metrics.jsonl").stat().st_size
    except FileNotFoundError:
        return 0


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def _closed(record: RefreshRecord) -> RefreshRecord:
    def close(entry: StageEntry) -> StageEntry:
        if entry.state == "running":
            return entry.model_copy(update={"state": "failed", "error": "the refresh was killed", "work": None})
        return entry.model_copy(update={"state": "skipped"}) if entry.state == "waiting" else entry

    stages = {name: close(entry) for name, entry in record.stages.items()}
    return record.model_copy(update={"state": "failed", "error": KILLED, "stages": stages})
