"""Events of a refresh, which are the lines of its event log (ledger), each written once, when it happens.

What a stage itself writes (`result.json`, `metrics.jsonl`, `events.jsonl`) stays in its folder; events say where.
"""

import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from flows.ledger.home import HomeIdentity, in_this_home
from flows.ledger.process_identity import ProcessIdentity
from stages.core.contract import StrictModel

Outcome = Literal["finished", "failed", "cancelled", "killed"]
"""Outcome of an attempt to run a stage. cancelled: on request. killed: a process died before it noted its end."""
RecordedFolder = Annotated[Path, AfterValidator(in_this_home)]
"""Folder of a stage's files in the lifecycle home; read where it is now, if the home was moved or copied since."""
RefreshState = Literal["running", "completed", "not_promoted", "waiting_for_approval", "failed", "cancelled"]


def now_ms() -> int:
    """Return the present time in milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


class Event(StrictModel):
    """Base class of all events in a refresh's event log, with the time at which the event happened."""

    time_ms: int = Field(default_factory=now_ms)


class PlannedEntry(StrictModel):
    """Planned stage of a refresh: kind, version, the stages that it refers to, and why it is built or reused."""

    kind: str
    version: str
    reason: str = ""
    upstream: tuple[str, ...] = ()


class RefreshBegan(Event):
    """Event: a refresh was started or retried, with the user's request, the process and the plan.

    recipe_text: the recipe file's text at the time, without secrets and `overrides`; empty in old ledgers. home: None
    in old ledgers.
    """

    event: Literal["refresh_began"] = "refresh_began"
    refresh: str
    recipe: str
    recipe_path: Path
    recipe_text: str = ""
    overrides: tuple[str, ...] = ()
    until: str | None = None
    force: tuple[str, ...] = ()
    process: ProcessIdentity
    home: HomeIdentity | None = None
    hardware: str
    git_commit: str | None
    stages: dict[str, PlannedEntry]


class FlowRunKnown(Event):
    """Event: the refresh's flow run in Prefect is known, and how often Prefect has started it so far."""

    event: Literal["flow_run_known"] = "flow_run_known"
    prefect_flow_run_id: str
    prefect_run_count: int


class StageWaits(Event):
    """Event: a stage must wait before it can start or continue; `reason` says for what."""

    event: Literal["stage_waits"] = "stage_waits"
    stage: str
    reason: str


class AttemptBegan(Event):
    """Event: an attempt to run a stage began, whose part of `metrics.jsonl` begins at `first_byte`.

    num_devices: devices that the attempt keeps busy, on all nodes together; None in old ledgers.
    """

    event: Literal["attempt_began"] = "attempt_began"
    stage: str
    number: int
    work: RecordedFolder
    first_byte: int
    num_devices: int | None = None
    params: dict[str, str]
    tags: dict[str, str]


class AttemptEnded(Event):
    """Event: an attempt to run a stage ended, with its outcome, metrics and files.

    folder: where the attempt's files are now. last_byte: position in `metrics.jsonl` at which its part ends. seconds:
    run time of its process; 0 if not measured. metrics, tags, files: from the stage's `result.json`. energy_j: joules
    that its GPUs used; None if not measured. retried: the refresh tries the stage again.
    """

    event: Literal["attempt_ended"] = "attempt_ended"
    stage: str
    number: int
    outcome: Outcome
    folder: RecordedFolder
    last_byte: int
    seconds: float = 0.0
    metrics: dict[str, float] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    files: tuple[str, ...] = ()
    error: str | None = None
    error_class: str | None = None
    energy_j: float | None = None
    retried: bool = False


class StageCached(Event):
    """Event: a stage was not run, since its artifact exists. attempt: key of the one that built it; None if adopted."""

    event: Literal["stage_cached"] = "stage_cached"
    stage: str
    artifact: RecordedFolder
    attempt: str | None
    seconds: float


class StageFailed(Event):
    """Event: a stage failed outside an attempt, such as while it waited. retried: the refresh tries the stage again."""

    event: Literal["stage_failed"] = "stage_failed"
    stage: str
    seconds: float
    error: str
    error_class: str
    retried: bool = False


class LayoutEntry(StrictModel):
    """Parallel layout in a layout comparison: one to measure, or one that was refused beforehand as impossible.

    params, tags: those of its runs in MLflow. refused: why it cannot work; such layouts come last.
    """

    text: str
    engine: str
    num_devices: int
    global_batch_size: int
    params: dict[str, str]
    tags: dict[str, str]
    refused: str | None = None


class CompareBegan(Event):
    """Event: a comparison of layouts began, which runs some training steps of `stage` under each layout, in rounds."""

    event: Literal["compare_began"] = "compare_began"
    stage: str
    num_steps: int
    num_warmup_steps: int
    num_rounds: int
    layouts: tuple[LayoutEntry, ...]


class TrialEnded(Event):
    """Event: one layout's run in one round (from 1) of a layout comparison ended.

    layout: its index. work: folder whose `metrics.jsonl` holds the steps. metrics, tags: from `result.json`.
    """

    event: Literal["trial_ended"] = "trial_ended"
    layout: int
    round: int
    work: RecordedFolder
    seconds: float
    metrics: dict[str, float] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    error: str | None = None
    error_class: str | None = None


class LayoutMeasured(Event):
    """Event: a layout's metrics over all rounds of a comparison are known, or the reason why there are none."""

    event: Literal["layout_measured"] = "layout_measured"
    layout: int
    metrics: dict[str, float]
    error: str | None


class RefreshEnded(Event):
    """Event: a refresh, or a retry of it, ended after `seconds`."""

    event: Literal["refresh_ended"] = "refresh_ended"
    state: RefreshState
    seconds: float
    error: str | None = None


class PromotionDecided(Event):
    """Event: a person decided on a promotion for which the refresh had ended, or the time for that was over.

    tags: those of the promotion's result that the decision replaces.
    """

    event: Literal["promotion_decided"] = "promotion_decided"
    stage: str
    tags: dict[str, str]


class RefreshKilled(Event):
    """Event: another process noticed a refresh's death. copied: it may live, in the home that this one copies."""

    event: Literal["refresh_killed"] = "refresh_killed"
    process: ProcessIdentity
    copied: bool = False


AnyEvent = Annotated[
    RefreshBegan
    | FlowRunKnown
    | StageWaits
    | AttemptBegan
    | AttemptEnded
    | StageCached
    | StageFailed
    | CompareBegan
    | TrialEnded
    | LayoutMeasured
    | RefreshEnded
    | PromotionDecided
    | RefreshKilled,
    Field(discriminator="event"),
]
ANY_EVENT: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent, config=ConfigDict(defer_build=True))
