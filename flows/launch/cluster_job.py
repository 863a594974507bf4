"""Description, states and files of a stage's cluster job, common to Slurm, Kubernetes and Ray.

Files in `.launch/` of the stage's work folder, which are no part of the artifact:

order.json         what to start on each node (`JobOrder`); removed when no job can be left in the cluster
environment.json   environment of the stage's processes; mode 0600, removed when the job has ended
heartbeat          changes every few seconds while the agent waits for the job
owner              which start of the job may write to the work folder
ended.json         exit of the stage's processes, unless the cluster ended the job (`JobEnd`)

The nodes share the file system of the folder, or have a copy, which comes and goes through a bucket. The environment
may hold secrets, so it goes through neither command lines, nor job scripts, nor the cluster's records.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import PositiveFloat, PositiveInt

from flows.launch.network import Rendezvous
from flows.store.content import LAUNCH_FOLDER
from stages.core.contract import StageEvent
from stages.core.errors import LifecycleError
from stages.core.fields import StrictModel
from stages.core.files import write_atomically
from stages.core.launchers.registry import LauncherBlocks

HEARTBEAT, ENDED = "heartbeat", "ended.json"
HEARTBEAT_PATIENCE_S = 60.0
"""Seconds without a heartbeat from the submitter after which a job ends itself; network disks show changes late."""
BUCKET_PATIENCE_S = 300.0
"""The same where heartbeats pass through a bucket, which may not answer for minutes."""


class JobOrder(LauncherBlocks):
    """Description of a cluster job, stored as `order.json`: the command of each node, and the resources it needs.

    job: unique name in the cluster. home: its folder, here and on the nodes. stage_command: arguments of Python.
    interruptions_without_progress: jobs in a row that may end without progress before the stage fails.
    through: address of the shared store through which the job's files pass; None where the nodes share the home.
    """

    job: str
    stage: str
    work: Path
    home: Path
    stage_command: list[str]
    nodes: PositiveInt
    processes: PositiveInt
    threads: PositiveInt | None
    network_interface: str | None = None
    interruptions_without_progress: int
    through: str | None = None
    heartbeat_patience_s: PositiveFloat = HEARTBEAT_PATIENCE_S

    @property
    def cores_per_node(self) -> int:
        """Return the number of CPU cores that the stage's threads keep busy on one node."""
        return (self.threads or 1) * self.processes


class JobEnd(StrictModel):
    """End of a cluster job, stored as `ended.json`: the stage's exit code, or None if the cluster asked it to end."""

    job_id: str
    exit_code: int | None


@dataclass(frozen=True)
class Waiting:
    """State of a cluster job before its start. reason: in the cluster's words, such as `Priority`."""

    reason: str


@dataclass(frozen=True)
class Running:
    """State of a cluster job that needs no message to the user: it runs, is about to run, or has just ended."""


@dataclass(frozen=True)
class Interrupted:
    """Outcome of a job that ended before its stage; another continues from the last checkpoint. by: what ended it."""

    by: str
    by_time_limit: bool = False


@dataclass(frozen=True)
class Finished:
    """Outcome of a cluster job whose stage exited by itself, with its result or error in its files."""

    exit_code: int


@dataclass(frozen=True)
class Failed:
    """Outcome of a cluster job that the cluster ended for good, with the error to show."""

    error: LifecycleError


JobOutcome = Interrupted | Finished | Failed


