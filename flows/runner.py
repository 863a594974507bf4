"""Run one stage: look it up, lock it, start it, watch it, commit it. Knows neither Prefect nor MLflow."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from flows.plan import PlannedStage
from flows.record import Record
from flows.store import Store
from stages.contract import Lease, StageResult
from stages.errors import LifecycleError


class LiveServer(Protocol):
    """The process of a serve stage, which goes on after its artifact was committed."""

    lease: Lease

    def alive(self) -> bool:
        """Whether the process still runs."""

    def stop(self) -> None:
        """End it and all its descendants; returns when none is left."""


@dataclass(frozen=True)
class Attempt:
    """One try at building a stage. `resumed`: the work folder holds the scratch of an earlier try."""

    planned: PlannedStage
    work: Path
    number: int
    resumed: bool
    upstream: Mapping[str, Built]


@dataclass(frozen=True)
class Built:
    """A stage whose artifact is there. `server` is set for a serve stage that this refresh started."""

    name: str
    kind: str
    version: str
    state: Literal["built", "cached"]
    seconds: float
    artifact: Path
    record: Record
    server: LiveServer | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Final figures of the stage."""
        return self.record.metrics

    @property
    def mlflow_run_id(self) -> str | None:
        """The MLflow run of the attempt that built the artifact."""
        return self.record.mlflow_run_id


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. `folder` is where its files are now: the artifact, or the work folder of a failure."""

    folder: Path
    seconds: float
    result: StageResult | None
    error: BaseException | None


class Observer(Protocol):
    """Is told how a stage gets on, in the thread that runs it. It must not raise: tracking never stops training."""

    def waiting(self) -> None:
        """Another process builds the same artifact; called once."""

    def started(self, attempt: Attempt) -> str | None:
        """Called before the process starts; may return an MLflow run id, which goes into the record."""

    def tick(self) -> None:
        """Called about every 0.3 s while the process runs, and once after it has ended."""

    def ended(self, outcome: Outcome) -> None:
        """Called after the commit, or after the failure; exactly once for each `started`."""


def run_stage(
    planned: PlannedStage,
    upstream: Mapping[str, Built],
    store: Store,
    observer: Observer,
    *,
    attempt: int = 1,
    stop: threading.Event | None = None,
) -> Built:
    """Return the stage's artifact: a cached one when it stands on the same content, else a newly built one.

    upstream: at least every stage in `planned.ancestors`, by name.
    attempt: how often this refresh has tried the stage, this time included. A forced stage starts from an empty work
    folder at its first attempt only.
    stop: when set (from another thread), the stage is stopped and `RefreshStoppedError` raised.

    Raises the stage's own error class, `StageCrashError`, `StageTimeoutError`, `StoreError` (also for a damaged
    artifact: only a forced stage replaces it), `ResourceError` for a full disk.
    """
    raise LifecycleError
