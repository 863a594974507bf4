"""Events of a ledger → the refresh, its stages and attempts as they are after them. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from flows.ledger.events import (
    AnyEvent,
    AttemptBegan,
    AttemptEnded,
    CompareBegan,
    FlowRunKnown,
    LayoutMeasured,
    Outcome,
    RefreshBegan,
    RefreshEnded,
    RefreshKilled,
    RefreshState,
    StageCached,
    StageFailed,
    StageWaits,
    TrialEnded,
)
from flows.ledger.home import HomeIdentity, ledger_root
from flows.ledger.process_identity import ProcessIdentity, Standing, is_silent
from stages.core.contract import StageResult

StageState = Literal["waiting", "running", "built", "cached", "failed", "cancelled", "skipped"]
StageEvent = AttemptBegan | AttemptEnded | StageWaits | StageCached | StageFailed
STATES: dict[str, StageState] = {"stage_cached": "cached", "stage_failed": "failed"}
STOPPED = ("RefreshStoppedError", "KeyboardInterrupt")
"""Errors of what was stopped on request; earlier versions called an attempt that ended so killed."""
"""What an event makes of its stage."""
ANOTHER_TRY = "another try"
KILLED = "its process was killed"
COPIED = "this home was copied while it ran; how it ended, only the original home knows"
"""Errors of a refresh that could not say itself how it ended."""
HEARTBEAT_FILE, LEDGER_FILE = "heartbeat", "ledger.jsonl"


@dataclass(frozen=True)
class StageEntry:
    """A stage within a refresh. `work` is its work folder while it runs; `artifact` is set once it is there.

    attempt: the key (`REFRESH/STAGE-NUMBER`) of the try that runs, failed, or built the artifact, here or in an earlier
    refresh. reason: of the plan, why it is built or not. waits_for: what keeps it, once its upstream stages are done.
    error: of a stage that failed; of one that waits, why it is tried again. killed: a process of that attempt was.
    """

    kind: str
    version: str
    reason: str = ""
    upstream: tuple[str, ...] = ()
    waits_for: str = ""
    state: StageState = "waiting"
    seconds: float = 0.0
    work: Path | None = None
    artifact: Path | None = None
    attempt: str | None = None
    built: StageResult | None = None
    error: str | None = None
    error_class: str | None = None
    killed: bool = False

    @functools.cached_property
    def result(self) -> StageResult:
        """What the stage said at its end; of a cached one, what its artifact holds, if that is still there."""
        if self.built or not self.artifact:
            return self.built or StageResult()
        return final_result(self.artifact)

    @property
    def metrics(self) -> dict[str, float]:
        """Final metrics."""
        return self.result.metrics

    @property
    def verdict(self) -> str | None:
        """Of a promotion: `promoted`, `not promoted` or `already champion`."""
        return self.result.tags.get("verdict")


@dataclass(frozen=True)
class AttemptRecord:
    """One try at building a stage. Of `metrics.jsonl`, the bytes from `first_byte` to `last_byte` are this try's.

    folder: where its files are now, once it has ended. num_devices: that it keeps busy; None where nobody noted that.
    """

    stage: str
    number: int
    work: Path
    started_ms: int
    first_byte: int
    params: dict[str, str]
    tags: dict[str, str]
    num_devices: int | None = None
    folder: Path | None = None
    last_byte: int | None = None
    ended_ms: int | None = None
    energy_j: float | None = None
    outcome: Outcome | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    error: str | None = None
    retried: bool = False
    """The refresh tried the stage again by itself."""

    @property
    def name(self) -> str:
        """Unlike that of any other attempt of the refresh."""
        return f"{self.stage}-{self.number}"


@dataclass(frozen=True)
class RefreshRecord:
    """A refresh after the events of its ledger.

    num_tries: how often it was started; a retry goes on in the same ledger. seconds: of the latest try.
    prefect_run_count: how often Prefect had started the flow run when the latest try began.
    """

    refresh: str
    recipe: str
    recipe_path: Path
    process: ProcessIdentity
    hardware: str
    git_commit: str | None
    started_ms: int
    recipe_text: str = ""
    overrides: tuple[str, ...] = ()
    until: str | None = None
    force: tuple[str, ...] = ()
    state: RefreshState = "running"
    num_tries: int = 1
    seconds: float = 0.0
    prefect_flow_run_id: str | None = None
    prefect_run_count: int | None = None
    home: HomeIdentity | None = None
    error: str | None = None
    stages: dict[str, StageEntry] = field(default_factory=dict)
    attempts: dict[str, AttemptRecord] = field(default_factory=dict)
    """By name, oldest first; of all tries."""
    comparison: CompareBegan | None = None
    trials: tuple[TrialEnded, ...] = ()
    measured: dict[int, LayoutMeasured] = field(default_factory=dict)
    """By the layout's place."""

    @property
    def is_copied(self) -> bool:
        """Return whether another home, of which this one is a copy, began it."""
        return self.home is not None and not self.home.is_here()

    @property
    def standing(self) -> Standing:
        """Return whether the process of the latest try runs. In a copied home it does not, whatever its original does.

        One elsewhere is dead once it has given no sign of life for long.
        """
        if self.is_copied:
            return "dead"
        standing, folder = self.process.standing(), ledger_root() / self.refresh
        if standing == "foreign" and is_silent(self.process, folder / HEARTBEAT_FILE, folder / LEDGER_FILE):
            return "dead"
        return standing

    @property
    def interrupted(self) -> bool:
        """Return whether its process died without saying how the refresh ended."""
        return self.state == "running" and self.standing == "dead"

    @property
    def elsewhere(self) -> str | None:
        """Host on which it may run, where nobody can see it from here."""
        unknown = self.state == "running" and self.standing == "foreign"
        return self.process.host or "another host" if unknown else None

    @property
    def unsaid_end(self) -> str | None:
        """Error of a refresh that could not say itself how it ended, be that recorded already or not."""
        if self.interrupted:
            return COPIED if self.is_copied else KILLED
        return self.error if self.error in (KILLED, COPIED) else None

    @property
    def killed(self) -> bool:
        """Return whether nobody knows how it ended."""
        return self.unsaid_end is not None

    @property
    def nothing_new(self) -> bool:
        """Whether all that it wanted was there already."""
        cached = all(entry.state == "cached" for entry in self.stages.values())
        return self.state == "completed" and cached and not self.comparison

    def trials_of(self, layout: int) -> list[TrialEnded]:
        """All rounds of a layout, in order."""
        return [trial for trial in self.trials if trial.layout == layout]

    def key_of(self, stage: str, number: int) -> str:
        """What artifacts and other refreshes call an attempt by."""
        return f"{self.refresh}/{stage}-{number}"