@dataclass(frozen=True)
class JobFolder:
    """Files of one cluster job, in the folder `.launch/` of the stage's work folder."""

    path: Path

    @classmethod
    def of(cls, work: Path) -> JobFolder:
        """Return the folder for the files of a stage's cluster job, which need not exist yet."""
        return cls(work / LAUNCH_FOLDER)

    def write(self, order: JobOrder, environment: Mapping[str, str]) -> None:
        self.path.mkdir(mode=0o700, exist_ok=True)
        # Private before the first byte is in it.
        self._environment.touch(mode=0o600)
        self._environment.write_text(json.dumps(dict(environment)), encoding="utf-8")
        # After the environment: from here on a job may be in the cluster, and the next attempt looks for it.
        write_atomically(self.path / "order.json", order.model_dump_json(indent=1))
        self.beat()

    def order(self) -> JobOrder | None:
        """Return the description of the stage's cluster job; None when no job of it can be left in the cluster."""
        try:
            return JobOrder.model_validate_json((self.path / "order.json").read_bytes())
        except FileNotFoundError:
            return None

    def environment(self) -> dict[str, str]:
        return json.loads(self._environment.read_bytes())

    def forget_environment(self) -> None:
        self._environment.unlink(missing_ok=True)

    def close(self) -> None:
        """Record that no job of the stage is left in the cluster."""
        (self.path / "order.json").unlink(missing_ok=True)

    def beat(self) -> None:
        """Write a heartbeat, which shows the cluster job that its submitter is alive."""
        # Not atomic, since a torn text is new as well.
        (self.path / HEARTBEAT).write_text(str(time.time_ns()), encoding="utf-8")

    def last_beat(self) -> str:
        """Return the text of the submitter's last heartbeat, "" without any. Every heartbeat has a new text."""
        try:
            return (self.path / HEARTBEAT).read_text(encoding="utf-8")
        except OSError:
            return ""

    def claim(self, owner: str) -> None:
        """Record which start of the job alone may write to the stage's work folder.

        A node that Slurm lost sight of goes on working while the job starts again on other nodes.
        """
        # A requeued Slurm job has the same id, and the end of its former start must not be taken for its own.
        (self.path / ENDED).unlink(missing_ok=True)
        write_atomically(self.path / "owner", owner)

    def owner(self) -> str | None:
        """Return the id of the cluster job's latest start, which alone may write to the work folder, or None."""
        try:
            return (self.path / "owner").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def write_end(self, end: JobEnd) -> None:
        write_atomically(self.path / ENDED, end.model_dump_json())

    def end(self, job_id: str) -> JobEnd | None:
        """Return how the stage's processes ended in a cluster job; None while they run, or when they were killed."""
        try:
            end = JobEnd.model_validate_json((self.path / ENDED).read_bytes())
        except FileNotFoundError:
            return None
        return end if end.job_id == job_id else None

    def report(self, event: Literal["milestone", "warning"], message: str) -> None:
        """Append a milestone or warning to the stage's event file, but not while it runs: rank 0 then writes there."""
        line = StageEvent(time_ms=time.time_ns() // 1_000_000, event=event, message=message)
        with (self.path.parent / "events.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(line.model_dump_json(exclude_none=True) + "\n")

    @property
    def _environment(self) -> Path:
        return self.path / "environment.json"


class Jobs(Protocol):
    """Interface of the clients of clusters, which submit, observe and cancel the cluster jobs of one stage."""

    def submit(self) -> str:
        """Submit a cluster job for the stage and return the job's id."""

    def look(self, job_id: str) -> JobOutcome | Waiting | Running:
        """Return the state of a cluster job. Raises `TransientError` when the cluster does not answer."""

    def name_of(self, job_id: str) -> str:
        """Return the name of a cluster job for messages to the user, such as `Slurm job 4711`."""

    def cancel(self) -> bool:
        """Cancel every cluster job of the stage; return whether none is left."""


@dataclass(frozen=True)
class Cluster:
    """Functions and flags in which the launchers of clusters differ.

    connect: returns the client for the jobs of an order. environment: returns the variables of this process that the
    stage's own machine needs. place: returns a node's place in a job of several, from the variables that the cluster
    sets there. way_in: returns how this machine reaches the cluster, for `lifecycle doctor`; None where it does not.
    collects_output: the cluster writes all nodes' output to the stage's log, instead of each node. records_end: a
    program around `node_task` records how the job ended, instead of the first node's.
    """

    connect: Callable[[JobFolder, JobOrder], Jobs]
    environment: Callable[[], dict[str, str]]
    place: Callable[[Mapping[str, str]], Rendezvous]
    way_in: Callable[[], str | None]
    collects_output: bool
    records_end: bool


class HeartbeatMonitor:
    """Monitor of the submitter's heartbeats inside a cluster job, which ends itself when they stop.

    Clocks of machines differ, so it compares texts and measures time by this machine's own clock.
    """

    def __init__(self, folder: JobFolder, patience_s: float) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._beat = folder.last_beat()
        self._heard_s = time.monotonic()

    def is_lost(self) -> bool:
        """Return whether no heartbeat has come for so long that the job's submitter counts as dead."""
        beat = self._folder.last_beat()
        if beat != self._beat:
            self._beat, self._heard_s = beat, time.monotonic()
        return time.monotonic() - self._heard_s > self._patience_s
