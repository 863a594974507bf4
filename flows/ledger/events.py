"""What happens in a refresh, as the lines of its ledger: each event is written once, when it happens, by the flow.

What a stage itself says (`result.json`, `metrics.jsonl`, `events.jsonl`) stays in its folder; an event of the ledger
says where that is.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from flows.ledger.home import HomeIdentity
from flows.ledger.process_identity import ProcessIdentity
from stages.core.contract import StrictModel

Outcome = Literal["finished", "failed", "cancelled", "killed"]
"""`cancelled`: on request; `killed`: a process of it, or of the refresh, died before it could say how it ended."""
RefreshState = Literal["running", "completed", "not_promoted", "failed", "cancelled"]


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class Event(StrictModel):
    """When it happened."""

    time_ms: int = Field(default_factory=now_ms)


class PlannedEntry(StrictModel):
    """A stage of the plan that a refresh follows, and why it is built or not. upstream: stages that it refers to."""

    kind: str
    version: str
    reason: str = ""
    upstream: tuple[str, ...] = ()


class RefreshBegan(Event):
    """A refresh starts, or, as another try, starts again: what was asked for, by which process, and the plan.

    recipe_text: of the file as it was then, without secrets and without `overrides`; empty in earlier ledgers.
    home: where it runs; None in earlier ledgers.
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
    """Which Prefect flow run the refresh is. prefect_run_count: how often Prefect has started it by now."""

    event: Literal["flow_run_known"] = "flow_run_known"
    prefect_flow_run_id: str
    prefect_run_count: int


class StageWaits(Event):
    """A stage cannot go on yet."""

    event: Literal["stage_waits"] = "stage_waits"
    stage: str
    reason: str


class AttemptBegan(Event):
    """A try at building a stage starts. first_byte: where its part of the `metrics.jsonl` in `work` begins.

    num_devices: that it keeps busy, on all nodes together; None in earlier ledgers.
    """

    event: Literal["attempt_began"] = "attempt_began"
    stage: str
    number: int
    work: Path
    first_byte: int
    num_devices: int | None = None
    params: dict[str, str]
    tags: dict[str, str]


class AttemptEnded(Event):
    """How a try ended. folder: where its files are now; last_byte: where its part of `metrics.jsonl` ends.

    metrics, tags, files: what the stage's `result.json` said. seconds: that its process ran; 0 if nobody measured it.
    energy_j: joules that its GPUs used; None where nobody measured that. retried: the refresh tries the stage again.
    """

    event: Literal["attempt_ended"] = "attempt_ended"
    stage: str
    number: int
    outcome: Outcome
    folder: Path
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
    """A stage's artifact was there. attempt: the key of the attempt that built it, None for an adopted artifact."""

    event: Literal["stage_cached"] = "stage_cached"
    stage: str
    artifact: Path
    attempt: str | None
    seconds: float


class StageFailed(Event):
    """A stage failed outside any attempt: while it waited, or on what an attempt had left. retried: see above."""

    event: Literal["stage_failed"] = "stage_failed"
    stage: str
    seconds: float
    error: str
    error_class: str
    retried: bool = False


class LayoutEntry(StrictModel):
    """A layout that is compared. `params` and `tags` are those that a run of the stage under it has in MLflow.

    `refused`: why it cannot work, and so is not tried; such layouts come last.
    """

    text: str
    engine: str
    num_devices: int
    global_batch_size: int
    params: dict[str, str]
    tags: dict[str, str]
    refused: str | None = None


class CompareBegan(Event):
    """The refresh does not build its last stage, but compares layouts of it: for so many steps, in so many rounds."""

    event: Literal["compare_began"] = "compare_began"
    stage: str
    num_steps: int
    num_warmup_steps: int
    num_rounds: int
    layouts: tuple[LayoutEntry, ...]


class TrialEnded(Event):
    """One layout, by its place among the layouts, was run for one round, counted from 1.

    Its steps are in the `metrics.jsonl` of `work`; metrics, tags: what the stage's `result.json` said.
    """

    event: Literal["trial_ended"] = "trial_ended"
    layout: int
    round: int
    work: Path
    seconds: float
    metrics: dict[str, float] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    error: str | None = None
    error_class: str | None = None


class LayoutMeasured(Event):
    """What all rounds of a layout come to, or why there is nothing."""

    event: Literal["layout_measured"] = "layout_measured"
    layout: int
    metrics: dict[str, float]
    error: str | None


class RefreshEnded(Event):
    """How a try of the refresh ended; seconds: of this try."""

    event: Literal["refresh_ended"] = "refresh_ended"
    state: RefreshState
    seconds: float
    error: str | None = None


class RefreshKilled(Event):
    """Written by another process, which found that this one had died. It says nothing of a later try.

    copied: it may live, but in another home, of which this one is a copy.
    """

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
    | RefreshKilled,
    Field(discriminator="event"),
]
ANY_EVENT: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)