def fold(events: Iterable[AnyEvent]) -> RefreshRecord:
    """The refresh after these events, the first of which began it."""
    record = None
    for event in events:
        record = after(record, event)
    assert record is not None, "a ledger is made with its first event"
    return record


def after(record: RefreshRecord | None, event: AnyEvent) -> RefreshRecord:
    """The refresh after one more event."""
    if isinstance(event, RefreshBegan):
        return _begun(record, event)
    assert record is not None, "the first event begins the refresh"
    match event:
        case FlowRunKnown():
            return replace(record, **_said(event))
        case CompareBegan():
            return replace(record, comparison=event)
        case TrialEnded():
            return replace(record, trials=(*record.trials, event))
        case LayoutMeasured():
            return replace(record, measured={**record.measured, event.layout: event})
        case RefreshEnded():
            return _over(replace(record, **_said(event)))
        case RefreshKilled():
            named = record.state == "running" and record.process == event.process
            error = COPIED if event.copied else KILLED
            return _over(replace(record, state="failed", error=error)) if named else record
        case _:
            return _after_stage(record, event)


def _after_stage(record: RefreshRecord, event: StageEvent) -> RefreshRecord:
    match event:
        case AttemptBegan():
            return _attempt_begun(record, event)
        case AttemptEnded():
            return _attempt_ended(record, event)
        case StageWaits():
            return _with_entry(record, event.stage, state="waiting", work=None, waits_for=event.reason)
        case StageCached() | StageFailed():
            said = {"work": None, "error": None, "error_class": None, "killed": False, **_said(event)}
            if said.pop("retried", False):
                return _with_entry(record, said.pop("stage"), state="waiting", waits_for=ANOTHER_TRY, **said)
            state = "cancelled" if said["error_class"] in STOPPED else STATES[event.event]
            return _with_entry(record, said.pop("stage"), state=state, **said)


