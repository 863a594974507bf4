"""Running refresh (pipeline run), independent of Prefect: its plan, event log, slots and live servers, for all stages.

The Prefect flow decides the order and calls `build` for each stage, in threads.
"""

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from flows.launch import stage_process
from flows.ledger.events import (
    AnyEvent,
    FlowRunKnown,
    PlannedEntry,
    RefreshBegan,
    RefreshEnded,
    RefreshState,
    StageCached,
    StageFailed,
    StageWaits,
)
from flows.ledger.home import home, home_identity
from flows.ledger.machine import hardware, num_slots
from flows.ledger.process_identity import Heartbeat, ProcessIdentity
from flows.ledger.provenance import git_commit
from flows.ledger.record import HEARTBEAT_FILE, RefreshRecord, after
from flows.ledger.refreshes import close_interrupted, end_of, ledger_of, new_refresh_id
from flows.planning.devices import on_devices, wanted_slots
from flows.planning.plan import PlannedStage
from flows.running.comparison import TrialResources, conclude, run_trial
from flows.running.outcome import leave_report
from flows.running.request import PlannedRefresh
from flows.running.retries import Retries
from flows.running.runner import BuiltStage, Launcher, LiveServer, run_stage
from flows.running.slots import HeldSlots, Slots
from flows.running.stage_observer import Log, StageObserver, describe
from flows.running.validation import input_findings
from flows.store.ledgers import copy_ledger
from flows.tracking.shipper import Tracker
from stages.core.approval import AWAITED, REFUSED
from stages.core.errors import LifecycleError, RefreshStoppedError, error_classes
from stages.core.lines import print_line
from stages.kinds.check.config import InputProblem

COMPARISON_CLOSE_TIMEOUT_S = 120.0
"""Seconds to wait for a comparison to be copied to MLflow, since it is copied only at its end."""


class LiveServers:
    """Servers of a refresh's serve stages, kept while stages may use them. upstream: what each stage refers to."""

    def __init__(self, upstream: Mapping[str, Collection[str]]):
        self._upstream = upstream
        self._pending = set(upstream)
        self._servers: dict[str, tuple[LiveServer, HeldSlots]] = {}
        self._lock = threading.Lock()

    def keep(self, stage: str, server: LiveServer, slots: HeldSlots) -> None:
        """Keep a serve stage's server running, with the slots that it occupies, until no stage can use it any more."""
        with self._lock:
            self._servers[stage] = server, slots
        self._stop_unused()

    def serve(self, stages: Collection[str]) -> bool:
        """Return whether any server that the given serve stages started still runs."""
        with self._lock:
            return any(name in stages and server.alive() for name, (server, _) in self._servers.items())

    def done_with(self, stage: str) -> None:
        """Stop servers that no stage needs any more, now that `stage` is done or will never run."""
        with self._lock:
            self._pending.discard(stage)
        self._stop_unused()

    def stop_unusable(self, built: Collection[str]) -> None:
        """Stop servers that are dead, or useless now, to free slots. A stage whose server is gone starts its own."""

        def is_usable(name: str) -> bool:
            users = (self._upstream[stage] for stage in self._users(name))
            return self.serve([name]) and any(all(stage in built for stage in upstream) for upstream in users)

        self._stop([name for name in self._names() if not is_usable(name)])

    def stop_all(self) -> None:
        """Stop all servers; return when none of their processes is left."""
        self._stop(self._names())

    def _stop_unused(self) -> None:
        self._stop([name for name in self._names() if not self._users(name)])

    def _names(self) -> list[str]:
        with self._lock:
            return list(self._servers)

    def _users(self, name: str) -> list[str]:
        # A copy, since the threads of other stages remove their names meanwhile.
        return [stage for stage in self._pending.copy() if name in self._upstream[stage]]

    def _stop(self, names: Collection[str]) -> None:
        for name in names:
            with self._lock:
                # Taken out under the lock, so that only one thread stops it; the stop itself takes seconds.
                kept = self._servers.pop(name, None)
            if kept:
                server, slots = kept
                server.stop()
                slots.release()


