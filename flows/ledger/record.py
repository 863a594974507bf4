"""State of a refresh, its stages and attempts, computed from the events of its ledger. Pure."""

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
"""State of a stage after an event of the ledger that belongs to no attempt, by the event's name."""
STOPPED = ("RefreshStoppedError", "KeyboardInterrupt")
"""Errors of attempts that were stopped on request; old versions recorded such attempts as killed."""
ANOTHER_TRY = "another try"
KILLED = "its process was killed"
COPIED = "this home was copied while it ran; how it ended, only the original home knows"
"""Error of a refresh that could not record its own end, because its home was copied; `KILLED`: its process died.

Ledgers hold both texts, so they must not change.
"""
HEARTBEAT_FILE, LEDGER_FILE = "heartbeat", "ledger.jsonl"


@dataclass(frozen=True)
class StageEntry:
    """Stage within a refresh.

    reason: why the plan builds it or not.
    waits_for: what it waits for, once its upstream stages are done.
    work: its work folder while it runs.
    artifact: its artifact, once there is one.
    attempt: key (`REFRESH/STAGE-NUMBER`) of the attempt that runs, failed, or built the artifact, in whichever refresh.
    error: why it failed, or, while it waits, why it is tried again.
    killed: a process of that attempt was killed.
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
        """Return the final result of the stage; of a cached one, from its artifact, empty if that is gone."""
        if self.built or not self.artifact:
            return self.built or StageResult()
        return final_result(self.artifact)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the final metrics of the stage."""
        return self.result.metrics

    @property
    def verdict(self) -> str | None:
        """Return the verdict of a promotion: `promoted`, `not promoted` or `already champion`; else None."""
        return self.result.tags.get("verdict")


@dataclass(frozen=True)
class AttemptRecord:
    """Attempt at building a stage: the events of its beginning and its end.

    ended: None while it runs, or until the ledger of a dead refresh is closed.
    """

    began: AttemptBegan
    ended: AttemptEnded | None = None

    @property
    def name(self) -> str:
        """Return the name of the attempt, unique within the refresh."""
        return f"{self.began.stage}-{self.began.number}"

    @property
    def outcome(self) -> Outcome | None:
        """Return the outcome of the attempt; None while it runs."""
        if self.ended and self.ended.error_class in STOPPED:
            return "cancelled"
        return self.ended.outcome if self.ended else None

    @property
    def folder(self) -> Path:
        """Return the folder of the attempt's files: its work folder until it has ended."""
        return self.ended.folder if self.ended else self.began.work

    @property
    def last_byte(self) -> int | None:
        """Return the offset at which the attempt's part of the stage's metrics file ends; None while it grows."""
        return self.ended.last_byte if self.ended else None

    @property
    def seconds(self) -> float | None:
        """Return the duration of the attempt; None while it runs."""
        return (self.ended.time_ms - self.began.time_ms) / 1000 if self.ended else None

    @property
    def metrics(self) -> dict[str, float]:
        """Return the final metrics with `stage_time_s`, the run time of its process; empty unless it finished."""
        if self.ended and self.ended.outcome == "finished":
            return {**self.ended.metrics, "stage_time_s": self.ended.seconds}
        return {}

    @property
    def tags(self) -> dict[str, str]:
        """Return the attempt's tags, of its beginning and of its end."""
        return {**self.began.tags, **(self.ended.tags if self.ended else {})}


@dataclass(frozen=True)
class RefreshRecord:
    """State of a refresh, computed from the events of its ledger.

    num_tries: number of times that it was started; a retry continues in the same ledger.
    seconds: of the latest try.
    prefect_run_count: number of times that Prefect had started the flow run when the latest try began.
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
    """Attempts of all tries by name, oldest first."""
    comparison: CompareBegan | None = None
    trials: tuple[TrialEnded, ...] = ()
    measured: dict[int, LayoutMeasured] = field(default_factory=dict)
    """Results of a comparison's layouts by the layout's index."""

    @property
    def is_copied(self) -> bool:
        """Return whether the refresh was begun by another home, of which this one is a copy."""
        return self.home is not None and not self.home.is_here()

    @property
    def standing(self) -> Standing:
        """Return the state of the refresh's latest process; `dead` in a copied home.

        A process elsewhere is dead once it has given no sign of life for long.
        """
        if self.is_copied:
            return "dead"
        standing, folder = self.process.standing(), ledger_root() / self.refresh
        if standing == "foreign" and is_silent(self.process, folder / HEARTBEAT_FILE, folder / LEDGER_FILE):
            return "dead"
        return standing

    @property
    def interrupted(self) -> bool:
        """Return whether the refresh's process died without recording how it ended."""
        return self.state == "running" and self.standing == "dead"

    @property
    def elsewhere(self) -> str | None:
        """Return the host on which the refresh may run, unseen from here; else None."""
        unknown = self.state == "running" and self.standing == "foreign"
        return self.process.host or "another host" if unknown else None

    @property
    def unsaid_end(self) -> str | None:
        """Return the error of a refresh that could not record its own end; None for others."""
        if self.interrupted:
            return COPIED if self.is_copied else KILLED
        return self.error if self.error in (KILLED, COPIED) else None

    @property
    def killed(self) -> bool:
        """Return whether the refresh could not record its own end."""
        return self.unsaid_end is not None

    @property
    def nothing_new(self) -> bool:
        """Return whether every stage of the refresh was cached."""
        cached = all(entry.state == "cached" for entry in self.stages.values())
        return self.state == "completed" and cached and not self.comparison

    @property
    def latest_try(self) -> list[AttemptRecord]:
        """Return the attempts since the refresh was last started, in order."""
        return [attempt for attempt in self.attempts.values() if attempt.began.time_ms >= self.started_ms]

    def attempts_at(self, stage: str) -> list[AttemptRecord]:
        """Return the attempts of all tries at a stage, in order."""
        return [attempt for attempt in self.attempts.values() if attempt.began.stage == stage]

    def trials_of(self, layout: int) -> list[TrialEnded]:
        """Return the trials of a layout in all rounds of a comparison, in order."""
        return [trial for trial in self.trials if trial.layout == layout]

    def key_of(self, stage: str, number: int) -> str:
        """Return the key of an attempt, by which artifacts and other refreshes refer to it."""
        return f"{self.refresh}/{stage}-{number}"


