"""State of a refresh, its stages and their attempts, computed from its event log (ledger) by pure functions."""

import functools
from collections import Counter
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
    PromotionDecided,
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
from stages.core.approval import AWAITED, REFUSED, VERDICT_TAG, read_result
from stages.core.contract import StageResult

StageState = Literal["waiting", "running", "built", "cached", "failed", "cancelled", "skipped"]
StageEvent = AttemptBegan | AttemptEnded | StageWaits | StageCached | StageFailed
STATES: dict[str, StageState] = {"stage_cached": "cached", "stage_failed": "failed"}
"""State of a stage after an event that belongs to no attempt to run the stage, by the event's name."""
STOPPED = ("RefreshStoppedError", "KeyboardInterrupt")
"""Error classes of stages that were stopped on request; old versions of this program recorded them as killed."""
ANOTHER_TRY = "another try"
KILLED = "its process was killed"
COPIED = "this home was copied while it ran; how it ended, only the original home knows"
"""Error text of a refresh whose home was copied meanwhile; `KILLED`: its process died. Ledgers hold both texts."""
HEARTBEAT_FILE, LEDGER_FILE = "heartbeat", "ledger.jsonl"


@dataclass(frozen=True)
class StageEntry:
    """State of one stage within a refresh: its plan, progress, outcome, artifact and error.

    reason: why the plan builds it or not. waits_for: what it waits for, once its upstream stages are done. work: its
    work folder while it runs. attempt: key (`REFRESH/STAGE-NUMBER`) of the attempt that runs, failed, or built the
    artifact, in whichever refresh. error: why it failed, or, while it waits, why it is tried again. killed: a process
    of that attempt was killed.
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
        """Return the final metrics, tags and files; of a cached stage, from its artifact, empty if that is gone."""
        if self.built or not self.artifact:
            return self.built or StageResult()
        return final_result(self.artifact)

    @property
    def metrics(self) -> dict[str, float]:
        return self.result.metrics

    @property
    def verdict(self) -> str | None:
        """Return a promote stage's decision, such as `promoted` or `waiting for approval`; None for other stages."""
        return self.result.tags.get(VERDICT_TAG)


@dataclass(frozen=True)
class AttemptRecord:
    """Attempt to run a stage, as the events of its start and end; `ended` is None until that is recorded."""

    began: AttemptBegan
    ended: AttemptEnded | None = None

    @property
    def name(self) -> str:
        """Return the name of this attempt to run a stage, `STAGE-NUMBER`, which is unique within the refresh."""
        return f"{self.began.stage}-{self.began.number}"

    @property
    def outcome(self) -> Outcome | None:
        if self.ended and self.ended.error_class in STOPPED:
            return "cancelled"
        return self.ended.outcome if self.ended else None

    @property
    def folder(self) -> Path:
        """Return the folder of a stage attempt's files: its work folder until it ends, then usually the artifact."""
        return self.ended.folder if self.ended else self.began.work

    @property
    def last_byte(self) -> int | None:
        """Return how many bytes the stage's metrics file had when this attempt ended; None while the stage runs."""
        return self.ended.last_byte if self.ended else None

    @property
    def seconds(self) -> float | None:
        return (self.ended.time_ms - self.began.time_ms) / 1000 if self.ended else None

    @property
    def metrics(self) -> dict[str, float]:
        """Return this stage attempt's final metrics, with its run time as `stage_time_s`; empty unless finished."""
        if self.ended and self.ended.outcome == "finished":
            return {**self.ended.metrics, "stage_time_s": self.ended.seconds}
        return {}

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags with which MLflow records this attempt to run the stage."""
        return {**self.began.tags, **(self.ended.tags if self.ended else {})}


@dataclass(frozen=True)
class RefreshRecord:
    """State of a refresh, computed from its event log: request, plan, stages, attempts and outcome.

    num_tries: times that it was started; a retry continues in the same ledger. seconds: of the latest try.
    prefect_run_count: times that Prefect had started the flow run when the latest try began.
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
    """Attempts to run stages, by name (`STAGE-NUMBER`), oldest first, those of earlier tries included."""
    comparison: CompareBegan | None = None
    trials: tuple[TrialEnded, ...] = ()
    measured: dict[int, LayoutMeasured] = field(default_factory=dict)
    """Measured metrics of a comparison's layouts, by the layout's index."""

    @property
    def is_copied(self) -> bool:
        """Return whether the refresh was started in another lifecycle home, of which this one is a copy."""
        return self.home is not None and not self.home.is_here()

    @property
    def standing(self) -> Standing:
        """Return whether the refresh's process is alive, dead or invisible from this machine.

        In a copied home it counts as dead, and on another host once it has given no sign of life for long.
        """
        if self.is_copied:
            return "dead"
        standing, folder = self.process.standing(), ledger_root() / self.refresh
        if standing == "foreign" and is_silent(self.process, folder / HEARTBEAT_FILE, folder / LEDGER_FILE):
            return "dead"
        return standing

    @property
    def interrupted(self) -> bool:
        """Return whether the process of the refresh died without recording how the refresh ended."""
        return self.state == "running" and self.standing == "dead"

    @property
    def elsewhere(self) -> str | None:
        """Return the host on which the refresh may still run, invisible from here; None when its state is known."""
        unknown = self.state == "running" and self.standing == "foreign"
        return self.process.host or "another host" if unknown else None

    @property
    def unsaid_end(self) -> str | None:
        """Return the error of a refresh that was killed, or whose home was copied while it ran; else None."""
        if self.interrupted:
            return COPIED if self.is_copied else KILLED
        return self.error if self.error in (KILLED, COPIED) else None

    @property
    def killed(self) -> bool:
        """Return whether the refresh's process died, or its lifecycle home was copied, before its end was recorded."""
        return self.unsaid_end is not None

    @property
    def nothing_new(self) -> bool:
        """Return whether the refresh built nothing, since all its stages were cached."""
        cached = all(entry.state == "cached" for entry in self.stages.values())
        return self.state == "completed" and cached and not self.comparison

    @property
    def latest_try(self) -> list[AttemptRecord]:
        """Return the attempts to run stages since the refresh was last started or retried, oldest first."""
        return [attempt for attempt in self.attempts.values() if attempt.began.time_ms >= self.started_ms]

    @property
    def state_counts(self) -> str:
        """Number of stages in each state, such as `3 cached, 1 failed`."""
        counts = Counter(entry.state for entry in self.stages.values())
        return ", ".join(f"{count} {state}" for state, count in counts.items())

    def attempts_at(self, stage: str) -> list[AttemptRecord]:
        return [attempt for attempt in self.attempts.values() if attempt.began.stage == stage]

    def trials_of(self, layout: int) -> list[TrialEnded]:
        return [trial for trial in self.trials if trial.layout == layout]

    def key_of(self, stage: str, number: int) -> str:
        """Return the key of an attempt to run a stage, `REFRESH/STAGE-NUMBER`, by which artifacts refer to it."""
        return f"{self.refresh}/{stage}-{number}"


