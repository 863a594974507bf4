"""What a cluster's job is ordered to do, and what it reports: files in `.launch/` of the stage's work folder.

    order.json         what to start on each node (`JobOrder`); gone when no job can be left in the cluster
    environment.json   the environment of the stage's processes; mode 0600, removed when the job has ended
    heartbeat          changes every few seconds while somebody waits for the job
    owner              which start of the job may write to the work folder
    ended.json         how the stage's processes ended, unless the cluster ended the job (`JobEnd`)

The folder lies in the store, on a file system that the nodes share; the environment, which may hold secrets, goes
through neither command lines, nor job scripts, nor the cluster's own records. It is no part of the artifact.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from flows.store.content import LAUNCH_FOLDER
from stages.core.clusters import KubernetesOptions, SlurmOptions
from stages.core.contract import StageEvent
from stages.core.errors import LifecycleError
from stages.core.files import write_atomically
from stages.core.strict import StrictModel

HEARTBEAT_PATIENCE_S = 60.0
"""A job that has seen no heartbeat for this long ends itself. File systems over a network may show changes late."""


class JobOrder(StrictModel):
    """`order.json`. `job` names the job in the cluster, and no other; `stage_command` are arguments of Python.

    home: the folder that holds the store, which the nodes share.
    """

    job: str
    launcher: Literal["slurm", "kubernetes"]
    stage: str
    work: Path
    home: Path
    stage_command: list[str]
    nodes: PositiveInt
    processes: PositiveInt
    threads: PositiveInt | None
    network_interface: str | None = None
    interruptions_without_progress: int
    slurm: SlurmOptions
    kubernetes: KubernetesOptions
    heartbeat_patience_s: PositiveFloat = HEARTBEAT_PATIENCE_S

    @property
    def cores_per_node(self) -> int:
        """Cores that the stage's threads keep busy on a node."""
        return (self.threads or 1) * self.processes


class JobEnd(StrictModel):
    """`ended.json`: exit code of the stage's processes, or None when the cluster asked them to end."""

    job_id: str
    exit_code: int | None


@dataclass(frozen=True)
class Waiting:
    """The job does not run yet, in the cluster's words: `Priority`, `0/4 nodes are available`."""

    reason: str


@dataclass(frozen=True)
class Running:
    """It runs, or is about to, or has just ended; there is nothing to report."""


@dataclass(frozen=True)
class Interrupted:
    """The job is over, the stage is not: another job continues from the last checkpoint. `by`: what ended the job."""

    by: str
    by_time_limit: bool = False


@dataclass(frozen=True)
class Finished:
    """The stage's processes ended by themselves; what they left says the rest."""

    exit_code: int


@dataclass(frozen=True)
class Failed:
    """The cluster ended the stage."""

    error: LifecycleError


JobOutcome = Interrupted | Finished | Failed


@dataclass(frozen=True)
class JobFolder:
    """The files of one job."""

    path: Path

    @classmethod
    def of(cls, work: Path) -> JobFolder:
        """That of a stage's work folder; it need not exist."""
        return cls(work / LAUNCH_FOLDER)

    def write(self, order: JobOrder, environment: Mapping[str, str]) -> None:
        """Leave what the job is to find."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._environment.touch(mode=0o600)
        self._environment.write_text(json.dumps(dict(environment)), encoding="utf-8")
        write_atomically(self.path / "order.json", order.model_dump_json(indent=1))
        self.beat()

    def order(self) -> JobOrder | None:
        """The order; None when there is none, or none any more."""
        try:
            return JobOrder.model_validate_json((self.path / "order.json").read_bytes())
        except FileNotFoundError:
            return None

    def environment(self) -> dict[str, str]:
        """The environment that was handed over."""
        return json.loads(self._environment.read_bytes())

    def forget_environment(self) -> None:
        """Remove what may be secret."""
        self._environment.unlink(missing_ok=True)

    def close(self) -> None:
        """Note that no job is left in the cluster."""
        (self.path / "order.json").unlink(missing_ok=True)

    def beat(self) -> None:
        """Give a sign of life."""
        (self.path / "heartbeat").write_text(str(time.time_ns()), encoding="utf-8")

    def last_beat(self) -> str:
        """The last sign of life; another text than before means a new one. Empty when there is none."""
        try:
            return (self.path / "heartbeat").read_text(encoding="utf-8")
        except OSError:
            return ""

    def claim(self, owner: str) -> None:
        """From now on the start of the job that is so named may write to the work folder, and no earlier one.

        A node that Slurm lost sight of goes on working, while the job starts again on others.
        """
        (self.path / "ended.json").unlink(missing_ok=True)
        write_atomically(self.path / "owner", owner)

    def owner(self) -> str | None:
        """The last claim."""
        try:
            return (self.path / "owner").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def write_end(self, end: JobEnd) -> None:
        """Say how the stage's processes ended."""
        write_atomically(self.path / "ended.json", end.model_dump_json())

    def end(self, job_id: str) -> JobEnd | None:
        """How the processes of this job ended; None as long as they have not, or when they were killed."""
        try:
            end = JobEnd.model_validate_json((self.path / "ended.json").read_bytes())
        except FileNotFoundError:
            return None
        return end if end.job_id == job_id else None

    def report(self, event: Literal["milestone", "warning"], message: str) -> None:
        """Tell people who watch the refresh. Not while the stage runs: rank 0 writes to the same file then."""
        line = StageEvent(time_ms=time.time_ns() // 1_000_000, event=event, message=message)
        with (self.path.parent / "events.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(line.model_dump_json(exclude_none=True) + "\n")

    @property
    def _environment(self) -> Path:
        return self.path / "environment.json"


class Pulse:
    """Listens for heartbeats. Clocks of machines differ, so only changes count, by this machine's own clock."""

    def __init__(self, folder: JobFolder, patience_s: float) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._beat = folder.last_beat()
        self._heard_s = time.monotonic()

    def is_lost(self) -> bool:
        """Whether there was none for longer than the patience."""
        beat = self._folder.last_beat()
        if beat != self._beat:
            self._beat, self._heard_s = beat, time.monotonic()
        return time.monotonic() - self._heard_s > self._patience_s