def fold(events: Iterable[AnyEvent]) -> RefreshRecord:
    """Return the refresh after these events, the first of which began it."""
    record = None
    for event in events:
        record = after(record, event)
    assert record is not None, "a ledger is made with its first event"
    return record


def after(record: RefreshRecord | None, event: AnyEvent) -> RefreshRecord:
    """Return the record of a refresh after one more event."""
    if isinstance(event, RefreshBegan):
        return _begun(record, event)
    assert record is not None, "the first event begins the refresh"
    match event:
        case FlowRunKnown():
            return replace(record, **_fields(event))
        case CompareBegan():
            return replace(record, comparison=event)
        case TrialEnded():
            return replace(record, trials=(*record.trials, event))
        case LayoutMeasured():
            return replace(record, measured={**record.measured, event.layout: event})
        case RefreshEnded():
            return _over(replace(record, **_fields(event)))
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
            fields = {"work": None, "error": None, "error_class": None, "killed": False, **_fields(event)}
            if fields.pop("retried", False):
                return _with_entry(record, fields.pop("stage"), state="waiting", waits_for=ANOTHER_TRY, **fields)
            state = "cancelled" if fields["error_class"] in STOPPED else STATES[event.event]
            return _with_entry(record, fields.pop("stage"), state=state, **fields)


def with_time_so_far(record: RefreshRecord, now_ms: int) -> RefreshRecord:
    """Return the record with the seconds that running stages have taken until now.

    The ledger has the seconds of a stage only at its end.
    """
    if record.state != "running" or record.interrupted:
        return record
    began_ms = {attempt.began.stage: attempt.began.time_ms for attempt in record.attempts.values()}
    stages = {
        name: replace(entry, seconds=(now_ms - began_ms[name]) / 1000) if entry.state == "running" else entry
        for name, entry in record.stages.items()
    }
    return replace(record, seconds=(now_ms - record.started_ms) / 1000, stages=stages)


def final_result(folder: Path) -> StageResult:
    """Return the `result.json` of an artifact, or an empty result when the file is gone."""
    try:
        return StageResult.model_validate_json((folder / "result.json").read_bytes())
    except (OSError, ValueError):
        return StageResult()


def _begun(record: RefreshRecord | None, event: RefreshBegan) -> RefreshRecord:
    stages = {name: StageEntry(**vars(entry)) for name, entry in event.stages.items()}
    begun = RefreshRecord(**{**_fields(event), "stages": stages}, started_ms=event.time_ms)
    return replace(begun, num_tries=record.num_tries + 1, attempts=record.attempts) if record else begun


def _attempt_begun(record: RefreshRecord, event: AttemptBegan) -> RefreshRecord:
    attempt = AttemptRecord(event)
    record = replace(record, attempts={**record.attempts, attempt.name: attempt})
    key = record.key_of(event.stage, event.number)
    changes = {"work": event.work, "attempt": key, "error": None, "error_class": None, "killed": False}
    return _with_entry(record, event.stage, state="running", **changes)


def _attempt_ended(record: RefreshRecord, event: AttemptEnded) -> RefreshRecord:
    """Return the record after the end of an attempt. Only the first end counts.

    Several processes may close the ledger of a dead one.
    """
    begun = record.attempts[f"{event.stage}-{event.number}"]
    if begun.ended:
        return record
    attempt = replace(begun, ended=event)
    record = replace(record, attempts={**record.attempts, attempt.name: attempt})
    changes = {"seconds": round(event.seconds, 2), "error": event.error, "error_class": event.error_class, "work": None}
    changes["killed"] = attempt.outcome == "killed"
    if event.retried:
        return _with_entry(record, event.stage, state="waiting", waits_for=ANOTHER_TRY, **changes)
    if event.outcome != "finished":
        state = "cancelled" if attempt.outcome == "cancelled" else "failed"
        return _with_entry(record, event.stage, state=state, **changes)
    result = StageResult(metrics=event.metrics, tags=event.tags, files=list(event.files))
    return _with_entry(record, event.stage, state="built", artifact=event.folder, built=result, **changes)


def _over(record: RefreshRecord) -> RefreshRecord:
    """Return the record of a refresh that ended: unfinished stages were skipped."""
    stages = {
        name: replace(entry, state="skipped", work=None) if entry.state in ("waiting", "running") else entry
        for name, entry in record.stages.items()
    }
    return replace(record, stages=stages)


def _fields(event: AnyEvent) -> dict[str, Any]:
    return {name: value for name, value in event if name not in ("event", "time_ms")}


def _with_entry(record: RefreshRecord, stage: str, **changes: Any) -> RefreshRecord:
    entry = replace(record.stages[stage], **changes)
    return replace(record, stages={**record.stages, stage: entry})