def with_time_so_far(record: RefreshRecord, now_ms: int) -> RefreshRecord:
    """Return the record with the seconds that what runs has taken until now; the ledger has them at its end."""
    if record.state != "running" or record.interrupted:
        return record
    began_ms = {attempt.stage: attempt.started_ms for attempt in record.attempts.values()}
    stages = {
        name: replace(entry, seconds=(now_ms - began_ms[name]) / 1000) if entry.state == "running" else entry
        for name, entry in record.stages.items()
    }
    return replace(record, seconds=(now_ms - record.started_ms) / 1000, stages=stages)


def final_result(folder: Path) -> StageResult:
    """The `result.json` of an artifact; an empty one when it is not there any more."""
    try:
        return StageResult.model_validate_json((folder / "result.json").read_bytes())
    except (OSError, ValueError):
        return StageResult()


def _begun(record: RefreshRecord | None, event: RefreshBegan) -> RefreshRecord:
    stages = {name: StageEntry(**vars(one)) for name, one in event.stages.items()}
    begun = RefreshRecord(**{**_said(event), "stages": stages}, started_ms=event.time_ms)
    return replace(begun, num_tries=record.num_tries + 1, attempts=record.attempts) if record else begun


def _attempt_begun(record: RefreshRecord, event: AttemptBegan) -> RefreshRecord:
    attempt = AttemptRecord(**_said(event), started_ms=event.time_ms)
    record = replace(record, attempts={**record.attempts, attempt.name: attempt})
    key = record.key_of(event.stage, event.number)
    changes = {"work": event.work, "attempt": key, "error": None, "error_class": None, "killed": False}
    return _with_entry(record, event.stage, state="running", **changes)


def _attempt_ended(record: RefreshRecord, event: AttemptEnded) -> RefreshRecord:
    """The first end counts: who closes the ledger of a dead process may not be the only one."""
    attempt = record.attempts[f"{event.stage}-{event.number}"]
    if attempt.outcome:
        return record
    outcome: Outcome = "cancelled" if event.error_class in STOPPED else event.outcome
    ended = replace(
        attempt,
        folder=event.folder,
        last_byte=event.last_byte,
        ended_ms=event.time_ms,
        energy_j=event.energy_j,
        outcome=outcome,
        metrics={**event.metrics, "stage_time_s": event.seconds} if event.outcome == "finished" else {},
        tags={**attempt.tags, **event.tags},
        files=event.files,
        error=event.error,
        retried=event.retried,
    )
    record = replace(record, attempts={**record.attempts, ended.name: ended})
    said = {"seconds": round(event.seconds, 2), "error": event.error, "error_class": event.error_class, "work": None}
    said["killed"] = outcome == "killed"
    if event.retried:
        return _with_entry(record, event.stage, state="waiting", waits_for=ANOTHER_TRY, **said)
    if event.outcome != "finished":
        return _with_entry(record, event.stage, state="cancelled" if outcome == "cancelled" else "failed", **said)
    result = StageResult(metrics=event.metrics, tags=event.tags, files=list(event.files))
    return _with_entry(record, event.stage, state="built", artifact=event.folder, built=result, **said)


def _over(record: RefreshRecord) -> RefreshRecord:
    """A refresh that is over: what did not end was skipped."""
    stages = {
        name: replace(entry, state="skipped", work=None) if entry.state in ("waiting", "running") else entry
        for name, entry in record.stages.items()
    }
    return replace(record, stages=stages)


def _said(event: AnyEvent) -> dict[str, Any]:
    return {name: value for name, value in event if name not in ("event", "time_ms")}


def _with_entry(record: RefreshRecord, stage: str, **changes: Any) -> RefreshRecord:
    entry = replace(record.stages[stage], **changes)
    return replace(record, stages={**record.stages, stage: entry})