def fold(events: Iterable[AnyEvent]) -> RefreshRecord:
    """Return the state of a refresh after all its events, the first of which must be its start."""
    record = None
    for event in events:
        record = after(record, event)
    assert record is not None, "a ledger is made with its first event"
    return record


def after(record: RefreshRecord | None, event: AnyEvent) -> RefreshRecord:
    """Return the state of a refresh after one more event of its log."""
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
        case PromotionDecided():
            return _decided(record, event)
        case RefreshKilled():
            # Not so if a retry has begun in another process before this event was written.
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
            # What the event lacks is cleared: a cached stage has lost the error of an earlier try.
            fields = {"work": None, "error": None, "error_class": None, "killed": False, **_fields(event)}
            if fields.pop("retried", False):
                return _with_entry(record, fields.pop("stage"), state="waiting", waits_for=ANOTHER_TRY, **fields)
            state = "cancelled" if fields["error_class"] in STOPPED else STATES[event.event]
            return _with_entry(record, fields.pop("stage"), state=state, **fields)


def with_time_so_far(record: RefreshRecord, now_ms: int) -> RefreshRecord:
    """Return the state with running stages' times up to now; the ledger has a stage's seconds only at its end."""
    if record.state != "running" or record.interrupted:
        return record
    # Of several attempts at a stage, the last one counts.
    began_ms = {attempt.began.stage: attempt.began.time_ms for attempt in record.attempts.values()}
    stages = {
        name: replace(entry, seconds=(now_ms - began_ms[name]) / 1000) if entry.state == "running" else entry
        for name, entry in record.stages.items()
    }
    return replace(record, seconds=(now_ms - record.started_ms) / 1000, stages=stages)


def final_result(folder: Path) -> StageResult:
    """Return the final metrics, tags and files of an artifact's stage (`result.json`); empty when the file is gone."""
    try:
        return read_result(folder)
    except (OSError, ValueError):
        return StageResult()


def _begun(record: RefreshRecord | None, event: RefreshBegan) -> RefreshRecord:
    stages = {name: StageEntry(**vars(entry)) for name, entry in event.stages.items()}
    begun = RefreshRecord(**{**_fields(event), "stages": stages}, started_ms=event.time_ms)
    # Of the earlier tries only the attempts stay; stages have the state of the new plan.
    return replace(begun, num_tries=record.num_tries + 1, attempts=record.attempts) if record else begun


def _attempt_begun(record: RefreshRecord, event: AttemptBegan) -> RefreshRecord:
    attempt = AttemptRecord(event)
    record = replace(record, attempts={**record.attempts, attempt.name: attempt})
    key = record.key_of(event.stage, event.number)
    changes = {"work": event.work, "attempt": key, "error": None, "error_class": None, "killed": False}
    return _with_entry(record, event.stage, state="running", **changes)


def _attempt_ended(record: RefreshRecord, event: AttemptEnded) -> RefreshRecord:
    """Record an attempt's end, only the first: several processes may close the ledger of a dead one."""
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


def _decided(record: RefreshRecord, event: PromotionDecided) -> RefreshRecord:
    """Return the state after a decision about a promotion; the refresh itself goes on only with a retry."""
    result = record.stages[event.stage].result
    result = result.model_copy(update={"tags": {**result.tags, **event.tags}})
    record = _with_entry(record, event.stage, built=result)
    verdicts = {entry.verdict for entry in record.stages.values()}
    if record.state != "waiting_for_approval" or AWAITED in verdicts:
        return record
    return replace(record, state="not_promoted" if REFUSED in verdicts else "completed")


def _over(record: RefreshRecord) -> RefreshRecord:
    """Return the state of a refresh after its end, with its unfinished stages marked as skipped."""
    stages = {
        name: replace(entry, state="skipped", work=None) if entry.state in ("waiting", "running") else entry
        for name, entry in record.stages.items()
    }
    return replace(record, stages=stages)


def _fields(event: AnyEvent) -> dict[str, Any]:
    # Not `model_dump`, which would turn nested models into dicts.
    return {name: value for name, value in event if name not in ("event", "time_ms")}


def _with_entry(record: RefreshRecord, stage: str, **changes: Any) -> RefreshRecord:
    entry = replace(record.stages[stage], **changes)
    return replace(record, stages={**record.stages, stage: entry})
