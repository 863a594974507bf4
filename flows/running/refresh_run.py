"""One refresh while it runs: plan, record, slots, live servers. What every stage of it shares; knows no Prefect.

The Prefect flow decides the order and calls `build` for each stage, in threads.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flows.launch import choice
from flows.ledger.history import (
    RefreshRecord,
    RefreshState,
    ShippedAttempt,
    StageEntry,
    close_interrupted,
    folder_of,
    new_refresh_id,
    now_ms,
)
from flows.ledger.home import home, store_root
from flows.ledger.machine import hardware, num_slots
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.provenance import git_commit
from flows.planning.devices import check_devices, on_devices, wanted_slots
from flows.planning.layout_choice import choose_layouts
from flows.planning.outside import resolve_outside
from flows.planning.plan import Plan, PlannedStage, chosen_stages, plan
from flows.recipe.recipe import load_recipe
from flows.running.live_servers import LiveServers
from flows.running.runner import Built, Launcher, run_stage
from flows.running.slots import HeldSlots, Slots
from flows.running.stage_observer import Log, StageObserver, describe
from flows.store.store import Store
from flows.tracking.tracker import Tracker
from stages.core.errors import RefreshStoppedError


@dataclass(frozen=True)
class RefreshRequest:
    """What a person asks for; JSON-able, so that it can be the parameters of a Prefect deployment."""

    recipe: str
    overrides: tuple[str, ...] = ()
    until: str | None = None
    force: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedRefresh:
    """A request, and what it comes to."""

    request: RefreshRequest
    plan: Plan
    store: Store
    notes: tuple[str, ...] = ()
    """What was decided for the recipe: the layouts that `auto` became."""


class RefreshRun:
    """A refresh as planned. Its record is written at every change of a stage's state."""

    def __init__(self, planned: PlannedRefresh, refresh: str | None = None, launch: Launcher = choice.start):
        """Begin the record of the refresh; default of its name: a new one. One that exists goes on: this is a retry."""
        close_interrupted()
        refresh = refresh or new_refresh_id(planned.plan.recipe)
        self.plan = planned.plan
        self._launch = launch
        self.store = planned.store
        self.stop = threading.Event()
        self.built: dict[str, Built] = {}
        self.errors: dict[str, BaseException] = {}
        self._begun: set[str] = set()
        self.folder = folder_of(refresh)
        self.tracker = Tracker(self.folder)
        self.slots = Slots(home() / "slots", num_slots())
        self.servers = LiveServers({stage.name: stage.upstream for stage in self.plan.stages.values()})
        self._lock = threading.Lock()
        self._started_s = time.monotonic()
        self._earlier_attempts = Counter(attempt.stage for attempt in self.folder.attempts())
        num_tries = self.folder.read().num_tries + 1 if self.folder.exists() else 1
        self._record = _new_record(planned.request, refresh, planned.plan, num_tries)
        self.folder.write(self._record)

    @property
    def record(self) -> RefreshRecord:
        """The record as it is now."""
        return self._record

    def build(self, name: str, attempt: int, log: Log) -> Built:
        """Run one stage whose upstream stages are built, holding its slots. Raises what `run_stage` raises.

        attempt: how often this try of the refresh has tried the stage, this time included.
        """
        planned = self.plan.stages[name]
        attempt += self._earlier_attempts[name]
        started_s = time.monotonic()
        held = self._acquire_slots(planned)
        try:
            planned = on_devices(planned, held.numbers)
            observer = self._observer(name, log)
            built = run_stage(
                planned, self.built, self.store, observer, attempt=attempt, stop=self.stop, launch=self._launch
            )
        except BaseException as error:
            held.release()
            self._note_failure(name, error, time.monotonic() - started_s)
            raise
        self._note_built(built)
        if built.server:
            self.servers.keep(name, built.server, held)
        else:
            held.release()
        self.servers.done_with(name)
        return built

    def update(self, name: str, **changes: object) -> None:
        """Change the record of one stage."""
        with self._lock:
            entry = self._record.stages[name].model_copy(update=changes)
            self._record = self._record.model_copy(update={"stages": {**self._record.stages, name: entry}})
            self.folder.write(self._record)

    def begin(self, prefect_flow_run_id: str, prefect_run_count: int) -> None:
        """Note which Prefect flow run this is, and how often Prefect has started it."""
        changes = {"prefect_flow_run_id": prefect_flow_run_id, "prefect_run_count": prefect_run_count}
        with self._lock:
            self._record = self._record.model_copy(update=changes)
            self.folder.write(self._record)

    def finish(self) -> RefreshRecord:
        """Stop servers, settle every state, wait a little for MLflow. May be called again."""
        self.servers.stop_all()
        with self._lock:
            if self._record.state == "running":
                self._record = self._settled()
                self.folder.write(self._record)
        shipped = self.tracker.close()
        with self._lock:
            self._record = _with_mlflow_runs(self._record, shipped.attempts)
            self.folder.write(self._record)
        return self._record

    def _observer(self, name: str, log: Log) -> StageObserver:
        return StageObserver(self._record, self.folder, self.tracker, log, functools.partial(self.update, name))

    def _settled(self) -> RefreshRecord:
        stages = {
            name: entry.model_copy(update={"state": "skipped"}) if entry.state in ("waiting", "running") else entry
            for name, entry in self._record.stages.items()
        }
        failed = [name for name, entry in stages.items() if entry.state == "failed"]
        unfinished = [name for name, entry in stages.items() if entry.state in ("failed", "skipped")]
        state: RefreshState = "cancelled" if self.stop.is_set() and unfinished else "completed"
        error = None
        if state == "cancelled":
            error = "stopped on request"
        elif unfinished:
            state = "failed"
            error = f"failed: {', '.join(failed)}" if failed else "some stages were not run"
        elif any(entry.verdict == "not promoted" for entry in stages.values()):
            state = "not_promoted"
        seconds = round(time.monotonic() - self._started_s, 2)
        return self._record.model_copy(update={"stages": stages, "state": state, "seconds": seconds, "error": error})

    def _acquire_slots(self, planned: PlannedStage) -> HeldSlots:
        """Wait for slots, and for stages that more depends on: they are what the refresh takes longest for."""
        wanted = self._slots_of(planned)
        while wanted and self._is_preceded(planned.name):
            self._wait_for_slots(planned.name)
            time.sleep(Slots.POLL_S)
        held = self.slots.acquire(wanted, lambda: self._wait_for_slots(planned.name))
        self._begun.add(planned.name)
        return held

    def _is_preceded(self, name: str) -> bool:
        """Whether a stage that more stages depend on could start now too."""
        others = [other for other in self.plan.stages.values() if self._is_ready(other)]
        return any(self._num_dependents(other.name) > self._num_dependents(name) for other in others)

    def _is_ready(self, stage: PlannedStage) -> bool:
        return stage.name not in self._begun and self.built.keys() >= set(stage.upstream)

    def _num_dependents(self, name: str) -> int:
        return sum(name in stage.ancestors for stage in self.plan.stages.values())

    def _slots_of(self, planned: PlannedStage) -> int:
        """None for a cached stage, nor for one whose server runs already: that server holds its own."""
        if planned.action == "cached" or self.servers.serve(planned.upstream):
            return 0
        return wanted_slots(planned.config, self.slots.count)

    def _wait_for_slots(self, name: str) -> None:
        if self.stop.is_set():
            raise RefreshStoppedError(f"{name} was waiting for free slots when the refresh was stopped")
        self.servers.stop_unusable(self.built.keys())

    def _note_built(self, built: Built) -> None:
        self.built[built.name] = built
        self.update(
            built.name,
            state=built.state,
            seconds=round(built.seconds, 2),
            artifact=built.artifact,
            work=None,
            metrics=built.metrics,
            mlflow_run_id=built.mlflow_run_id,
            verdict=built.record.tags.get("verdict"),
            error=None,
            error_class=None,
        )

    def _note_failure(self, name: str, error: BaseException, seconds: float) -> None:
        self.errors[name] = error
        self.update(
            name,
            state="failed",
            seconds=round(seconds, 2),
            work=None,
            error=describe(error),
            error_class=type(error).__name__,
        )
        self.servers.done_with(name)