class RefreshRun:
    """Refresh (pipeline run) in this process: it builds stages and records events in its ledger (event log)."""

    def __init__(self, planned: PlannedRefresh, refresh: str | None = None, launch: Launcher = stage_process.start):
        """Begin a planned refresh, with its first ledger event. refresh: a new name, or one with a ledger (a retry)."""
        # Before any attempt: it records where the killed attempts' parts of `metrics.jsonl` end.
        close_interrupted()
        recipe = planned.plan.recipe
        refresh = refresh or new_refresh_id(f"{recipe}-compare" if planned.comparison else recipe)
        self.plan = planned.plan
        self.comparison = planned.comparison
        self._launch = launch
        self.store = planned.store
        self.stop = threading.Event()
        self.built: dict[str, BuiltStage] = {}
        self.errors: dict[str, BaseException] = {}
        self._begun: set[str] = set()
        self._is_checked = not self.has_inputs_to_check
        self.ledger = ledger_of(refresh)
        self.tracker = Tracker(self.ledger)
        self.retries = Retries(self.store)
        self.slots = Slots(home() / "slots", num_slots())
        # A promotion reads its server's measurements and sends it no requests, so the server need not be kept for it.
        asking = (stage for stage in self.plan.stages.values() if stage.config.product != "verdict")
        self.servers = LiveServers({stage.name: stage.upstream for stage in asking})
        self._lock = threading.Lock()  # stages append events from threads of their own
        self._started_s = time.monotonic()
        earlier = self.ledger.read() if self.ledger.exists() else None
        home().mkdir(parents=True, exist_ok=True)
        began = _began(planned, refresh)
        self.ledger.append(began)
        self.record = after(earlier, began)
        if self.comparison:
            self.append(self.comparison.began)
        self._last_attempts = {attempt.began.stage: attempt.began.number for attempt in self.record.attempts.values()}
        self._heartbeat = Heartbeat(self.ledger.folder / HEARTBEAT_FILE)
        self._heartbeat.start()

    def build(self, name: str, attempt: int, log: Log) -> BuiltStage:
        """Run one stage whose upstream stages are built, holding enough of this machine's slots; wait for them first.

        attempt: number of this try's attempts at the stage, this one included. Raises what `run_stage` raises.
        """
        planned = self.plan.stages[name]
        # Retries are counted in this try of the refresh; the ledger numbers the attempts of all tries.
        is_retried = partial(self.retries.decide, planned, attempt)
        attempt += self._last_attempts.get(name, 0)
        held = self._acquire_slots(planned)
        started_s = time.monotonic()
        observer = StageObserver(name, self.record, self.append, log, is_retried)
        try:
            planned = on_devices(planned, held.numbers)
            built = run_stage(
                planned, self.built, self.store, observer, attempt=attempt, stop=self.stop, launch=self._launch
            )
        except BaseException as error:
            held.release()
            seconds = time.monotonic() - (observer.waited_until_s or started_s)
            self._note_failure(name, error, seconds, retried=is_retried(error))
            self._share_ledger(name)
            raise
        self._note_built(built)
        if built.server:
            # The slots stay held until the server is stopped.
            self.servers.keep(name, built.server, held)
        else:
            held.release()
        self.servers.done_with(name)
        self._share_ledger(name)
        return built

    def check_inputs(self, log: Log) -> None:
        """Check the inputs of all stages that will run, as far as those inputs exist by now.

        Raises the error of the first stage that cannot work; each is recorded as failed. A check that is itself cut
        short does not stop the refresh: stages check their inputs when their turn comes.
        """
        started_s = time.monotonic()
        folder = self.ledger.folder / "check"
        problems: dict[str, list[InputProblem]] = {}
        try:
            for findings in input_findings(self.plan.stages, self.built, self.store, folder, self._launch, self.stop):
                for unseen in findings.unseen:
                    log.warning(f"checked in part: stages.{unseen.stage}.{unseen.field}: {unseen.message}")
                for problem in findings.problems:
                    problems.setdefault(problem.stage, []).append(problem)
        # A LifecycleError, too, but no failure of the check.
        except RefreshStoppedError:
            raise
        except LifecycleError as failure:
            log.warning(f"inputs could not be checked before their stages' turns: {failure}")
        errors = {name: _as_error(of_stage) for name, of_stage in problems.items()}
        for name, error in errors.items():
            self._note_failure(name, error, time.monotonic() - started_s)
        for error in errors.values():
            raise error
        self._is_checked = True

    @property
    def has_inputs_to_check(self) -> bool:
        """Return whether any stage that will run has a check of its inputs, to be made before any stage trains."""
        return any(stage.config.HAS_CHECK and stage.action == "run" for stage in self.plan.stages.values())

    @contextmanager
    def whole_machine(self) -> Iterator[list[int]]:
        """Hold all slots of this machine, so that no other stage disturbs measurements. Yields the slot numbers."""
        held = self.slots.acquire(self.slots.count, self._stop_waiting)
        try:
            yield held.numbers
        finally:
            held.release()

    def measure(self, layout: int, round_number: int, devices: Sequence[int]) -> None:
        """Run one trial of a layout comparison, unless an earlier round of the same layout failed.

        Raises what is not the layout's fault, RefreshStoppedError when `stop` is set.
        """
        assert self.comparison
        if any(trial.error for trial in self.record.trials_of(layout)):
            return
        inputs = {name: built.artifact for name, built in self.built.items()}
        bench = TrialResources(self.store, inputs, self._launch, self.stop)
        work = self.ledger.folder / "trials" / f"{layout}-{round_number}"
        try:
            self.append(run_trial(bench, self.comparison, layout, round_number, devices, work))
        except BaseException as error:
            self.errors[self.comparison.began.stage] = error
            raise

    def append(self, event: AnyEvent) -> None:
        """Append an event to the refresh's ledger and apply it to the record in memory."""
        with self._lock:
            self.ledger.append(event)
            self.record = after(self.record, event)

    def _share_ledger(self, stage: str | None = None) -> None:
        """Copy the ledger, and the log of a stage's latest attempt, to the shared store, for other homes to read."""
        attempts = self.record.attempts_at(stage) if stage else []
        try:
            copy_ledger(self.store, self.ledger, attempts[-1] if attempts else None)
        except (LifecycleError, OSError) as error:  # the ledger here is whole, and is copied again at the next end
            print_line(f"warning: other homes do not see yet how this refresh goes: {error}")

    def begin(self, prefect_flow_run_id: str, prefect_run_count: int) -> None:
        """Record in the ledger which Prefect flow run runs this refresh, and how often Prefect has started it."""
        self.append(FlowRunKnown(prefect_flow_run_id=prefect_flow_run_id, prefect_run_count=prefect_run_count))

    def finish(self) -> RefreshRecord:
        """Stop servers, record the end, wait briefly for the copy to MLflow. A second call does no harm."""
        self.servers.stop_all()
        if self.record.state == "running":
            for attempt in self.record.attempts.values():
                if attempt.ended is None:  # its end could not be recorded: the disk was full
                    self.append(end_of(attempt, "killed", error="how it ended could not be recorded"))
            self.append(self._concluded(self._end()))
            self._share_ledger()
            if self.comparison:
                # A comparison is not shipped while it runs, since the shipper would disturb the measurements.
                self.tracker.close()
                self.tracker.start({})
                self.tracker.close(COMPARISON_CLOSE_TIMEOUT_S)
        self.tracker.close()
        self._heartbeat.stop()
        return self.record

    def _concluded(self, end: RefreshEnded) -> RefreshEnded:
        """Record a comparison's results, write the report, and return the end to record: failed without a report."""
        record = after(self.record, end)
        if self.comparison is None:
            leave_report(record, self.store)
            return end
        try:
            for measured in conclude(record, self.store):
                self.append(measured)
        except Exception as error:
            return end.model_copy(update={"state": "failed", "error": f"writing the report: {describe(error)}"})
        return end

    def _end(self) -> RefreshEnded:
        stages = self.record.stages
        failed = [name for name, entry in stages.items() if entry.state == "failed"]
        unfinished = any(entry.state not in ("built", "cached") for entry in stages.values())
        unfinished = unfinished or bool(self.comparison and self.comparison.is_unfinished(self.record))
        state: RefreshState = "completed"
        error = None
        # A stop that came when all was done changes nothing.
        if unfinished and self.stop.is_set():
            state, error = "cancelled", "stopped on request"
        elif unfinished and self.comparison and self.errors:
            state, error = "failed", describe(next(iter(self.errors.values())))
        elif not failed and any(entry.verdict == AWAITED for entry in stages.values()):
            # What stands on the promotion is skipped.
            state = "waiting_for_approval"
        elif unfinished:
            state, error = "failed", f"failed: {', '.join(failed)}" if failed else "some stages were not run"
        elif self.comparison and all(trial.error for trial in self.record.trials):
            state, error = "failed", "no layout could be measured"
        elif any(entry.verdict == REFUSED for entry in stages.values()):
            state = "not_promoted"
        return RefreshEnded(state=state, seconds=round(time.monotonic() - self._started_s, 2), error=error)

    def _acquire_slots(self, planned: PlannedStage) -> HeldSlots:
        """Wait until enough slots are free for a stage; ready stages with more dependents, bottlenecks, go first."""
        wanted = self._slots_of(planned)
        while wanted and self._is_preceded(planned.name):
            self._wait_for_slots(planned.name)
            time.sleep(Slots.POLL_S)
        held = self.slots.acquire(wanted, lambda: self._wait_for_slots(planned.name))
        # From here on it holds slots, and precedes no others that wait.
        self._begun.add(planned.name)
        return held

    def _is_preceded(self, name: str) -> bool:
        """Return whether another stage gets free slots first, because it could start now and has more dependents."""
        others = [other for other in self.plan.stages.values() if self._is_ready(other)]
        return any(self._num_dependents(other.name) > self._num_dependents(name) for other in others)

    def _is_ready(self, stage: PlannedStage) -> bool:
        """Return whether a stage could start: not begun, upstream stages built or, before the check, none."""
        is_open = self._is_checked or not stage.upstream
        return is_open and stage.name not in self._begun and self.built.keys() >= set(stage.upstream)

    def _num_dependents(self, name: str) -> int:
        return sum(name in stage.ancestors for stage in self.plan.stages.values())

    def _slots_of(self, planned: PlannedStage) -> int:
        """Return how many machine slots a stage needs; 0 if it is cached, or if its server already holds slots."""
        if planned.action == "cached" or self.servers.serve(planned.upstream):
            return 0
        return wanted_slots(planned.config, self.slots.count)

    def _stop_waiting(self) -> None:
        if self.stop.is_set():
            raise RefreshStoppedError("the comparison was waiting for the machine to be free when it was stopped")

    def _wait_for_slots(self, name: str) -> None:
        if self.stop.is_set():
            raise RefreshStoppedError(f"{name} was waiting for free slots when the refresh was stopped")
        if not self.record.stages[name].waits_for:
            self.append(StageWaits(stage=name, reason=f"free devices, of {self.slots.count}"))
        self.servers.stop_unusable(self.built.keys())

    def _note_built(self, built: BuiltStage) -> None:
        """Record that a stage's artifact exists; in the ledger only if it was cached, else its observer does that."""
        self.built[built.name] = built
        self.errors.pop(built.name, None)  # an error of an earlier attempt
        if built.state == "cached":
            seconds, attempt = round(built.seconds, 2), built.record.attempt
            self.append(StageCached(stage=built.name, artifact=built.artifact, attempt=attempt, seconds=seconds))

    def _note_failure(self, name: str, error: BaseException, seconds: float, *, retried: bool = False) -> None:
        """Record a stage's failure in the ledger, unless the observer of its attempt has recorded it already."""
        self.errors[name] = error
        entry, reason, error_class = self.record.stages[name], describe(error), type(error).__name__
        is_noted = entry.state in (("waiting",) if retried else ("failed", "cancelled")) and entry.error == reason
        if not is_noted:
            seconds = round(seconds, 2)
            self.append(
                StageFailed(stage=name, seconds=seconds, error=reason, error_class=error_class, retried=retried)
            )
        if not retried:
            self.servers.done_with(name)


def _as_error(problems: Sequence[InputProblem]) -> LifecycleError:
    lines = [f"stages.{one.stage}.{one.field}: {one.message}" for one in problems]
    return error_classes()[problems[0].error]("\n".join(lines))


def _began(planned: PlannedRefresh, refresh: str) -> RefreshBegan:
    request = planned.request
    return RefreshBegan(
        refresh=refresh,
        recipe=planned.plan.recipe,
        recipe_path=Path(request.recipe).absolute(),
        recipe_text=planned.recipe_text,
        overrides=request.overrides,
        until=request.until,
        force=request.force,
        process=ProcessIdentity.own(),
        home=home_identity(),
        hardware=hardware(),
        git_commit=git_commit(),
        stages={
            name: PlannedEntry(kind=stage.kind, version=stage.version, reason=stage.reason, upstream=stage.upstream)
            for name, stage in planned.plan.stages.items()
        },
    )