def retry_of(record: RefreshRecord) -> RefreshRequest:
    """What to ask for so that a refresh goes on where it ended: what it had been forced to build stays built."""
    built = [name for name, entry in record.stages.items() if entry.state in ("built", "cached")]
    force = tuple(name for name in record.force if name not in built)
    return RefreshRequest(str(record.recipe_path), record.overrides, record.until, force)


def make_plan(request: RefreshRequest, *, may_be_unreachable: bool = False) -> PlannedRefresh:
    """What a refresh would run.

    may_be_unreachable: plan as far as possible when a hub does not answer, instead of raising TransientError.
    Raises what `load_recipe`, `resolve_outside` and `plan` raise, and `ResourceError` when there are too few GPUs.
    """
    recipe = load_recipe(Path(request.recipe), request.overrides)
    store = Store(store_root())
    unreachable: dict[str, str] = {}
    chosen = chosen_stages(recipe, request.until)
    outside = resolve_outside(recipe, chosen, unreachable if may_be_unreachable else None)
    index = store.index()
    recipe, choices = choose_layouts(recipe, outside, index)
    planned = plan(recipe, outside, index, force=request.force, until=request.until, unreachable=unreachable)
    check_devices(planned)
    return PlannedRefresh(request, planned, store, tuple(map(str, choices)))


def _new_record(request: RefreshRequest, refresh: str, planned: Plan, num_tries: int) -> RefreshRecord:
    stages = {
        name: StageEntry(kind=stage.kind, version=stage.version, reason=stage.reason)
        for name, stage in planned.stages.items()
    }
    return RefreshRecord(
        refresh=refresh,
        recipe=planned.recipe,
        recipe_path=Path(request.recipe).absolute(),
        overrides=request.overrides,
        until=request.until,
        force=request.force,
        num_tries=num_tries,
        started_ms=now_ms(),
        process=ProcessIdentity.own(),
        hardware=hardware(),
        git_commit=git_commit(),
        stages=stages,
    )


def _with_mlflow_runs(record: RefreshRecord, attempts: Mapping[str, ShippedAttempt]) -> RefreshRecord:
    """The record, with the runs of attempts that MLflow got to know after they had begun."""
    runs = {key.rpartition("-")[0]: shipped.run_id for key, shipped in attempts.items()}
    stages = {
        name: entry.model_copy(update={"mlflow_run_id": entry.mlflow_run_id or runs.get(name)})
        for name, entry in record.stages.items()
    }
    return record.model_copy(update={"stages": stages})
